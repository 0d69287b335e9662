"""A family's plan of a step is made once for all layers of a kind, and every layer of the kind gets that one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import engine, request
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.attention.backend import AttentionBackend
from allotrope.request import SamplingParams

# Plans of a step and layers, of a tiny model with several layers of each kind: one per window, stride or state.
COUNTS = {
    "LlamaForCausalLM": (1, 2),
    "GptOssForCausalLM": (2, 4),
    "Gemma4ForCausalLM": (2, 5),
    "DeepseekV3ForCausalLM": (1, 3),
    "GlmMoeDsaForCausalLM": (2, 5),
    "DeepseekV4ForCausalLM": (3, 4),
    "Qwen3NextForCausalLM": (2, 5),
    "KimiLinearForCausalLM": (2, 5),
}


class Recorder:
    """Stands before the backends of a model: which plans a step made, and which one each layer ran with."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.ran: list[Any] = []

    def before(self, backend: AttentionBackend) -> AttentionBackend:
        def plan(*args: Any, **named: Any) -> Any:
            self.made.append(backend.plan(*args, **named))
            return self.made[-1]

        def run(spec: Any, plan: Any, *args: Any, **named: Any) -> Any:
            self.ran.append(plan)
            return backend.run(spec, plan, *args, **named)

        return dataclasses.replace(backend, plan=plan, run=run)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_one_plan_a_step_and_kind(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (tmp_path / "config.json").write_text(json.dumps(find_architecture({"architectures": [name]}, "").tiny()))
    options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    running = engine(tmp_path, load_format="dummy", device="cpu", async_scheduling="off", **options)
    recorder, model_runner = Recorder(), running._executor.worker.model_runner  # type: ignore[attr-defined]
    for layer in model_runner.model.layers:
        layer.mixer.backend = recorder.before(layer.mixer.backend)
    layers = model_runner._layers
    layers._layers = [
        (spec, layer.mixer.backend, group_ids, caches)
        for (spec, _, group_ids, caches), layer in zip(layers._layers, model_runner.model.layers, strict=True)
    ]
    kinds = [(spec, tuple(group_ids.items())) for spec, _, group_ids, _ in layers._layers]
    for i, ids in enumerate(prompts((3, 40, 1))):
        running.add(request(f"r{i}", ids, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)))
    steps = 0
    while running.has_work():
        recorder.made.clear()
        recorder.ran.clear()
        running.step()
        steps += 1
        assert len(recorder.made) <= len(set(kinds))
        assert (len(recorder.made), len(kinds)) == COUNTS.get(name, (len(recorder.made), len(kinds)))
        first: dict[Any, Any] = {}
        for kind, plan in zip(kinds, recorder.ran, strict=True):
            assert any(plan is one for one in recorder.made)
            assert first.setdefault(kind, plan) is plan
    assert steps > 3
