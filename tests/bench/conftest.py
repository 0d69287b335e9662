"""The bench's commands and the weights that it draws."""

from __future__ import annotations

from typing import Any

import pytest
from bench_scripts import load_script


@pytest.fixture
def weights() -> Any:
    from bench import random_weights

    return random_weights


@pytest.fixture
def engine() -> Any:
    return load_script("engine")
