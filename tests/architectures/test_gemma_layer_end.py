"""A layer of Gemma 4 ends in one kernel, in all its variants: norm, sum, the layer's scalar and the next norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.test_gemma import VARIANTS
from counted_launches import Launches
from engine.watching import Watch, engine, request, run
from tiny_checkpoints import prompts, write_tiny

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime import interpreter

# Variant, and the part of a layer that works last before its end.
LAST_PART = {
    "gemma 3": "ffn",
    "gemma 4": "ffn",
    "gemma 4 with experts": "parallel_experts",
    "gemma 4 with inputs per layer and shared rows": "per_layer_out",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are not interpreted")
@pytest.mark.usefixtures("own_choices")
@pytest.mark.parametrize("variant", LAST_PART)
def test_a_layer_ends_in_one_kernel(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    config = {key: value for key, value in VARIANTS[variant]().items() if value is not None}
    directory = write_tiny(config, tmp_path).directory
    asked = [request("r", ids) for ids in prompts((7,))]
    options = {"device": "cpu", "max_num_seqs": 2, "max_model_len": 32}
    plain, fused = Watch(), Watch()
    tokens = run(engine(directory, plain, **options), asked)

    # Norms run as on a device, in Triton's interpreter; what that does by itself is no launch.
    interpreted = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        before = len(found.names)
        interpreted(self, *args, **kwargs)
        found.names[before:] = [self.fn.__name__]

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr("allotrope.kernels.triton_version.triton_reasons", lambda chip: [])
    running = engine(directory, fused, **options)
    last: list[int] = []
    ends: list[list[str]] = []
    for layer in running.model.layers:
        getattr(layer, LAST_PART[variant]).register_forward_hook(lambda *_: last.append(len(found.names)))
        layer.register_forward_hook(lambda *_: ends.append(found.names[last.pop() :]))
    with Launches() as found:
        assert run(running, asked) == tokens
    assert ends and all(names == ["norm_kernel"] for names in ends), ends
    for position, logits in plain.seen["r"].items():
        torch.testing.assert_close(fused.seen["r"][position], logits, atol=1e-4, rtol=0.0)
