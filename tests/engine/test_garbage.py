"""A step's tensors are given back when it ends, not when Python next looks for circles of references."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import find_architecture
from allotrope.layers.step import LayerStep, Step
from allotrope.verify.random_checkpoint import write_random

ARCHITECTURES = (
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Qwen3NextForCausalLM",
)


def _held() -> tuple[int, int, int]:
    """Tensors that the collector knows, their bytes, and steps."""
    objects = gc.get_objects()
    tensors = [one for one in objects if type(one) is torch.Tensor]
    return len(tensors), sum(one.nbytes for one in tensors), sum(type(one) in (Step, LayerStep) for one in objects)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_leave_nothing_to_collect(architecture: str, tmp_path: Path) -> None:
    """Prompts and decodes of several requests, twice, without a collection between."""
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 24)
    prompts = [[5 + i + j for i in range(20 + 9 * j)] for j in range(3)]
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=2)
    try:
        llm.generate(prompts, params)
        gc.collect()
        gc.disable()
        before = _held()
        llm.generate(prompts, params)
        assert _held() == before
    finally:
        gc.enable()
        llm.close()
