"""The comparison and the replay harness: what they accept, refuse and measure."""

from __future__ import annotations

import pytest
import torch

from allotrope.attention.check import KINDS, TOLERANCES, cases, compare
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, alone, at_random, in_chunks, whole


@pytest.fixture
def want() -> torch.Tensor:
    return torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("dtype", KINDS)
def test_rounding_alone_passes_and_more_does_not(want: torch.Tensor, dtype: torch.dtype) -> None:
    kind = KINDS[dtype]
    assert compare(want.to(dtype), want, kind)
    noise = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not compare((want + noise * 3 * TOLERANCES[kind].rms).to(dtype), want, kind)


def test_both_errors_are_what_they_say(want: torch.Tensor) -> None:
    got = want.clone()
    got[5, 1, 3] += 0.01
    found = compare(got.float(), want, "fp32")
    assert found.worst == (5, 1, 3)
    row = float(want[5, 1].square().mean().sqrt())
    assert found.peak == pytest.approx(0.01 / row, rel=1e-3)
    assert found.rms == pytest.approx(0.01 / float(want.norm()), rel=1e-3)
    assert not found
    assert "rms=" in found.wrong[0]
    assert "peak=" in found.wrong[1]


def test_a_small_row_is_measured_by_itself(want: torch.Tensor) -> None:
    """An error that drowns in the whole tensor is large in a row of a tenth of its size."""
    want[2] *= 0.1
    got = want.clone()
    got[2, 0, 0] += 5e-5
    found = compare(got.float(), want, "fp32")
    assert found.rms < TOLERANCES["fp32"].rms
    assert not found


def test_every_reason_is_given(want: torch.Tensor) -> None:
    broken = want.clone()
    broken[0, 0, 0] = float("nan")
    found = compare(broken, want, "fp32")
    assert [reason.split("=")[0].split(" ")[0] for reason in found.wrong] == ["dtype", "1", "rms", "peak"]
    assert "shape=(6, 3, 16)" in str(compare(want[:6].float(), want, "fp32"))


def test_what_proves_nothing_is_no_pass() -> None:
    assert not compare(torch.zeros(3, 4), torch.zeros(3, 4), "fp32")
    assert not compare(torch.zeros(0, 4), torch.zeros(0, 4), "fp32")
    with pytest.raises(ValueError, match="not finite"):
        compare(torch.zeros(1), torch.full((1,), float("nan")), "fp32")
    with pytest.raises(KeyError):
        compare(torch.ones(1), torch.ones(1), "fp31")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_cases_that_differ(family: str) -> None:
    found = cases(family)
    assert found
    specs = [(case.spec, case.lengths) for case in found.values()]
    assert len(set(specs)) == len(specs)
    for name, case in found.items():
        assert (case.name, case.spec.family, case.kind) == (name, family, "fp32")
        inputs, again = case.inputs(seed=3), case.inputs(seed=3)
        for key, tensor in inputs.tokens.items():
            assert len(tensor) == sum(case.lengths)
            assert torch.equal(tensor, again.tokens[key])


@pytest.mark.parametrize("lengths", [(1,), (5, 1, 300), (1, 1, 2)])
def test_schedules_feed_every_token_once(lengths: tuple[int, ...]) -> None:
    for steps in (whole(lengths), alone(lengths), in_chunks(lengths, 7), *(at_random(lengths, s) for s in range(5))):
        fed = [0] * len(lengths)
        for step in steps:
            assert len({i for i, _ in step}) == len(step) > 0
            assert [n == 1 for _, n in step] == sorted((n == 1 for _, n in step), reverse=True)
            for i, n in step:
                assert n > 0
                fed[i] += n
        assert tuple(fed) == lengths


def test_memory_is_poisoned_until_it_is_written() -> None:
    replay = Replay(cases("mha")["grouped_4"], FAMILIES["mha"].backends[0])
    for view in replay.pools["kv"].values():
        assert not view[0].any()
        assert view[1:].isnan().all()


def test_of_very_many_values_a_few_may_lie_far_out() -> None:
    want = torch.ones(5, 100_000)
    for far, accepted in (((0.09, 0.09), True), ((0.09, 0.09, 0.09), False), ((0.09, 0.11), False)):
        got = want.clone()
        got[0, : len(far)] += torch.tensor(far)
        assert bool(compare(got.bfloat16(), want, "bf16")) == accepted, far
    assert not compare(got[:1, :100].bfloat16(), want[:1, :100], "bf16")


def test_pages_outside_the_window_are_given_back() -> None:
    case = cases("mha")["window_is_page"]
    replay = Replay(case, FAMILIES["mha"].backends[-1])
    longest = max(range(len(case.lengths)), key=case.lengths.__getitem__)
    for _ in range(3):
        replay.step([(longest, 16)])
    held = replay.held["kv"][longest]
    # Three pages are written; the next query reads from position 33 on, in the third.
    assert held[:2] == [-1, -1]
    assert held[2] > 0
