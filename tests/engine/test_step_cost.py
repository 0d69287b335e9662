"""The least work of a step against numbers computed by hand, and what must hold of any model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.attention.cost import Lengths, StepCost
from allotrope.attention.csa import CSA, CsaSpec
from allotrope.attention.csa import IndexerSpec as EntryIndexer
from allotrope.attention.dsa import DSA, DsaSpec, IndexerSpec
from allotrope.attention.mla import MLA, MlaSpec
from allotrope.attention.registry import FAMILIES
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import LoadPlan, resolve_load_plan
from allotrope.engine.planning.plan_report import report_model
from allotrope.engine.planning.step_cost import ModelCost, step_cost
from allotrope.kernels.chip import CHIPS, chip_of
from allotrope.layers.embedding import Embedding, Head
from allotrope.layers.moe import Experts
from allotrope.layers.parallel import Parallel, placement_of
from allotrope.ops.rope import RopeSpec

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# The tiny Llama and Qwen3-MoE: hidden 64, 4 heads of 16, 2 of keys and values, a vocabulary of 320; fp32.
HEADS = 64 * 64 * 2 + 64 * 32 * 2
HEAD = 320 * 64


def config(directory: Path, name: str, more: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    tiny = find_architecture({"architectures": [name]}, "").tiny() | (more or {})
    (directory / "config.json").write_text(json.dumps(tiny))
    return EngineConfig(
        **{"model": str(directory), "load_format": "dummy", "device": "cpu", "dtype": "float32", **options}
    )


def drawn(directory: Path, name: str, more: dict[str, Any] | None = None, **options: Any) -> LoadPlan:
    return resolve_load_plan(config(directory, name, more, **options))


def lengths(new: list[int], seen: list[int]) -> Lengths:
    return Lengths(torch.tensor(new), torch.tensor(seen), 2)


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    # Five visible tokens for the first token; five, six and seven for the second request's three.
    found = step_cost(drawn(tmp_path, "LlamaForCausalLM"), (1, 3), (5, 7))
    dense, tokens = HEADS + 3 * 64 * 128, 4
    assert found == {
        "mha": StepCost(2 * 4 * ((5 + 7) * 2 * 2 * 16 + tokens * 4 * 32), 2 * 2 * (5 + 5 + 6 + 7) * 4 * 32),
        "dense": StepCost(2 * 4 * dense, 2 * 2 * tokens * dense),
        "head": StepCost(4 * HEAD, 2 * 2 * HEAD),
        "rest": StepCost(4 * 5 * 64),
    }


def test_a_mixture_of_experts_by_hand(tmp_path: Path) -> None:
    found = step_cost(drawn(tmp_path, "Qwen3MoeForCausalLM"), (1, 1), (9, 9))
    # Two of three layers have 8 experts of which a token takes 3; the other is dense.
    expert, chosen = 3 * 64 * 32, 8 * (1 - (5 / 8) ** 2)
    dense = 3 * HEADS + 2 * 64 * 8 + 3 * 64 * 128
    assert found["experts"] == StepCost(round(4 * 2 * chosen * expert), 2 * 2 * 2 * 3 * expert)
    assert found["dense"] == StepCost(4 * dense, 2 * 2 * dense)
    assert found["head"] == StepCost(4 * HEAD, 2 * 2 * HEAD)
    assert found["rest"] == StepCost(4 * (7 * 64 + 3 * 2 * 16))


def test_no_more_experts_are_read_than_there_are(tmp_path: Path) -> None:
    load_plan = drawn(tmp_path, "Qwen3MoeForCausalLM")
    every = 4 * 2 * 8 * 3 * 64 * 32
    read = [step_cost(load_plan, (count,), (count,))["experts"].bytes for count in (1, 2, 8, 1000)]
    assert read[0] == every * 3 // 8 and read == sorted(set(read)) and read[-1] == every


def test_a_window_bounds_rows_and_products(tmp_path: Path) -> None:
    window, full = (
        drawn(tmp_path, "MistralForCausalLM"),
        drawn(tmp_path, "MistralForCausalLM", {"sliding_window": None}),
    )
    assert step_cost(window, (1,), (32,)) == step_cost(full, (1,), (32,)) == step_cost(window, (1,), (400,))
    assert step_cost(window, (1,), (400,))["mha"].bytes < step_cost(full, (1,), (400,))["mha"].bytes
    pairs = sum(min(i, 32) for i in range(61, 101))
    # The last 40 of 100 tokens read 40 + 31 rows.
    assert step_cost(window, (40,), (100,))["mha"] == StepCost(2 * 4 * (71 * 64 + 40 * 128), 2 * 2 * pairs * 4 * 32)


def test_states_do_not_grow_with_the_context(tmp_path: Path) -> None:
    load_plan = drawn(tmp_path, "Qwen3NextForCausalLM")
    short, long = (step_cost(load_plan, (1,) * 3, (n,) * 3) for n in (50, 500))
    assert short["gdn"] == long["gdn"] and short["mha"].bytes < long["mha"].bytes
    state, row = 4 * (4 * 16 * 32 + 3 * 192), 4 * (192 + 4 + 4 + 128)
    weights = 4 * (192 * 4 + 4 + 4 + 32)
    assert short["gdn"] == StepCost(4 * (3 * (2 * state + row) + weights), 4 * 3 * 4 * 7 * 16 * 32)


@pytest.mark.parametrize("indexed", [True, False])
def test_sparse_indices_by_counting(indexed: bool) -> None:
    mla = MlaSpec(
        num_heads=4, latent_dim=32, rope_dim=8, nope_dim=16, v_head_dim=24, scale=1.0, kv_dtype=torch.bfloat16
    )
    spec = DsaSpec(mla=mla, topk=6, indexer=IndexerSpec(num_heads=3, head_dim=10) if indexed else None)
    near = DSA.cost(spec, lengths([1, 2], [4, 6]))
    assert near == MLA.cost(mla, lengths([1, 2], [4, 6]))
    # Queries that see 5 and 6 tokens as before, of the others 7, 8 and 9 each; and one that sees 30.
    found = DSA.cost(spec, lengths([5, 1], [9, 30]))
    up, pair = 2 * 4 * 32 * (16 + 24), 2 * 4 * (32 + 32 + 8)
    flops = min(11 * pair + 2 * up, 11 * 2 * 4 * (16 + 8 + 24) + 6 * up) + 4 * (6 * pair + up)
    moved = (9 + 6) * 40 * 2 + 6 * 4 * (16 + 8 + 24) * 2
    if indexed:
        moved += (9 + 30) * 10 * 2 + 4 * 3 * 10 * 2
        flops += 2 * 3 * 10 * (7 + 8 + 9 + 30)
    assert found == StepCost(moved, flops)
    if spec.indexer is not None:
        # Of two ranks each scores half of the prompt, and all of the decode.
        shared = dataclasses.replace(spec, indexer=dataclasses.replace(spec.indexer, rank=1, ranks=2))
        assert DSA.cost(shared, lengths([5, 1], [9, 30])) == StepCost(moved, flops - 2 * 3 * 10 * (7 + 8 + 9) // 2)
        # Top-k indices of the three queries of the prompt that see more than 6 tokens.
        assert DSA.gathered(shared, lengths([5, 1], [9, 30])) == 3 * 6 * 4
    assert DSA.gathered(spec, lengths([5, 1], [9, 30])) == 0
    whole = MLA.cost(mla, lengths([500], [500]))
    assert whole.flops == 2 * 4 * (500 * 501 // 2 * (16 + 8 + 24)) + 500 * up, "a prompt is cheaper expanded"


@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_compressed_rows_by_counting(kind: str) -> None:
    indexer = EntryIndexer(num_heads=3, head_dim=8, topk=2) if kind == "chosen" else None
    spec = CsaSpec(
        num_heads=4, head_dim=16, scale=1.0, window=5, rope=RopeSpec(dim=8, theta=1e4, interleaved=True),
        kv_dtype=torch.bfloat16, ratio=0 if kind == "window" else 4, overlap=kind == "chosen", indexer=indexer,
    )  # fmt: skip
    seen_by_each = (21, 8, 9, 10, 11, 12)
    pairs = rows = scored = 0
    for seen in seen_by_each:
        pairs += min(seen, 5)
        entries = 0 if kind == "window" else seen // 4
        pairs += min(entries, 2) if indexer else entries
        scored += entries if indexer and entries > 2 else 0
    # The last five of twelve tokens read nine rows of the window, and all three entries.
    rows = 5 + 9 + {"window": 0, "all": 5 + 3, "chosen": 2 + 3}[kind]
    moved = rows * 32 + 2 * 6 * 4 * 16 * 2
    if kind != "window":
        moved += 6 * 4 * (2 * 16 * spec.streams + (2 * 8 * spec.streams if indexer else 0))
    if indexer:
        moved += (5 + 3) * 8 * 2 + 2 * 3 * 8 * 2
    assert CSA.cost(spec, lengths([1, 5], [21, 12])) == StepCost(moved, 4 * 4 * 16 * pairs + 2 * 3 * 8 * scored)
    assert CSA.gathered(spec, lengths([1, 5], [21, 12])) == 0
    if indexer:
        # Of two ranks each scores half of the prompt, whose last query alone sees three entries, and all of the decode.
        shared = dataclasses.replace(spec, indexer=dataclasses.replace(indexer, ranks=2))
        assert scored == 21 // 4 + 3
        found = CSA.cost(shared, lengths([1, 5], [21, 12]))
        assert found == StepCost(moved, 4 * 4 * 16 * pairs + 2 * 3 * 8 * (21 // 4 + 3 // 2))
        assert CSA.gathered(shared, lengths([1, 5], [21, 12])) == 1 * 2 * 4


def test_quantized_weights_count_as_stored(tmp_path: Path) -> None:
    def found(name: str, quantization: dict[str, Any], keep: str) -> dict[str, StepCost]:
        more = {"quantization_config": quantization}
        options = config(tmp_path, name, more, quantized_weights=keep, dtype="bfloat16")
        return step_cost(resolve_load_plan(options, available=1 << 32, chip=chip), (1,) * 8, (9,) * 8)

    chip = chip_of(torch.device("cpu"))
    kept, plain = (found("Qwen3MoeForCausalLM", FP8, keep) for keep in ("keep", "dequantize"))
    for kind in ("experts", "dense"):
        assert plain[kind].bytes / 2 < kept[kind].bytes < plain[kind].bytes
        assert kept[kind].flops == plain[kind].flops and plain[kind].fp8 == 0
        # A CPU rounds no activations to FP8.
        assert kept[kind].fp8 == 0
    kept, plain = (found("GptOssForCausalLM", {"quant_method": "mxfp4"}, keep) for keep in ("keep", "dequantize"))
    # 4-bit rows of 64 inputs are padded to 128.
    assert plain["experts"].bytes / 4 < kept["experts"].bytes < plain["experts"].bytes / 1.8
    assert kept["experts"].flops == plain["experts"].flops and kept["experts"].fp8 == 0
    chip = CHIPS["sm_90"]
    kept = found("Qwen3MoeForCausalLM", FP8, "keep")
    assert kept["experts"].fp8 == kept["experts"].flops and 0 < kept["dense"].fp8 < kept["dense"].flops


def test_a_table_that_a_head_shares_lies_in_memory_twice_on_a_cpu(tmp_path: Path) -> None:
    """As it is for the embedding, and packed for the head."""
    found = []
    for tied in (True, False):
        config = find_architecture({"architectures": ["Qwen3ForCausalLM"]}, "").tiny() | {"tie_word_embeddings": tied}
        folder = tmp_path / str(tied)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
        options = {"load_format": "dummy", "device": "cpu", "dtype": "bfloat16"}
        found.append(resolve_load_plan(EngineConfig(model=str(folder), **options)))
    once, packed = (plan.weight_bytes for plan in found)
    backend = found[0].meta_model.head.matmul.backend.name
    assert once == pytest.approx(packed, rel=0.02) or backend in ("pytorch", "reference"), backend


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_all_weights_are_read_but_for_tables(name: str, tmp_path: Path) -> None:
    load_plan = drawn(tmp_path, name)
    model = load_plan.meta_model
    tables = {id(p): p.nbytes for p in model.parameters() if placement_of(p).below}
    tables |= {id(m.weight): m.weight.nbytes for m in model.modules() if isinstance(m, Embedding)}
    tables.pop(id(model.head.weight), None)
    # What lies in memory in two orders is read in one.
    copies = sum(m.copied_bytes() for m in model.modules() if isinstance(m, Experts | Head))
    length = torch.tensor([2000])
    lengths = Lengths(length, length, 4)
    counted = Counter(load_plan.specs)
    attention = sum((FAMILIES[spec.family].cost(spec, lengths) * n for spec, n in counted.items()), StepCost())
    whole = sum(step_cost(load_plan, (2000,), (2000,)).values(), StepCost())
    assert whole.bytes - attention.bytes == load_plan.weight_bytes - copies - sum(tables.values())


def test_ranks_share_the_work(tmp_path: Path) -> None:
    options = config(tmp_path, "Qwen3MoeForCausalLM")
    one, two = (step_cost(resolve_load_plan(options, Parallel(size=size)), (1,) * 4, (64,) * 4) for size in (1, 2))
    for kind in ("mha", "experts", "head"):
        assert two[kind].flops * 2 == one[kind].flops
    # Every rank routes by itself.
    assert one["dense"].flops / 2 < two["dense"].flops < one["dense"].flops


def test_the_plan_shows_a_decode_step(tmp_path: Path) -> None:
    options = config(tmp_path, "Qwen3MoeForCausalLM", max_num_seqs=4, max_model_len=100)
    report = report_model(options, 1 << 30)
    assert report.decode.classes == step_cost(resolve_load_plan(options), (1,) * 4, (50,) * 4)
    lines = report.lines()
    at = lines.index("a decode step of 4 requests that see 50 tokens, at least:")
    shown = {line.split()[0] for line in lines[at + 2 : -1]}
    assert shown == {"mha", "experts", "dense", "head", "rest", "all"} and lines[-1] == "fits"
    assert report.as_json()["decode"]["classes"]["head"] == {"bytes": 4 * HEAD, "flops": 2 * 4 * HEAD, "fp8": 0}


def test_drafts_of_a_request_read_its_caches_once(tmp_path: Path) -> None:
    ngram = '{"method": "ngram", "num_speculative_tokens": 3}'
    cost = ModelCost(drawn(tmp_path, "Qwen3NextForCausalLM", speculative_config=ngram))
    found = cost.drafted(50, (3, 0))
    assert found == cost((4, 1), (53, 50), 5) and "draft" not in found
    assert found["head"].flops == 5 * 2 * HEAD
    # Two states are read and written, not five.
    assert found["gdn"].bytes < cost((1,) * 5, (50, 51, 52, 53, 50))["gdn"].bytes / 2


def test_a_draft_model_costs_its_passes(tmp_path: Path) -> None:
    tiny_draft = find_architecture({"architectures": ["MiMoV2FlashForCausalLM"]}, "").tiny_draft
    assert tiny_draft is not None
    mtp = '{"method": "mtp", "num_speculative_tokens": 3}'
    load_plan = drawn(tmp_path, "MiMoV2FlashForCausalLM", tiny_draft(), speculative_config=mtp)
    cost, model = ModelCost(load_plan), load_plan.meta_model
    draft = load_plan.meta_draft()
    assert draft is not None
    weights = sum(parameter.nbytes for parameter in draft.parameters())
    head = sum(parameter.nbytes for parameter in model.head.parameters())
    one, two, three = (cost.drafted(40, (count,))["draft"] for count in (1, 2, 3))
    (spec,) = load_plan.draft_specs
    attention = [FAMILIES[spec.family].cost(spec, lengths(*lens)).bytes for lens in (([2], [41]), ([1], [41]))]
    # In `lengths`, an activation has two bytes, and four here.
    assert abs(one.bytes - weights - head - attention[0]) <= attention[0]
    # Another draft of a lone request is one more pass: all weights again, and the head.
    assert weights + head < two.bytes - one.bytes < weights + head + 2 * attention[1] + 4096
    assert three.flops > two.flops > one.flops
