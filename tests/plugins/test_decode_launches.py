"""What a decode step starts on a device inside vLLM: what our own engine starts, and two kernels for the positions.

On a CPU, with attention that is made of device operations: each would be a kernel of the captured step.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_launches import Launches
from engine.device_only_mha import BACKEND, static
from engine.watching import engine
from plugins.hosting import hosted
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.verify.random_checkpoint import write_random

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

LENGTHS = (5, 45, 1)


class Counted:
    """A model that counts the launches of its steps of one token a request."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps: list[Counter[str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        step = next(iter(get_forward_context().attn_metadata.values()))
        with Launches() as found:
            out: torch.Tensor = self.model(*args, **named)
        if step.common.max_query_len == 1:
            self.steps.append(Counter(found.names))
        return out


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_a_decode_step_launches_what_our_own_does(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block table, and with two."""
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    if "layer_types" in config:
        # As many of each kind: vLLM's groups of layers are then ours.
        config["layer_types"] = ["sliding_attention", "full_attention"] * 2
        config.pop("sliding_window_pattern", None)
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    asked = prompts(LENGTHS, vocab_size=300)
    with hosted(tmp_path, block_size=16) as running:
        want = running.answers(asked)
        assert len(running.groups) == (2 if architecture == "Gemma3ForCausalLM" else 1)
        model = running.runner.model
        monkeypatch.setattr(model, "_arange", torch.arange(8))
        for layer in model.layers:
            monkeypatch.setattr(layer, "backend", BACKEND)
        counted = Counted(model)
        monkeypatch.setattr(running.runner, "model", counted)
        found = running.answers(asked)
        monkeypatch.undo()
    assert [answer.ids for answer in found] == [answer.ids for answer in want]
    runner = static(engine(tmp_path, device="cpu", max_num_seqs=4, max_model_len=256), 4)
    assert runner.buffers is not None
    inputs, _ = runner.buffers.inputs(3)
    with torch.inference_mode():
        # Once before: what outlives a step is made.
        runner.model(runner._layers.step(inputs.ids, inputs, {}))
        with Launches() as own:
            runner.model(runner._layers.step(inputs.ids, inputs, {}))
    more = Counter({"aten::sub.out": 1, "aten::clamp_": 1})
    assert len(counted.steps) >= 7 and all(step == Counter(own.names) + more for step in counted.steps)
