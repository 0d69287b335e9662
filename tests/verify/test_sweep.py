"""Every length against the engine's own references; and a length that turns is seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from verify_fixtures import Tiny

from allotrope.attention.mha.family import MHA
from allotrope.config import EngineConfig
from allotrope.errors import ConfigError
from allotrope.verify import sweep as sweeping
from allotrope.verify.options import VerifyOptions
from allotrope.verify.sweep import sweep, sweep_lines


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(sweeping, "LENGTHS", (15, 16, 17, 40, 63))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}])
def test_no_length_turns(tiny: Tiny, options: dict[str, str]) -> None:
    found = sweep(
        EngineConfig(model=str(tiny("llama").directory), max_num_seqs=1, max_num_batched_tokens=32, **options), 4
    )
    assert [(one.length, one.way) for one in found] == [(length, "eager") for length in (15, 16, 17, 40, 63)]
    assert not any(one.wrong for one in found), sweep_lines(found)
    assert all(one.error for one in found)


def test_a_length_that_turns_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose decode steps are too loud at 42 to 50 rows is wrong behind the prompt of 40 tokens alone."""
    right = MHA.backends[-1]

    def loud(spec: Any, plan: Any, caches: Any, inputs: Any) -> torch.Tensor:
        out = right.run(spec, plan, caches, inputs)
        return out * 1.2 if len(out) == 1 and 42 <= plan.sub_batches[0].rows.shape[1] <= 50 else out

    wrong = dataclasses.replace(right, name="loud", run=loud)
    monkeypatch.setattr(MHA, "backends", (wrong, right))
    found = sweep(EngineConfig(model=str(tiny("llama").directory)), 4)
    assert [one.length for one in found if one.wrong] == [40]
    assert "WRONG" in sweep_lines(found)[4] and sweep_lines(found)[-1] == "WRONG at 1 lengths"


def test_one_prompt_that_is_off_is_not_its_length(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right, said = MHA.backends[-1], []

    def moody(spec: Any, plan: Any, caches: Any, inputs: Any) -> torch.Tensor:
        out = right.run(spec, plan, caches, inputs)
        return out * 1.2 if not any("again" in text for text in said) and len(out) == 40 else out

    monkeypatch.setattr(MHA, "backends", (dataclasses.replace(right, name="moody", run=moody), right))
    found = sweep(EngineConfig(model=str(tiny("llama").directory)), 4, said.append)
    assert "again with other prompts: lengths 40" in said
    assert len(found) == 5 and not any(one.wrong for one in found)


def test_options_that_a_sweep_does_not_read() -> None:
    with pytest.raises(ConfigError, match="leave out lengths, random"):
        VerifyOptions(sweep=True, lengths="16", random=True)
