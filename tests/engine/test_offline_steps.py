"""How many tokens a step of `LLM` takes: more where nobody waits for the next token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import allotrope.llm
from allotrope import LLM


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda:0", {}, 16384),
        ("cuda:0", {"max_num_seqs": 20000}, 20000),
        ("cuda:0", {"max_num_batched_tokens": 512}, 512),
        ("cpu", {}, None),
    ],
)
def test_steps_are_longer_on_a_gpu_unless_told_otherwise(
    device: str, options: dict[str, int], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allotrope.llm, "device_named", lambda _: torch.device(device))
    monkeypatch.setattr(allotrope.llm, "Engine", lambda config: SimpleNamespace(config=config))
    llm = LLM("model", **options)
    assert llm.engine.config.max_num_batched_tokens == llm.config.max_num_batched_tokens == expected
