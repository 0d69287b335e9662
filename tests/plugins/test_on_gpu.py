"""On a GPU, decodes in CUDA graphs: the same tokens as without them, and as our own engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plugins.hosting import hosted
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams
from allotrope.models.registry import find_architecture
from allotrope.verify.random_checkpoint import write_random

pytestmark = [
    pytest.mark.usefixtures("in_vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(900),
]

NAMES = (
    "Qwen3NextForCausalLM",
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
)
LENGTHS = (1, 5, 45, 150)
COUNT = 8
# Logprobs of chosen tokens in bf16, between batches of other sizes.
ATOL = 0.1


@pytest.mark.parametrize("architecture", NAMES)
def test_decodes_in_graphs(architecture: str, tmp_path: Path) -> None:
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    asked = prompts(LENGTHS, vocab_size=300)
    ours = LLM(str(tmp_path), dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=1 << 28)
    wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    engine = [list(output.outputs[0].token_ids) for output in ours.generate(asked, wanted)]
    answers = []
    for eager in (True, False):
        options = {"dtype": "bfloat16", "enforce_eager": eager, "gpu_memory_utilization": 0.3}
        with hosted(tmp_path, block_size=16, **options) as running:
            backends = {layer.backend.name for layer in running.runner.model.layers}
            mode = running.runner.compilation_config.cudagraph_mode
            assert mode.has_full_cudagraphs() != eager, f"{mode} with {backends}"
            answers.append(running.answers(asked, COUNT))
    for eager_one, graphed, own in zip(*answers, engine, strict=True):
        # Near ties may fall either way; up to the first of them, all is one.
        same = next((i for i, (a, b) in enumerate(zip(eager_one.ids, graphed.ids, strict=True)) if a != b), COUNT)
        assert same > 0 and own[0] == graphed.ids[0]
        torch.testing.assert_close(eager_one.logprobs[:same], graphed.logprobs[:same], atol=ATOL, rtol=0.0)
