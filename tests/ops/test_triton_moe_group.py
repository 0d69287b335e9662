"""Pairs of token and choice in the order of experts, against a stable sort."""

from __future__ import annotations

import pytest
import torch
from device_under_test import DEVICE

pytest.importorskip("triton", reason="triton is not installed")

from allotrope.layers.build import Build
from allotrope.layers.moe import Experts
from allotrope.ops.gated_activation import GatedActivation
from allotrope.ops.moe_group import triton as grouping_triton
from allotrope.ops.moe_group.triton import group

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def check_groups(experts: torch.Tensor, count: int) -> None:
    owner, order = experts.flatten().sort(stable=True)
    found = group(experts, count)
    want = (
        torch.bincount(owner, minlength=count).cumsum(0),
        order // experts.shape[1],
        owner,
        order.argsort(),
    )
    for one, other in zip(found, want, strict=True):
        assert one.dtype == torch.int32 and one.is_contiguous()
        assert torch.equal(one.long(), other)


@pytest.mark.parametrize(
    ("shape", "count"),
    [((0, 4), 12), ((1, 1), 2), ((1, 4), 300), ((7, 3), 5), ((33, 2), 40), ((65, 1), 12), ((103, 5), 13)],
    ids=str,
)
def test_groups(shape: tuple[int, int], count: int) -> None:
    """None, one, odd numbers, across both sizes of chunk; experts that nobody chose, the last among them."""
    check_groups(torch.randint(0, count - 1, shape, device=DEVICE), count)


@pytest.mark.parametrize("hot", [0, 6, 11])
def test_one_expert_takes_all(hot: int) -> None:
    check_groups(torch.full((50, 2), hot, device=DEVICE), 12)


def test_rows_of_a_wider_choice() -> None:
    check_groups(torch.randint(0, 12, (9, 8), device=DEVICE)[:, 2:5], 12)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pairs from which there are many. On a GPU they are as many as they are, in the interpreter that takes minutes."""
    if DEVICE != "cpu":
        return grouping_triton.MOST_PAIRS
    for name, value in (("MOST_PAIRS", 128), ("_RUN", 16), ("_OWN", 4), ("_READ", 8)):
        monkeypatch.setattr(grouping_triton, name, value)
    return 128


@pytest.mark.parametrize("count", [3, 64, 97])
def test_many_pairs(count: int, short_runs: int) -> None:
    """At the border both ways agree; behind it come several runs, the last not full, and experts that nobody chose."""
    check_groups(torch.randint(0, count, (short_runs // 8, 8), device=DEVICE), count)
    check_groups(torch.randint(0, count, (short_runs // 8 + 1, 8), device=DEVICE), count)
    check_groups(torch.randint(1, count - 1, (short_runs // 4 + 3, 5), device=DEVICE), count)


@pytest.mark.parametrize("hot", [0, 6, 11])
def test_one_expert_takes_many(hot: int, short_runs: int) -> None:
    check_groups(torch.full((short_runs // 2 + 5, 3), hot, device=DEVICE), 12)


def test_more_experts_than_the_kernels_count_go_another_way() -> None:
    """An expert beyond 16 bits is one."""
    experts = Experts(70000, 1, 1, GatedActivation(), Build(device=torch.device(DEVICE)), bias=False)
    chosen = torch.randint(0, 70000, (513, 8), device=DEVICE)
    owner, order = chosen.flatten().sort(stable=True)
    ends, source, place = experts.grouped(chosen)
    assert torch.equal(ends.long(), torch.bincount(owner, minlength=70000).cumsum(0))
    assert torch.equal(source.long(), order // 8) and torch.equal(place.long(), order.argsort())
