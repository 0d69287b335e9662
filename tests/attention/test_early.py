"""Which launches are early: on chips that know it, unless the switch says no."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton

from allotrope.attention import early


def kernel(x: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("cuda", "capability", "switch", "expected"),
    [
        ("13.0", (9, 0), None, True),
        ("13.0", (10, 0), "1", True),
        ("13.0", (9, 0), "0", False),
        ("13.0", (8, 0), None, False),
        (None, (9, 4), None, False),
    ],
    ids=["hopper", "later", "switched off", "older", "rocm"],
)
def test_launches_are_early_where_chips_know_it(
    cuda: str | None, capability: tuple[int, int], switch: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.delenv(early.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(early.SWITCH, switch)
    given: list[dict[str, Any]] = []
    made = triton.runtime.JITFunction(kernel)
    assert not early.launched_early(made)
    monkeypatch.setattr(made, "run", lambda *_, **options: given.append(options), raising=False)
    early._knows_how.cache_clear()
    try:
        early.early(made)[(1,)](1, num_warps=4)
    finally:
        early._knows_how.cache_clear()
    assert early.launched_early(made)
    always = {"grid": (1,), "warmup": False, "num_warps": 4, "enable_fp_fusion": True}
    assert given == [always | ({"launch_pdl": True} if expected else {})]
