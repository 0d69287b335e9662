"""The same for chips on which nothing has been timed; a file of its own, for another core."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from aot_examination import UNTIMED, hold_kernels_to_chips


@pytest.mark.timeout(600)
@pytest.mark.parametrize("archs", UNTIMED, ids="+".join)
def test_every_kernel_compiles_within_the_chip(archs: tuple[str, ...]) -> None:
    hold_kernels_to_chips(archs)
