"""Our kernels of softmax attention against the reference: on the GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, BatchTensors, index_pages
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.mha import MHA, triton, triton_decode, triton_prefill
from allotrope.attention.replay import Replay, alone, at_random, whole
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.kernels.triton_version import triton_reasons

REFERENCE = MHA.backends[-1]
TRITON = AttentionBackend("triton", lambda spec, chip: [], plan=triton.build_plan, run=triton.run, in_graphs=True)
CASES = cases("mha")
FP8 = torch.float8_e4m3fn


def exact(case: Case) -> torch.Tensor:
    """What the case's sequences give in fp32, inputs and cached rows being of the case's types."""
    wide = dataclasses.replace(case.spec, kv_dtype=case.spec.kv_dtype if case.spec.kv_dtype == FP8 else torch.float32)
    replay = Replay(dataclasses.replace(case, spec=wide), REFERENCE, DEVICE)
    replay.inputs.tokens.update({name: t.float() for name, t in replay.inputs.tokens.items()})
    return replay.play(alone(case.lengths))


# The interpreter takes seconds for what the GPU does at once.
HALVES = CASES if DEVICE == "cuda" else ("grouped_4", "shared_rows", "softcap", "window_and_sinks")
RUNS = [(name, torch.float32) for name in CASES]
RUNS += [(name, torch.bfloat16) for name in HALVES]
RUNS += [(name, torch.float16) for name in (CASES if DEVICE == "cuda" else ("grouped_4",))]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_any_schedule_gives_the_reference(name: str, dtype: torch.dtype) -> None:
    case = cases("mha", dtype)[name]
    want = exact(case)
    schedules = [whole(case.lengths), at_random(case.lengths, 1)]
    for steps in schedules if DEVICE == "cuda" else schedules[dtype != torch.float32 :][:1]:
        assert (found := compare(Replay(case, TRITON, DEVICE).play(steps), want, case.kind)), found


ODD = {
    "80": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 80},
    "192 and 128": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 192, "v_head_dim": 128},
    "seven heads": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 32, "window": 20},
    "many heads": {"num_heads": 66, "num_kv_heads": 1, "head_dim": 16, "sinks": True},
    "one of five": {"num_heads": 5, "num_kv_heads": 5, "head_dim": 24},
}


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("80", 4), ("192 and 128", 64), ("seven heads", 4), ("seven heads", 64), ("many heads", 64), ("one of five", 4)],
)
def test_odd_sizes(name: str, page_size: int) -> None:
    short = CASES["grouped_4"]
    spec = dataclasses.replace(short.spec, **ODD[name])
    case = dataclasses.replace(short, spec=spec, lengths=(1, 17, 40), page_size=page_size)
    steps = [[(1, 1), (2, 35)], [(0, 1), (1, 16), (2, 4)], [(2, 1)]]
    assert (found := compare(Replay(case, TRITON, DEVICE).play(steps), exact(case), "fp32")), found


@pytest.mark.parametrize("name", ["grouped_4", "shared_rows", "window_and_sinks", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_fp8(name: str, dtype: torch.dtype) -> None:
    case = cases("mha", dtype)[name]
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, kv_dtype=FP8), lengths=(3, 40))
    scales = {"k_scale": 0.02, "v_scale": 0.0078125}
    wanted, found = Replay(case, REFERENCE, DEVICE), Replay(case, TRITON, DEVICE)
    for replay in (wanted, found):
        replay.layer.update(scales)  # type: ignore[arg-type]
    wanted.inputs.tokens.update({name: t.float() for name, t in wanted.inputs.tokens.items()})
    got, want = found.play(at_random(case.lengths, 3)), wanted.play(alone(case.lengths))
    for name, pool in found.pools["kv"].items():
        assert torch.equal(pool.view(torch.uint8)[0], torch.zeros_like(pool.view(torch.uint8)[0])), name
    assert (result := compare(got, want, case.kind)), result


class Bounded(Replay):
    """As a captured step has it: of a decode's length the host knows only that it is below 300."""

    def plan(self, batch: BatchLayout, index: object) -> object:
        bounds = tuple(300 if q == 1 else n for q, n in zip(batch.query_lens, batch.seq_lens, strict=True))
        return super().plan(BatchLayout(batch.query_lens, bounds, batch.device, batch.tensors), index)


@pytest.mark.parametrize("name", ["grouped_4", "window_and_sinks"])
def test_neighbours_bounds_and_programs_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = CASES[name]
    spec = dataclasses.replace(long.spec, num_heads=2, num_kv_heads=1, head_dim=32)
    case = dataclasses.replace(long, spec=spec, lengths=(9, 34, 101))
    steps = [
        [(0, 7), (1, 30), (2, 97)],
        *[[(i, 1) for i in range(3)] for _ in range(2)],
        [(1, 1), (2, 1)],
        [(1, 1), (2, 1)],
    ]
    together = Replay(case, TRITON, DEVICE).play(steps)
    assert torch.equal(together, Replay(case, TRITON, DEVICE).play([[taken] for step in steps for taken in step]))
    assert torch.equal(together, Bounded(case, TRITON, DEVICE).play(steps))
    how = triton_decode.config
    monkeypatch.setattr(triton_decode, "config", lambda *args: dataclasses.replace(how(*args), programs=1))
    assert torch.equal(together, Bounded(case, TRITON, DEVICE).play(steps))


@pytest.mark.parametrize("bound", [1, 3000])
@pytest.mark.parametrize("name", ["grouped_4", "window_and_sinks"])
def test_a_request_that_fills_up_a_captured_size(name: str, bound: int) -> None:
    case = dataclasses.replace(CASES[name], lengths=(1,) * 3)
    replay = Replay(case, TRITON, DEVICE)
    device = replay.device
    lens = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    starts = torch.arange(4, dtype=torch.int32, device=device)
    tokens = torch.arange(3, device=device)
    batch = BatchLayout((1,) * 3, (bound,) * 3, device, BatchTensors(lens, starts, torch.zeros_like(tokens), tokens))
    real = BatchLayout((1,) * 3, (1,) * 3, device)
    paged = index_pages(real, case.page_size, [[1], [-1], [2]])
    before = {name: pool.clone() for name, pool in replay.pools["kv"].items()}
    plan = TRITON.plan(case.spec, batch, {"kv": paged})
    out = TRITON.run(
        case.spec,
        plan,
        replay.pools,
        MHA.ready_inputs(case.spec, **replay.tokens([(0, 1), (1, 1), (2, 1)]), **replay.layer),
    )
    assert not out[1].any()
    want = Replay(case, REFERENCE, DEVICE).play(alone(case.lengths))
    assert (found := compare(out[::2], want[::2], "fp32")), found
    for name, pool in replay.pools["kv"].items():
        changed = (pool != before[name]).flatten(1).any(1) & ~pool.isnan().flatten(1).all(1)
        assert changed.nonzero().flatten().tolist() == [1, 2], name


@pytest.mark.parametrize("gather", [False, True])
def test_views_of_larger_tensors(gather: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    how = triton_prefill.config
    monkeypatch.setattr(triton_prefill, "config", lambda *args: dataclasses.replace(how(*args), gather=gather))
    case = CASES["narrow_values"]
    want = exact(case)

    class Sliced(Replay):
        def tokens(self, step: object) -> dict[str, torch.Tensor]:
            made = super().tokens(step)  # type: ignore[arg-type]
            wide = {name: t.new_full((*t.shape[:2], 200), torch.nan) for name, t in made.items()}
            for name, t in made.items():
                wide[name][..., : t.shape[-1]] = t
            return {name: wide[name][..., : t.shape[-1]] for name, t in made.items()}

    steps = [*alone(case.lengths[:-1]), *([(len(case.lengths) - 1, size)] for size in (65, 1, 4))]
    assert (found := compare(Sliced(case, TRITON, DEVICE).play(steps), want, "fp32")), found


def test_many_rows_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASES["grouped_4"], lengths=(33, 70))
    want = Replay(case, TRITON, DEVICE).play(whole(case.lengths))
    monkeypatch.setattr(triton_prefill, "_MAX_SCRATCH_BYTES", 0)
    assert (found := compare(Replay(case, TRITON, DEVICE).play(whole(case.lengths)), want, "fp32")), found


def test_a_neighbour_that_is_not_a_number_stays_alone() -> None:
    case = dataclasses.replace(CASES["grouped_4"], lengths=(40, 40, 1))
    sick = Replay(case, TRITON, DEVICE)
    for t in sick.inputs.tokens.values():
        t[40:80] = torch.nan
    got, want = sick.play(whole(case.lengths)), exact(case)
    assert (found := compare(got[:40], want[:40], "fp32")), found
    assert (found := compare(got[80:], want[80:], "fp32")), found


def test_a_layer_without_keys_reads_what_another_stored() -> None:
    case = CASES["grouped_4"]
    owner = Replay(case, TRITON, DEVICE)
    want = owner.play(whole(case.lengths))
    reader = Replay(case, TRITON, DEVICE)
    for name, view in owner.pools["kv"].items():
        reader.pools["kv"][name].copy_(view)
    nothing = {"k": None, "v": None}
    reader.tokens = lambda step: Replay.tokens(reader, step) | nothing  # type: ignore[method-assign]
    assert torch.equal(reader.play(whole(case.lengths)), want)


def test_the_backend_says_what_it_needs() -> None:
    spec = dataclasses.replace(CASES["grouped_4"].spec, kv_dtype=torch.float8_e5m2)
    reasons = MHA.backends[0].rejects(spec, CPU_CHIP)
    assert MHA.backends[0].name == "triton"
    assert reasons[: len(triton_reasons(CPU_CHIP))] == triton_reasons(CPU_CHIP)
    assert any("kv_dtype" in reason for reason in reasons)
