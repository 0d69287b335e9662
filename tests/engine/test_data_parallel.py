"""Ranks with requests and caches of their own give the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.test_multiprocess_executor import QUICK, compare

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"tensor_parallel_size": 1, "data_parallel_size": 2},
    "DP2xEP2": {"tensor_parallel_size": 1, "data_parallel_size": 2, "enable_expert_parallel": True},
    "TP2xDP2": {"data_parallel_size": 2},
    "TP2xDP2xEP4": {"data_parallel_size": 2, "enable_expert_parallel": True},
}
WITHOUT_EXPERTS = ("LlamaForCausalLM",)
CASES = [
    pytest.param(name, layout, marks=[pytest.mark.slow] if layout.startswith("TP2") and name != QUICK[2] else [])
    for name in QUICK
    for layout in LAYOUTS
    if name not in WITHOUT_EXPERTS or "EP" not in layout
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_ranks_with_requests_of_their_own_give_the_tokens_of_one(name: str, layout: str, tmp_path: Path) -> None:
    """Four requests that end unevenly, of which one rank has none in the end, prompts in chunks."""
    compare(name, tmp_path, **LAYOUTS[layout])
