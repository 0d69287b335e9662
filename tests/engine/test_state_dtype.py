"""Recurrent states in another type than fp32: half the memory, nearly the same logits; refused where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.watching import Watch, engine, request, run
from tiny_checkpoints import TinyCheckpoint, prompts, write_tiny

from allotrope.architectures.llama import tiny_llama
from allotrope.architectures.qwen3_next import tiny_qwen3_next
from allotrope.engine.engine import Engine
from allotrope.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    torch.set_num_threads(1)
    return write_tiny(tiny_qwen3_next(), tmp_path_factory.mktemp("tiny"))


def states_of(running: Engine) -> set[torch.dtype]:
    return {layer.mixer.spec.state_dtype for layer in running.model.layers if hasattr(layer.mixer.spec, "state_dtype")}


def logits(path: Path, state_dtype: str, **options: object) -> torch.Tensor:
    (ids,), watch = prompts((60,)), Watch()
    running = engine(path, watch, state_dtype=state_dtype, **options)
    run(running, [request("r", ids)])
    return torch.stack([watch.seen["r"][i] for i in range(len(ids))])


def test_half_the_memory(tiny: TinyCheckpoint) -> None:
    full, half = (engine(tiny.directory, state_dtype=kind) for kind in ("auto", "bfloat16"))
    assert (states_of(full), states_of(half)) == ({torch.float32}, {torch.bfloat16})
    sizes = []
    for running in (full, half):
        spec = next(layer.mixer.spec for layer in running.model.layers if hasattr(layer.mixer.spec, "state_bytes"))
        sizes.append(spec.state_bytes)
    assert sizes[0] == 2 * sizes[1]


def test_rounded_states_cost_little(tiny: TinyCheckpoint) -> None:
    exact = logits(tiny.directory, "float32")
    torch.testing.assert_close(logits(tiny.directory, "auto"), exact, atol=0, rtol=0)
    # Token by token, so that the state is rounded sixty times.
    for kind, most in (("bfloat16", 3e-2), ("float16", 4e-3)):
        error = (logits(tiny.directory, kind, max_num_batched_tokens=1, max_num_seqs=1) - exact).abs()
        assert 0 < float(error.median()) < most * float(exact.std()), kind


def test_models_without_states_refuse(tmp_path: Path) -> None:
    path = write_tiny(tiny_llama(), tmp_path).directory
    assert not states_of(engine(path, state_dtype="float32"))
    with pytest.raises(ConfigError, match="state_dtype: mha keeps no recurrent state"):
        engine(path, state_dtype="bfloat16")
