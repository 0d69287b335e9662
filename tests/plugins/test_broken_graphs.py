"""vLLM captures steps of some architectures in pieces and breaks between them: each replay is another step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.hosting import hosted
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture
from allotrope.verify.random_checkpoint import write_random

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(900)]

LENGTHS = (5, 45, 1)
COUNT = 4


class Captured:
    """A model as vLLM's wrapper runs it in a mixed step: captured without a step, then replayed in one.

    There is no GPU: what lies between breaks runs when it is captured and never again, as kernels do that read memory
    which nobody wrote since.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.eager = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        class Capture(BreakableCUDAGraphCapture):
            def _begin_segment(self) -> None:
                self._capturing = True

            def _end_segment(self) -> None:
                self._capturing = False

        context = get_forward_context()
        step, context.attn_metadata = context.attn_metadata, None
        mode, context.cudagraph_runtime_mode = context.cudagraph_runtime_mode, CUDAGraphMode.PIECEWISE
        capture = Capture()
        with capture:
            out: torch.Tensor = self.model(*args, **named)
        context.attn_metadata = step
        capture.replay()
        context.cudagraph_runtime_mode = mode
        self.eager += len(capture.segments)
        return out


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3NextForCausalLM"])
def test_a_replay_is_another_step(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr("vllm.compilation.breakable_cudagraph.weak_ref_tensor", lambda tensor: tensor)
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    asked = prompts(LENGTHS, vocab_size=300)
    with hosted(tmp_path, block_size=16, max_num_batched_tokens=64) as running:
        want = running.answers(asked, COUNT)
        captured = Captured(running.runner.model)
        monkeypatch.setattr(running.runner, "model", captured)
        found = running.answers(asked, COUNT)
        monkeypatch.undo()
    assert captured.eager >= COUNT
    assert [answer.ids for answer in found] == [answer.ids for answer in want]
