"""Which backends of a family a test on the CPU can run."""

from __future__ import annotations

import pytest

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.check import Case
from allotrope.kernels.chip import CPU as CPU_CHIP


def skip_unless_it_runs(backend: AttentionBackend, case: Case) -> None:
    """Skip the test, with the backend's reasons, if the backend cannot run the case."""
    if reasons := backend.rejects(case.spec, CPU_CHIP):
        pytest.skip("; ".join(reasons))
