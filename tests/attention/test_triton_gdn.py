"""The kernels of the gated delta rule against the reference, on scattered, recycled and poisoned slots."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from device_under_test import DEVICE

from allotrope.attention.batch import BatchLayout, BatchTensors, SlotIndex
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.gdn import GDN
from allotrope.attention.replay import Replay, Step, at_random, in_chunks, in_order, whole
from allotrope.kernels.chip import CHIPS

TRITON, REFERENCE = GDN.backends[0], GDN.backends[-1]
# (case, dtype, sequences): both decays, value heads per key head 1 to 8, head sizes that no block size divides.
SELECTED = [
    ("one_to_two", torch.float32, (2, 5, 66)),
    ("one_to_four", torch.bfloat16, (1, 3, 64)),
    ("one_to_eight", torch.float32, (7, 65)),
    ("one_to_one", torch.float16, (3, 40)),
    ("by_channel_one_to_two", torch.float32, (2, 66)),
    ("by_channel", torch.bfloat16, (1, 3, 40)),
]


def case_of(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> Case:
    return dataclasses.replace(cases("gdn", dtype)[name], lengths=lengths)


def schedules(lengths: tuple[int, ...]) -> list[list[Step]]:
    """A prefill and a few decodes; chunks of odd sizes beside each other."""
    first = in_order((i, max(1, n - 2)) for i, n in enumerate(lengths))
    rest = [in_order((i, 1) for i, n in enumerate(lengths) if n > max(1, n - 2) + k) for k in (0, 1)]
    return [[first, *filter(None, rest)], at_random(lengths, 4)]


@pytest.mark.parametrize(("name", "dtype", "lengths"), SELECTED)
def test_equals_the_reference(name: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    case = case_of(name, dtype, lengths)
    want = Replay(case, REFERENCE).play(whole(lengths))
    for steps in schedules(lengths):
        got = Replay(case, TRITON, device=DEVICE).play(steps).cpu()
        assert (found := compare(got, want, case.kind)), f"{found}, steps {steps}"


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_states_of_other_types(state_dtype: torch.dtype) -> None:
    """Rounded when a step ends, not in between; a state one step off the other's rounding is a rounding apart."""
    case = case_of("one_to_two", torch.bfloat16, (2, 5, 66))
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, state_dtype=state_dtype))
    for steps in schedules(case.lengths):
        played = []
        for backend, device in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
            replay = Replay(case, backend, device=device)
            played.append(replay.play(steps).cpu())
            assert replay.pools["state"]["ssm"].dtype == state_dtype
        assert (found := compare(played[1], played[0], "bf16")), f"{found}, steps {steps}"


@pytest.mark.parametrize("channel", [False, True])
def test_slots_hold_the_state_after_the_last_token(channel: bool) -> None:
    case = case_of("by_channel" if channel else "one_to_two", torch.float32, (1, 2, 3, 5, 70))
    played = []
    for backend, device in ((REFERENCE, "cpu"), (TRITON, DEVICE)):
        replay = Replay(case, backend, device=device)
        replay.held["state"] = [[slot] for slot in (3, 1, 5, 2, 4)]
        for step in (whole(case.lengths[:3])[0], [(3, 3), (4, 66)], [(3, 1), (4, 2)], [(3, 1), (4, 2)]):
            replay.step(step)
        played.append({name: pool.cpu() for name, pool in replay.pools["state"].items()})
    want, got = played
    assert (found := compare(got["ssm"][1:], want["ssm"][1:], "fp32")), found
    assert torch.equal(got["conv"], want["conv"])


@pytest.mark.parametrize("name", ["one_to_two", "by_channel"])
@pytest.mark.parametrize("step", [1, 2])
def test_views_of_one_projection_are_read_in_place(step: int, name: str) -> None:
    """qkv, b and a as slices of one wider row, or b and a as every second number of it, and a convolution weight laid
    out by taps."""
    case = case_of(name, torch.float32, (1, 1, 9))
    replay, plain = (Replay(case, TRITON, device=DEVICE) for _ in range(2))
    sizes = [t.shape[1] * (1 if name == "qkv" else step) for name, t in replay.inputs.tokens.items()]
    wide = torch.full((11, sum(sizes) + 8), torch.nan, device=DEVICE)
    views = dict(zip(replay.inputs.tokens, wide[:, 3:-5].split(sizes, dim=1), strict=True))
    views = {name: view if name == "qkv" else view[:, ::step] for name, view in views.items()}
    for name, view in views.items():
        view.copy_(replay.inputs.tokens[name])
    replay.tokens = lambda step: views  # type: ignore[method-assign]
    replay.layer["conv_weight"] = replay.layer["conv_weight"].t().contiguous().t()
    assert torch.equal(replay.play(whole(case.lengths)), plain.play(whole(case.lengths)))


@pytest.mark.parametrize("null", [0, -1])
@pytest.mark.parametrize("channel", [False, True])
def test_padding_requests_give_zeros_and_write_nothing(channel: bool, null: int) -> None:
    case = case_of("by_channel" if channel else "one_to_two", torch.float32, (10, 10, 10, 10))
    replay = Replay(case, TRITON, device=DEVICE)
    pools = replay.pools["state"]
    before = {name: pool.clone() for name, pool in pools.items()}
    query_lens, device = (1, 1, 5, 3), torch.device(DEVICE)
    made = BatchLayout(query_lens, (1, 9, 5, 3), device)
    lens = torch.tensor([1, 0, 5, 3], dtype=torch.int32, device=device)
    given = BatchTensors(lens, made.tensors.query_start, made.positions, made.request_of_token)
    # The host's lengths are bounds: the device's say that the second request only fills up.
    batch = BatchLayout(query_lens, (9, 9, 9, 9), device, given)
    plan = TRITON.plan(case.spec, batch, {"state": SlotIndex(torch.tensor([2, null, 4, null], device=device))})
    tokens = {name: t[:10].to(device) for name, t in replay.inputs.tokens.items()}
    out = TRITON.run(case.spec, plan, replay.pools, GDN.ready_inputs(case.spec, **tokens, **replay.layer))
    assert not out[[1, 7, 8, 9]].any()
    assert out[[0, 2, 3, 4, 5, 6]].isfinite().all()
    assert out[[0, 2, 3, 4, 5, 6]].any()
    for name, pool in pools.items():
        untouched = [slot for slot in range(len(pool)) if slot not in (2, 4)]
        same = (pool == before[name]) | (pool.isnan() & before[name].isnan())
        assert same[untouched].all(), name
        assert pool[[2, 4]].isfinite().all(), name


def test_neighbours_do_not_change_a_bit() -> None:
    case = case_of("one_to_two", torch.float32, (4, 5, 66))
    chunks = in_chunks(case.lengths, 33)
    together = Replay(case, TRITON, device=DEVICE).play(chunks)
    apart = Replay(case, TRITON, device=DEVICE).play([[taken] for step in chunks for taken in step])
    assert torch.equal(together, apart)


def test_half_precision_state() -> None:
    case = case_of("one_to_one", torch.float32, (3, 40))
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, state_dtype=torch.float16))
    steps = in_chunks(case.lengths, 20)
    want = Replay(case, REFERENCE).play(steps)
    got = Replay(case, TRITON, device=DEVICE).play(steps).cpu()
    assert (found := compare(got.half(), want, "fp16")), found


def test_refusals_name_the_value() -> None:
    spec = dataclasses.replace(cases("gdn")["one_to_one"].spec, k_head_dim=512, state_dtype=torch.float64)
    reasons = "; ".join(TRITON.rejects(spec, CHIPS["sm_90"]))
    assert "k_head_dim=512" in reasons
    assert "state_dtype=torch.float64" in reasons
