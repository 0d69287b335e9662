"""Layouts of ranks: what a plan says that each holds is what each loads, and proposals follow from the figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.planning.exchange import Exchange
from allotrope.engine.planning.layout_cost import HostLayout, StepRows, host_layout
from allotrope.engine.planning.layout_plan import (
    REQUESTS,
    DecodeTime,
    LayoutPlanner,
    LayoutReport,
    Machines,
    PromptTime,
    best,
    check_machines,
    layouts,
    proposed,
)  # fmt: skip
from allotrope.engine.planning.rank_report import report_ranks
from allotrope.engine.planning.step_cost import ModelCost
from allotrope.errors import ConfigError
from allotrope.kernels.chip import CPU
from allotrope.kernels.chip_figures import FIGURES, Figure
from allotrope.layers.parallel import Parallel
from allotrope.loading.decoder import make_decoder
from allotrope.rank_layout import RankLayout

H200 = FIGURES["h200"]
# Ranks of a CPU, with the figures of a GPU.
CPUS = dataclasses.replace(H200, chip=CPU)
BUILT = [RankLayout(2), RankLayout(1, 2), RankLayout(1, 1, 2), RankLayout(2, 1, 1, True), RankLayout(1, 2, 1, True)]
# One of each family, with experts, without, and with other feed-forward blocks.
NAMES = (
    "LlamaForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM",
    "Qwen3NextForCausalLM", "Gemma4ForCausalLM", "MiniMaxM2ForCausalLM",
)  # fmt: skip


def config(directory: Path, name: str, **options: Any) -> EngineConfig:
    directory.mkdir(exist_ok=True)
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, "").tiny()))
    return EngineConfig(**{"model": str(directory), "load_format": "dummy", "dtype": "float32", **options})


def planner(directory: Path, name: str, gpus: int = 2, **options: Any) -> LayoutPlanner:
    return LayoutPlanner(config(directory, name, device="cpu", **options), Machines(CPUS, gpus, 1), 64)


def rank_bytes(wanted: EngineConfig, layout: RankLayout, rank: int) -> int:
    """Bytes of the weights that a rank makes to be filled."""
    wanted = dataclasses.replace(
        wanted,
        tensor_parallel_size=layout.tensor,
        data_parallel_size=layout.data,
        pipeline_parallel_size=layout.pipeline,
        enable_expert_parallel=layout.expert_parallel,
    )
    load_plan = resolve_load_plan(wanted, Parallel.of(layout, rank))
    model = make_decoder(load_plan.architecture, load_plan.spec, load_plan.build)
    return sum(one.nbytes for one in model.parameters())


def run_rank(rank: int, directory: str, found: Any) -> None:
    """One of two ranks, which ask each other how much they hold of every model in every layout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    for name, layout in cases():
        held = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        own = rank_bytes(config(Path(directory) / name, name, device="cpu"), layout, rank)
        dist.all_gather(held, torch.tensor([own]))
        found[name, str(layout)] = [int(one) for one in held]
    dist.destroy_process_group()


def has_experts(name: str) -> bool:
    return name != "LlamaForCausalLM" and not name.startswith("Gemma4")


def cases() -> list[tuple[str, RankLayout]]:
    return [(name, one) for name in NAMES for one in BUILT if has_experts(name) or not one.expert_parallel]


def test_planned_bytes_are_those_that_two_ranks_hold(tmp_path: Path) -> None:
    for name in NAMES:
        config(tmp_path / name, name)
    with mp.get_context("spawn").Manager() as manager:
        found = manager.dict()
        mp.spawn(run_rank, (str(tmp_path), found), nprocs=2)
        held = dict(found)
    assert len(held) == len(cases())
    for name, layout in cases():
        report = planner(tmp_path / name, name).plan(layout)
        assert report.weight_bytes == max(held[name, str(layout)]), (name, layout)
        assert report.refusal is None and all(report.weights.values())


def test_stages_hold_what_one_rank_holds(tmp_path: Path) -> None:
    plan = planner(tmp_path, "Qwen3NextForCausalLM", 4)
    whole = plan.plan(RankLayout())
    stages = plan.stages(RankLayout(1, 1, 4))
    assert [one.layers.start for one in stages] == [0, *(one.layers.stop for one in stages[:-1])]
    assert sum(one.weight_bytes for one in stages) == whole.weight_bytes
    assert "embedding and head" in stages[0].weights and "embedding and head" not in stages[-1].weights
    assert plan.plan(RankLayout(1, 1, 4)).weight_bytes == max(one.weight_bytes for one in stages)
    # All layers' caches, each on one stage.
    caches = [group.row_bytes for one in stages for group in one.groups]
    assert sum(caches) == sum(group.row_bytes for group in plan.stages(RankLayout())[0].groups)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_one_rank_does_what_a_step_of_the_engine_costs(name: str, tmp_path: Path) -> None:
    """One formula: the plan of one rank counts what `ModelCost` counts for a running step."""
    wanted = config(tmp_path, name, device="cpu")
    (stage,) = LayoutPlanner(wanted, Machines(CPUS, 1, 1), 64).stages(RankLayout())
    assert stage.work(StepRows.decode(6, 64, 1)) == ModelCost(resolve_load_plan(wanted)).work((1,) * 6, (64,) * 6)
    assert stage.exchanges(StepRows.decode(6, 64, 1), HostLayout(1, 1, 1, 1)) == ()


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_two_ranks_sum_as_often_as_the_report_on_ranks_says(name: str, tmp_path: Path) -> None:
    wanted = config(tmp_path, name, device="cpu", tensor_parallel_size=2, max_num_seqs=3)
    (stage,) = LayoutPlanner(wanted, Machines(CPUS, 2, 1), 64).stages(RankLayout(2))
    found = {
        (one.of, one.count, one.bytes) for one in stage.exchanges(StepRows.decode(3, 64, 1), HostLayout(1, 1, 1, 1))
    }
    expected = {(one.of, one.count, one.bytes) for one in report_ranks(wanted).collectives if one.name == "all-reduce"}
    # Where all requests are greedy, an integer for each takes the place of logits.
    tokens = {one for one in found if one[0] == "tokens"}
    assert found - tokens == expected and tokens <= {("tokens", 1, 3 * 8)}


def test_data_parallel_ranks_exchange_rows(tmp_path: Path) -> None:
    plan, hosts = planner(tmp_path, "DeepseekV32ForCausalLM", 4), HostLayout(1, 1, 1, 1)
    (stage,) = plan.stages(RankLayout(2, 2, 1, True))
    found = {one.of: one for one in stage.exchanges(StepRows.decode(6, 64, 2), hosts)}
    hidden, layers = 4 * 64, len(stage.layers)
    assert found["mixers"] == Exchange("all-reduce", "mixers", layers, 3 * hidden, 2)
    assert found["rows for feed-forward blocks"] == Exchange(
        "all-gather", "rows for feed-forward blocks", layers, 6 * hidden, 2
    )
    assert found["rows of feed-forward blocks"].name == "reduce-scatter"
    assert found["feed-forward blocks"] == Exchange("all-reduce", "feed-forward blocks", layers, 3 * hidden, 2)
    assert found["rows to sample"].bytes == 6 * hidden


def test_rows_of_steps() -> None:
    assert StepRows.decode(5, 100, 2) == StepRows((1, 1, 1), (100, 100, 100), 6, 6)
    assert StepRows.prompts(8192, 1024, 2) == StepRows((1024,) * 4, (1024,) * 4, 8192, 8)
    # A piece of a long prompt, from its middle.
    assert StepRows.prompts(8192, 16384, 4) == StepRows((2048,), ((16384 + 2048) // 2,), 8192, 4)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV4ForCausalLM"])
def test_stages_send_what_the_next_one_needs(name: str, tmp_path: Path) -> None:
    plan, hosts = planner(tmp_path, name), HostLayout(1, 1, 1, 2)
    first, last = plan.stages(RankLayout(1, 1, 2))
    sent = [stage.exchanges(StepRows.decode(6, 64, 1), hosts)[-1] for stage in (first, last)]
    assert [(one.name, one.hosts, one.count) for one in sent] == [("send", 2, 1)] * 2
    streams = 4 if name == "DeepseekV4ForCausalLM" else 1
    assert [one.bytes for one in sent] == [6 * 64 * 4 * streams, 6 * 64 * 4]


def test_every_layout_is_tried_once() -> None:
    found = layouts(8)
    assert found[0] == RankLayout(8) and len(set(found)) == len(found) == 19
    assert all(one.size == 8 for one in found)
    assert {(one.tensor, one.data, one.pipeline) for one in found if one.expert_parallel} == {
        (one.tensor, one.data, one.pipeline) for one in found if one.stage_size > 1
    }
    assert layouts(1) == [RankLayout()] and len(layouts(6)) == 17


def test_hosts_that_groups_are_spread_over() -> None:
    assert host_layout(RankLayout(8), 8) == HostLayout(1, 1, 1, 1)
    assert host_layout(RankLayout(8, 2), 8) == HostLayout(1, 2, 2, 2)
    assert host_layout(RankLayout(16), 8) == HostLayout(2, 1, 2, 2)
    assert host_layout(RankLayout(2, 8), 8) == HostLayout(1, 2, 2, 2)
    assert host_layout(RankLayout(8, 1, 2), 8) == HostLayout(1, 1, 1, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 is neither a divisor nor a multiple of the 4 GPUs"):
        host_layout(RankLayout(3, 1, 4), 4)


def test_layouts_that_a_model_does_not_allow_have_their_reasons(tmp_path: Path) -> None:
    plan = planner(tmp_path / "a", "Qwen3MoeForCausalLM", 8)
    assert plan.plan(RankLayout(8)).refusal == "num_attention_heads=4 is not a multiple of tensor_parallel_size=8"
    assert "pipeline_parallel_size=8 (needs 3 or fewer: 3 layers)" in str(plan.plan(RankLayout(1, 1, 8)).refusal)
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({f"layers.{i}.ffn.experts": [5] * 8 for i in range(4)}))
    copies = {"expert_placement": str(counts), "num_redundant_experts": 12, "enable_expert_parallel": True}
    placed = planner(tmp_path / "d", "GptOssForCausalLM", 4, **copies)
    assert "num_redundant_experts=12 (needs 8 or fewer" in str(placed.plan(RankLayout(2, 1, 2, True)).refusal)
    assert placed.plan(RankLayout(4, 1, 1, True)).refusal is None
    dense = planner(tmp_path / "b", "LlamaForCausalLM")
    assert "needs experts, and it has none" in str(dense.plan(RankLayout(2, 1, 1, True)).refusal)
    small = LayoutPlanner(
        config(tmp_path / "c", "LlamaForCausalLM"),
        Machines(dataclasses.replace(H200, memory=Figure(1 << 18, "a test")), 1, 1),
        64,
    )
    assert small.plan(RankLayout()).refusal == "does not fit: 449.25 KiB of weights on a rank, of 230.40 KiB"
    fits = LayoutPlanner(
        config(tmp_path / "c", "LlamaForCausalLM", memory_utilization=1.0),
        Machines(dataclasses.replace(H200, memory=Figure(4 << 20, "a test")), 1, 1),
        64,
    )
    assert "does not fit: one request of 64 tokens, for 0 B are left for caches" in str(fits.plan(RankLayout()).refusal)


def test_machines_that_cannot_be_are_refused_with_every_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"hosts=3 do not share gpus=16 evenly; hosts=3; nothing is known of a network"
    ):
        check_machines(FIGURES["l40s"], 16, 3)
    with pytest.raises(ConfigError, match="gpus=0; at least 1 is needed"):
        check_machines(H200, 0, None)
    with pytest.raises(ConfigError, match="gpus=720720; at most 4096 are compared"):
        check_machines(H200, 720720, None)
    assert check_machines(H200, 16, None) == Machines(H200, 16, 2)


def step(requests: int, ms: float) -> DecodeTime:
    return DecodeTime(requests, ms / 1e3, ms / 1e3, {}, 0, 0)


def layout_report(layout: RankLayout, ms: Sequence[float], prompts: float = 1.0, tokens: int = 1000) -> LayoutReport:
    """A layout that holds as many of `REQUESTS` as there are times."""
    steps = tuple(step(count, one) for count, one in zip(REQUESTS, ms, strict=False))
    return LayoutReport(layout=layout, weights={}, tokens=tokens, decode=steps, prompts=PromptTime(1, prompts, 0, 0, 0))


def test_the_proposal_holds_most_requests_and_is_the_best_in_the_mean() -> None:
    tensor = layout_report(RankLayout(8), (5, 9))
    data = layout_report(RankLayout(1, 8), (8, 10, 20, 30))
    both = layout_report(RankLayout(2, 4), (6, 9.5, 20, 36))
    stages = layout_report(RankLayout(1, 1, 8), (9, 20, 40, 90))
    reports = [tensor, data, both, stages]
    assert [best(reports, count) for count in REQUESTS[:2]] == [tensor, tensor]
    # 6 9.5 20 36 is 1.2, 1.06, 1 and 1.2 times the best, 8 10 20 30 is 1.6, 1.11, 1 and 1 times.
    assert proposed(reports, REQUESTS) is both
    assert proposed(list(reversed(reports)), REQUESTS) is both
    assert best([stages], 16) is stages and best([tensor], 64) is None
    assert proposed([], REQUESTS) is None


def test_of_nearly_equal_layouts_the_one_that_reads_prompts_faster_is_proposed() -> None:
    slow = layout_report(RankLayout(2), (5, 9, 20, 30), prompts=2.0)
    fast = layout_report(RankLayout(1, 2), (5.03, 9.05, 20.1, 30.1), prompts=1.0)
    assert proposed([slow, fast], REQUESTS) is fast and best([slow, fast], 4) is fast


def test_more_of_a_chip_never_makes_a_plan_worse(tmp_path: Path) -> None:
    """More memory holds more tokens; faster memory, products and links make every time shorter, or leave it."""

    def faster(figure: Figure) -> Figure:
        return dataclasses.replace(figure, value=figure.value * 1.5)

    link = dataclasses.replace(H200.link, bandwidth=faster(H200.link.bandwidth))
    better = {
        "memory": {"memory": faster(H200.memory)},
        "bandwidth": {"bandwidth": faster(H200.bandwidth)},
        "rates": {"rates": {kind: faster(rate) for kind, rate in H200.rates.items()}},
        "link": {"link": link},
    }
    wanted = config(tmp_path, "DeepseekV32ForCausalLM", dtype="bfloat16")
    tried = layouts(2)
    base = LayoutPlanner(wanted, Machines(H200, 2, 1), 64)
    before = [base.plan(one) for one in tried]
    for name, change in better.items():
        plan = LayoutPlanner(wanted, Machines(dataclasses.replace(H200, **change), 2, 1), 64)
        for old, new in zip(before, (plan.plan(one) for one in tried), strict=True):
            assert new.tokens > old.tokens if name == "memory" else new.tokens == old.tokens
            assert all(a.tpot <= b.tpot for a, b in zip(new.decode, old.decode, strict=True))
            assert all(a.least <= b.least for a, b in zip(new.decode, old.decode, strict=True))


def test_a_plan_is_the_same_each_time_and_longer_contexts_take_longer(tmp_path: Path) -> None:
    wanted, machines = config(tmp_path, "Qwen3MoeForCausalLM", dtype="bfloat16"), Machines(H200, 4, 1)
    first, again, longer = (LayoutPlanner(wanted, machines, context) for context in (32, 32, 64))
    for layout in layouts(4):
        report = first.plan(layout)
        assert report == again.plan(layout)
        for old, new in zip(report.decode, longer.plan(layout).decode, strict=True):
            assert new.tpot >= old.tpot >= old.least > 0
        tpots = [one.tpot for one in report.decode]
        assert tpots == sorted(tpots)
        assert all(sum(one.parts.values()) == pytest.approx(one.tpot) for one in report.decode)


@pytest.mark.parametrize("chip", sorted(FIGURES))
def test_every_chip_has_a_plan(chip: str, tmp_path: Path) -> None:
    wanted = config(tmp_path, "Qwen3MoeForCausalLM", dtype="bfloat16")
    plan = LayoutPlanner(wanted, Machines(FIGURES[chip], 2, 1), 64)
    reports = [plan.plan(one) for one in layouts(2)]
    assert all(one.refusal is None and len(one.decode) == len(REQUESTS) for one in reports)
    assert proposed(reports, REQUESTS) in reports


def test_experts_that_stay_quantized_when_they_are_whole(tmp_path: Path) -> None:
    """Groups of 32 inputs have one scale: of a width of 64, four ranks have half a group each."""
    more = {"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 64}
    tiny = find_architecture({"architectures": ["GptOssForCausalLM"]}, "").tiny() | more
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    plan = LayoutPlanner(EngineConfig(model=str(tmp_path), load_format="dummy"), Machines(H200, 4, 1), 64)
    cut, whole = plan.plan(RankLayout(4)), plan.plan(RankLayout(4, 1, 1, True))
    assert cut.dequantized == ("routed experts",) and whole.dequantized == ()
    assert cut.weights["routed experts"] > 1.5 * whole.weights["routed experts"]


CONFIGS = Path(__file__).parents[2] / "bench" / "configs"


@pytest.mark.parametrize(
    ("model", "chip", "gpus", "fits"),
    [("deepseek_v32", "h200", 8, True), ("deepseek_v32", "h200", 4, False), ("kimi_k2", "h200", 8, False)],
)
def test_whole_models_are_planned_as_a_gpu_keeps_them(model: str, chip: str, gpus: int, fits: bool) -> None:
    """In FP8: 671 and 1026 billion weights, nearly a byte each."""
    wanted = EngineConfig(model=str(CONFIGS / model), load_format="dummy")
    report = LayoutPlanner(wanted, Machines(FIGURES[chip], gpus, 1), 8192).plan(RankLayout(gpus))
    assert 0.95 < report.weight_bytes * gpus / {"deepseek_v32": 671e9, "kimi_k2": 1026e9}[model] < 1.07
    assert (report.refusal is None) == fits
    if fits:
        # 576 numbers of a latent and 128 of an index key in two bytes each, on every rank.
        assert report.entries == {"paged": 61 * 2 * (512 + 64 + 128)}
        assert 450_000 < report.tokens < 550_000
