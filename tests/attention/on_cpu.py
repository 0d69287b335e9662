"""Which backends of a family a test on the CPU can run."""

from __future__ import annotations

import pytest
import torch

from allotrope.attention.backend import Backend
from allotrope.attention.check import Case


def skip_unless_it_runs(backend: Backend, case: Case) -> None:
    """Skip the test, with the backend's reasons, if the backend cannot run the case."""
    if reasons := backend.rejects(case.spec, torch.device("cpu")):
        pytest.skip("; ".join(reasons))
