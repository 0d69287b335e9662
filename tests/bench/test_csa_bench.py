"""How the bench of compressed sparse attention judges a choice of entries: what rounding decides passes, no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from device_under_test import DEVICE

from allotrope.attention.check import Comparison
from allotrope.attention.csa import CSA, triton_index


@pytest.fixture
def csa() -> Any:
    from bench.kernels.cases import csa

    return csa


@pytest.mark.parametrize("spoiled", ["nothing", "near-tie", "far", "twice", "none"])
def test_a_pick_that_rounding_does_not_decide_is_refused(
    spoiled: str, csa: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoded token selects 4 of 6 entries: two score twice as much as three that nearly tie for the last place,
    wherever the newest, whose key the step makes, comes in."""
    torch.manual_seed(0)
    (case,) = (case for case in csa.cases() if case.tiny)
    x = case.make(torch.device(DEVICE))
    x.given["index_weights"].abs_()
    plan = CSA.backends[-1].plan(x.spec, x.batch, x.index)
    chunk = plan.chunks[0]
    entries, keys = chunk.compressed_rows[0, :5].int(), x.pools["index"]["k"].flatten(0, 1)
    key = torch.cat((torch.zeros(1), torch.ones(15))).to(keys) * keys[chunk.key_rows[0, 0]]
    for row, (factor, lead) in zip(
        chunk.key_rows[0], ((2, 0.0), (2, 0.0), (1, 0.0), (1, 2**-12), (1, 2**-11)), strict=False
    ):
        keys[row] = factor * key
        keys[row, 0] = lead

    own = triton_index.resolve

    def resolve(*given: Any) -> torch.Tensor:
        rows = own(*given)
        selected = torch.isin(entries, rows[0])
        assert selected[:2].all() and not selected[2:].all() and selected[2:].any()
        tied, passed_over = entries[2:][selected[2:]][0], entries[2:][~selected[2:]][0]
        wrong = {
            "nothing": (tied, tied),
            "near-tie": (tied, passed_over),
            "far": (entries[0], passed_over),
            "twice": (tied, entries[0]),
            "none": (tied, -1),
        }
        old, new = wrong[spoiled]
        rows[0, rows[0] == old] = new
        return rows

    monkeypatch.setattr(triton_index, "resolve", resolve)
    found: Sequence[Comparison] = case.check(x, case.ours(x))
    said = " | ".join(map(str, found))
    assert all(found) == (spoiled in ("nothing", "near-tie")), said
    if spoiled == "far":
        assert "1 of 10 tokens pick others, token 0 by" in said
    if spoiled in ("twice", "none"):
        assert "token 0 selects 3 entries that it sees; wanted 4" in said
    if spoiled == "near-tie":
        monkeypatch.setattr(csa, "_with_topk", lambda spec, plan, selected: plan)
        assert not all(case.check(x, case.ours(x))), "the swapped entries are as good as equal: nothing was tested"
