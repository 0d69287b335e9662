"""What tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allotrope.engine.ranks.worker_process import keep_worker_processes


@pytest.fixture(scope="module")
def kept_workers() -> Iterator[None]:
    """Engines of a module take over each other's worker processes: a new one imports for seconds."""
    with keep_worker_processes():
        yield
