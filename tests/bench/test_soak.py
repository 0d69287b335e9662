"""The soak, small: what it says of a right engine, and that it would say if one were wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_tiny

from allotrope.architectures.llama import tiny_llama
from allotrope.config import EngineConfig


@pytest.fixture
def bench() -> Any:
    from bench.engine import soak

    return soak


def test_nothing_differs_and_nothing_leaks(bench: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = EngineConfig(
        model=str(write_tiny(tiny_llama(), tmp_path).directory),
        dtype="float32",
        device="cpu",
        async_scheduling="on",
        max_model_len=160,
        max_num_seqs=6,
        max_num_batched_tokens=96,
        page_size=4,
    )
    found = bench.soak(config, 40, 160, 10, seed=1)
    assert found.wrong() == []
    assert found.aborted and found.preemptions and found.cached_tokens, found


def test_what_a_soak_calls_wrong(bench: Any) -> None:
    """Another token is a near-tie only within the noise, and noise has a bound of its own."""

    def answers(*tokens: int, shift: float = 0.0, margin: float = 1.0) -> dict[str, Any]:
        logprobs, margins = [-1.0 + shift] * len(tokens), [margin] * len(tokens)
        return {"r": bench.Answer(list(tokens), logprobs, margins, None, True)}

    assert bench.compare(answers(1, 2, 3, shift=1e-3), answers(1, 2, 3), 0.01)[1:] == ([], [])
    near = bench.compare(answers(1, 2, 4, shift=1e-3), answers(1, 2, 3, margin=1e-3), 0.01)
    assert len(near[1]) == 1 and not near[2]
    clear = bench.compare(answers(1, 2, 4, shift=1e-3), answers(1, 2, 3), 0.01)
    assert not clear[1] and len(clear[2]) == 1
    noisy = bench.compare(answers(1, 2, 3, shift=0.1), answers(1, 2, 3), 0.01)
    assert noisy[2] == ["log-probabilities of equal tokens differ by 0.1; allowed: 0.01"]
