"""Which launches use PDL: on chips that have it, unless the switch says no."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from allotrope.kernels import pdl
from allotrope.kernels.chip import CHIPS


def kernel(x: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("arch", "switch", "expected"),
    [
        ("sm_90", None, True),
        ("sm_100", "1", True),
        ("sm_90", "0", False),
        ("sm_80", None, False),
        ("gfx942", None, False),
    ],
)
def test_launches_use_pdl_where_the_chip_has_it(
    arch: str, switch: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdl, "current_chip", lambda: CHIPS[arch])
    monkeypatch.delenv(pdl.SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(pdl.SWITCH, switch)
    given: list[dict[str, Any]] = []
    made = triton.runtime.JITFunction(kernel)
    assert not pdl.uses_pdl(made)
    monkeypatch.setattr(made, "run", lambda *_, **options: given.append(options), raising=False)
    pdl._pdl_launches.cache_clear()
    try:
        pdl.with_pdl(made)[(1,)](1, num_warps=4)
    finally:
        pdl._pdl_launches.cache_clear()
    assert pdl.uses_pdl(made)
    always = {"grid": (1,), "warmup": False, "num_warps": 4, "enable_fp_fusion": True}
    assert given == [always | ({"launch_pdl": True} if expected else {})]
