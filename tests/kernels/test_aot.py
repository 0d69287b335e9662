"""Every kernel compiles for every chip that launches are tuned for, within its memory and registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from aot_examination import TIMED, UNTIMED, hold_kernels_to_chips

from allotrope.kernels.chip import CHIPS


def test_every_chip_is_compiled_for() -> None:
    assert sorted(arch for archs in TIMED + UNTIMED for arch in archs) == sorted(CHIPS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("archs", TIMED, ids="+".join)
def test_every_kernel_compiles_within_the_chip(archs: tuple[str, ...]) -> None:
    hold_kernels_to_chips(archs)
