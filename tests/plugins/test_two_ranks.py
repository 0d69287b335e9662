"""Inside vLLM with two ranks: layers share work in its group, and answers are those of our engine alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plugins.hosting import answers_apart, assert_all_ours, assert_answers_as_engine
from tiny_checkpoints import prompts

pytestmark = [pytest.mark.usefixtures("in_vllm"), pytest.mark.timeout(600)]

ARCHITECTURES = (
    "LlamaForCausalLM",
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Qwen3NextForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
)
COUNT = 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's platform is the GPU here")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_answer_as_one(architecture: str, tmp_path: Path) -> None:
    asked = prompts((1, 45, 90), vocab_size=300)
    # One of them as vLLM starts its ranks.
    fork = architecture != ARCHITECTURES[0]
    options = {"tensor_parallel_size": 2, "enforce_eager": True}
    found = answers_apart(architecture, tmp_path, asked, COUNT, fork, **options)
    assert_all_ours(found, 2)
    assert_answers_as_engine(found, tmp_path, asked, "cpu")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_gpus_answer_as_one(architecture: str, tmp_path: Path) -> None:
    """Decodes in CUDA graphs. Of one GPU and of two, both are held to our engine's answers."""
    asked = prompts((1, 45, 90), vocab_size=300)
    options = {
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 28,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    }
    for ranks in (2, 1):
        found = answers_apart(architecture, tmp_path, asked, COUNT, tensor_parallel_size=ranks, **options)
        assert_all_ours(found, ranks)
        assert_answers_as_engine(found, tmp_path, asked, "cuda")
