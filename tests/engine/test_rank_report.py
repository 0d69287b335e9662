"""The report on ranks, for every architecture: its figures add up to those of one rank that has everything."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.watching import request, run

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.config import EngineConfig
from allotrope.engine.engine import Engine
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.engine.planning.rank_report import SIZES, RankReport, WeightShare, rank_sizes, report_ranks
from allotrope.errors import ModelError
from allotrope.layers.parallel import Parallel, placement_of
from allotrope.layers.weights import packed_bytes
from allotrope.request import SamplingParams

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def config(directory: Path, name: str, more: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    tiny = find_architecture({"architectures": [name]}, "").tiny() | (more or {})
    (directory / "config.json").write_text(json.dumps(tiny))
    shared = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "max_num_seqs": 3}
    return EngineConfig(model=str(directory), **{**shared, **options})


def reported(directory: Path, name: str, ranks: int, more: dict[str, Any] | None = None, **options: Any) -> RankReport:
    return report_ranks(config(directory, name, more, tensor_parallel_size=ranks, **options))


def held(load_plans: list[LoadPlan]) -> tuple[WeightShare, int]:
    """What the first rank has, by counting for each row of each tensor the ranks that have it, and the bytes of all
    rows, each counted once."""
    holders: dict[tuple[str, int], Counter[int]] = {}
    rows: dict[tuple[str, int], tuple[range, int, bool]] = {}
    for load_plan in load_plans:
        parallel = load_plan.build.parallel
        for name, parameter in load_plan.meta_model.named_parameters():
            placement = placement_of(parameter)
            row = packed_bytes(parameter) // placement.local(parallel)
            for index, section in enumerate(placement.sections):
                has = range(*section.bounds(parallel))
                holders.setdefault((name, index), Counter()).update(has)
                if parallel.rank == 0:
                    rows[name, index] = has, row, bool(section.unit)
    total = WeightShare()
    for key, (has, row, cut) in rows.items():
        for number in has:
            shared = holders[key][number] > 1
            total += WeightShare(**{("copied" if shared else "sharded") if cut else "replicated": row})
    return total, sum(len(counts) * rows[key][1] for key, counts in holders.items())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shares_of_weights_add_up_to_the_model(name: str, ranks: int, tmp_path: Path) -> None:
    wanted = config(tmp_path, name)
    allowed = [one.ranks for one in rank_sizes(wanted)[0]]
    assert {1, 2} <= set(allowed)
    if ranks not in allowed:
        pytest.skip(f"{name} allows {allowed} ranks")
    found = reported(tmp_path, name, ranks)
    mine, whole = held([resolve_load_plan(wanted, Parallel(rank, ranks)) for rank in range(ranks)])
    alone = resolve_load_plan(wanted)
    copies = resolve_load_plan(wanted, Parallel(size=ranks)).weight_bytes - mine.bytes
    total = sum(found.weights.values(), WeightShare())
    assert (total.sharded - copies, total.copied, total.replicated) == (mine.sharded, mine.copied, mine.replicated)
    assert whole == sum(packed_bytes(parameter) for parameter in alone.meta_model.parameters())
    assert all(share.bytes for share in found.weights.values())
    size = next(one for one in found.sizes if one.ranks == ranks)
    assert (size.weight_bytes, size.replicated_bytes) == (total.bytes, total.replicated)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shares_of_caches_add_up_to_the_model(name: str, tmp_path: Path) -> None:
    model = report_model(config(tmp_path, name, tensor_parallel_size=2), 1 << 30)
    found, groups = model.tensor_parallel, {group.label: group.row_bytes for group in model.groups}
    assert found is not None
    rows = Counter[str]()
    for one in found.caches:
        rows[one.group] += one.bytes
        assert one.bytes * 2 == one.model_bytes * one.copies and 1 <= one.copies <= 2
    assert rows == groups


def recorded_collectives(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The collectives of this process from now on: their names and bytes."""
    made: list[tuple[str, int]] = []

    def recorded(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def record(x: torch.Tensor, *rest: Any, **more: Any) -> Any:
            made.append((name, x.nbytes))
            return collective(x, *rest, **more)

        return record

    for name in ("all_reduce", "gather", "broadcast"):
        monkeypatch.setattr(dist, name, recorded(name.replace("_", "-"), getattr(dist, name)))
    return made


DRAFTED = [name for name in ARCHITECTURES if find_architecture({"architectures": [name]}, "").tiny_draft is not None]
MTP = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'


def drafted(directory: Path, name: str, **options: Any) -> EngineConfig:
    """The config of a tiny model with a draft head."""
    tiny_draft = find_architecture({"architectures": [name]}, "").tiny_draft
    assert tiny_draft is not None
    return config(directory, name, tiny_draft(), **options)


@pytest.mark.parametrize("name", DRAFTED)
def test_a_draft_model_and_its_caches_are_counted(name: str, tmp_path: Path) -> None:
    with_drafts, without = (
        report_model(drafted(tmp_path, name, tensor_parallel_size=2, speculative_config=wanted), 1 << 30)
        for wanted in (MTP, None)
    )
    ranks = with_drafts.tensor_parallel
    assert ranks is not None
    assert sum(one.bytes for one in ranks.weights.values()) == with_drafts.weight_bytes
    added = with_drafts.weight_bytes - without.weight_bytes
    assert added == with_drafts.draft_weight_bytes == ranks.weights["draft model"].bytes > 0
    rows = Counter[str]()
    for one in ranks.caches:
        rows[one.group] += one.bytes
        assert one.bytes * 2 == one.model_bytes * one.copies and 1 <= one.copies <= 2
    assert rows == {group.label: group.row_bytes for group in with_drafts.groups}
    before = {group.label: group.page_bytes for group in without.groups}
    own = {group.label: group.page_bytes - group.draft_page_bytes for group in with_drafts.groups}
    assert {label: size for label, size in own.items() if size} == before
    assert sum(group.draft_layers for group in with_drafts.groups) >= 1
    assert (ranks.requests, ranks.drafts, with_drafts.decode.drafts) == (3, 6, 6)
    assert with_drafts.draft_bytes > with_drafts.draft_weight_bytes and without.model_summary().draft_bytes == 0
    assert any(line.startswith("of these for speculative decoding: ") for line in with_drafts.lines())
    assert not any("for speculative" in line or "drafts" in line for line in without.lines())


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_a_step_with_drafts_has_the_reported_collectives(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    speculation = {**json.loads(MTP), "method": method}
    if method == "draft_model":
        speculation["model"] = str(tmp_path / "small")
        (tmp_path / "small").mkdir()
        small = find_architecture({"architectures": ["LlamaForCausalLM"]}, "").tiny()
        (tmp_path / "small" / "config.json").write_text(json.dumps(small | {"max_position_embeddings": 1024}))
    options = {"tensor_parallel_size": 2, "max_num_seqs": 1, "threads": 1}
    options["speculative_config"] = json.dumps(speculation)
    wanted = drafted(tmp_path, "DeepseekV3ForCausalLM", kv_cache_memory_bytes=1 << 22, **options)
    made = recorded_collectives(monkeypatch)
    two = Engine(wanted)
    try:
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
        run(two, [request("one", (5,), params)])
    finally:
        two.close()
    ends = [at for at, (collective, _) in enumerate(made) if collective == "broadcast"]
    # Steps in the middle: the last ones have fewer drafts.
    steps = [Counter(made[begin + 1 : end + 1]) for begin, end in itertools.pairwise(ends)]
    expected = Counter[tuple[str, int]]()
    for one in report_ranks(wanted).collectives:
        expected[one.name, one.bytes] += one.count
    assert steps[2] == expected


def test_kv_heads_are_copied_where_ranks_outnumber_them(tmp_path: Path) -> None:
    """Of the tiny Llama: two layers, 4 heads of 16, 2 of keys and values, hidden size 64, 320 token ids."""
    two, four = (reported(tmp_path, "LlamaForCausalLM", ranks) for ranks in (2, 4))
    kv = 4 * 2 * 2 * 16 * 64
    assert two.weights["attention projections"] == WeightShare(sharded=4 * 2 * (64 * 64 + 2 * 16 * 64))
    assert four.weights["attention projections"] == WeightShare(sharded=4 * 2 * 64 * 64 // 2, copied=kv)
    assert [(one.field, one.bytes, one.model_bytes, one.copies) for one in four.caches] == [
        ("kv k", 128, 256, 2),
        ("kv v", 128, 256, 2),
    ]
    assert {one.copies for one in two.caches} == {1}
    assert any(line.startswith("paged: kv k") and line.endswith("2 ranks") for line in four.lines())


def test_latents_and_indexers_are_replicated(tmp_path: Path) -> None:
    sparse = reported(tmp_path, "DeepseekV32ForCausalLM", 2)
    assert {(one.field, one.copies) for one in sparse.caches} == {("latent c", 2), ("latent k_pe", 2), ("index k", 2)}
    assert all(line.endswith("every rank") for line in sparse.lines() if line.startswith("paged: "))
    latents = sparse.weights["latents, indexers, compressors"]
    assert latents.replicated > 0 == latents.sharded == latents.copied
    hybrid = reported(tmp_path, "Qwen3NextForCausalLM", 4)
    state = {one.field: one.copies for one in hybrid.caches}
    # Half of the channels of the convolution are of key heads, of which there are two.
    assert state["state ssm"] == 1 < state["state conv"] < 2 == state["kv k"]
    compressed = reported(tmp_path, "DeepseekV4ForCausalLM", 2)
    assert {one.copies for one in compressed.caches} == {2}


def test_one_rank_exchanges_nothing(tmp_path: Path) -> None:
    found = reported(tmp_path, "LlamaForCausalLM", 1)
    assert found.collectives == () and found.lines()[0].startswith("ranks ")


@pytest.mark.parametrize(
    ("name", "more", "counts"),
    [
        ("LlamaForCausalLM", {}, {"embeddings": 1, "mixers": 2, "feed-forward blocks": 2, "logits": 1}),
        # Whole on every rank.
        ("LlamaForCausalLM", {"vocab_size": 321}, {"mixers": 2, "feed-forward blocks": 2}),
        (
            "MiniMaxM2ForCausalLM",
            {"num_hidden_layers": 3},
            {"embeddings": 1, "mixers": 3, "feed-forward blocks": 3, "norms over all heads": 6, "logits": 1},
        ),
        # Shared experts are added to the routed ones before ranks are.
        ("Qwen3NextForCausalLM", {}, {"embeddings": 1, "mixers": 5, "feed-forward blocks": 5, "logits": 1}),
    ],
)
def test_collectives_by_hand(name: str, more: dict[str, Any], counts: dict[str, int], tmp_path: Path) -> None:
    """Of three requests, in fp32: the hidden size is 64."""
    found = reported(tmp_path, name, 2, more)
    assert {one.of: one.count for one in found.collectives} == counts
    sizes = {
        "embeddings": ("all-reduce", 4 * 3 * 64),
        "mixers": ("all-reduce", 4 * 3 * 64),
        "feed-forward blocks": ("all-reduce", 4 * 3 * 64),
        "norms over all heads": ("all-reduce", 4 * 3),
        "logits": ("gather", 4 * 3 * 160),
    }
    assert {one.of: (one.name, one.bytes) for one in found.collectives}.items() <= sizes.items()


GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("LlamaForCausalLM", {}),
        pytest.param("Gemma4ForCausalLM", GEMMA_EXPERTS, marks=pytest.mark.slow),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ARCHITECTURES if name != "LlamaForCausalLM"),
    ],
)
def test_a_decode_step_has_the_reported_collectives(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    options = {"tensor_parallel_size": 2, "max_num_seqs": 1, "threads": 1, "async_scheduling": "on"}
    wanted = config(tmp_path, name, more, kv_cache_memory_bytes=1 << 22, **options)
    made = recorded_collectives(monkeypatch)
    two = Engine(wanted)
    try:
        params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
        run(two, [request("one", (5,), params)])
    finally:
        two.close()
    ends = [at for at, (collective, _) in enumerate(made) if collective == "broadcast"]
    step = Counter(made[ends[-2] + 1 : ends[-1] + 1])
    expected = Counter[tuple[str, int]]()
    for one in report_ranks(wanted).collectives:
        expected[one.name, one.bytes] += one.count
    assert step == expected


def test_refused_numbers_of_ranks_have_their_reasons(tmp_path: Path) -> None:
    allowed, refused = rank_sizes(config(tmp_path, "LlamaForCausalLM"))
    assert [one.ranks for one in allowed] == [1, 2, 4]
    (one,) = refused
    assert set(one.ranks) == set(SIZES) - {1, 2, 4}
    assert one.reason == "num_attention_heads=4 is not a multiple of tensor_parallel_size"
    lines = reported(tmp_path, "LlamaForCausalLM", 1).lines()
    assert lines[-1] == f"refused for 3, 5-16, 32, 64 ranks: {one.reason}"
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 16}
    _, refused = rank_sizes(config(tmp_path, "LlamaForCausalLM", heads))
    reasons = {ranks: one.reason for one in refused for ranks in one.ranks}
    assert reasons[3] == "intermediate_size=128 is not a multiple of tensor_parallel_size"
    assert reasons[4] == "num_attention_heads=6 is not a multiple of tensor_parallel_size"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_too_many_ranks_are_refused_with_the_numbers(name: str, tmp_path: Path) -> None:
    allowed = [str(one.ranks) for one in rank_sizes(config(tmp_path, name))[0]]
    with pytest.raises(ModelError, match="tensor_parallel_size=64") as refused:
        report_model(config(tmp_path, name, tensor_parallel_size=64), 1 << 30)
    assert refused.value.reasons[-1] == f"numbers of ranks that the model allows: {', '.join(allowed)}"
    with pytest.raises(ModelError, match=r"=\d+ .*tensor_parallel_size=64"):
        report_ranks(config(tmp_path, name, tensor_parallel_size=64))


def test_weights_that_ranks_cannot_keep_quantized_are_named(tmp_path: Path) -> None:
    """Groups of 32 inputs have one scale; a width of 64 has two of them, for four ranks too few. Five groups
    are shared as they come."""
    more = {"quantization_config": MXFP4, "intermediate_size": 64}
    wanted = config(tmp_path, "GptOssForCausalLM", more, quantized_weights="keep")
    sizes = {one.ranks: one for one in rank_sizes(wanted)[0]}
    assert sizes[1].dequantized == sizes[2].dequantized == ()
    assert sizes[4].dequantized == ("routed experts",)
    assert sizes[4].weight_bytes > sizes[2].weight_bytes
    wanted = config(tmp_path, "GptOssForCausalLM", more | {"intermediate_size": 160}, quantized_weights="keep")
    sizes = {one.ranks: one for one in rank_sizes(wanted)[0]}
    assert sizes[2].dequantized == sizes[4].dequantized == ()
