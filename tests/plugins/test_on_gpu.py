"""Hosts on a GPU, decodes in CUDA graphs: the same tokens as without them, and as our own engine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import hosting_sglang, on_gpu_sglang
from plugins.hosting import Answer, hosted, run_apart
from tiny_checkpoints import prompts

from allotrope import LLM, SamplingParams
from allotrope.architectures.registry import find_architecture
from allotrope.errors import ModelError
from allotrope.verify.random_checkpoint import write_random

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.timeout(900),
]

CASES = (
    ("Qwen3NextForCausalLM", "auto"),
    ("GptOssForCausalLM", "auto"),
    ("Gemma4ForCausalLM", "auto"),
    ("DeepseekV32ForCausalLM", "auto"),
    ("DeepseekV4ForCausalLM", "auto"),
    ("Qwen3NextForCausalLM", "fp8"),
    ("GptOssForCausalLM", "fp8"),
)
LENGTHS = (1, 5, 45, 150)
COUNT = 8
# Logprobs of chosen tokens in bf16, between batches of other sizes.
ATOL = 0.1


@pytest.mark.parametrize("case", on_gpu_sglang.CASES)
def test_decodes_in_graphs_of_sglang(case: str, in_sglang: None, tmp_path: Path) -> None:
    try:
        hosting_sglang.write(on_gpu_sglang.CASES[case][0], tmp_path)
    except ModelError as error:
        # An earlier Transformers than ours comes with SGLang.
        pytest.skip(str(error))
    on_gpu_sglang.check(case, tmp_path)


@pytest.mark.parametrize(("architecture", "kv_cache_dtype"), CASES)
def test_decodes_in_graphs_of_vllm(architecture: str, kv_cache_dtype: str, in_vllm: None, tmp_path: Path) -> None:
    """Each in a process of its own: vLLM's graphs of one model share memory with those of the model before."""
    given = f"{architecture!r}, {kv_cache_dtype!r}, Path({str(tmp_path)!r})"
    code = f"from pathlib import Path; from plugins.test_on_gpu import decode_in_graphs; decode_in_graphs({given})"
    done = run_apart(code, {"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-6000:]


def decode_in_graphs(architecture: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    first = prompts(LENGTHS, vocab_size=300)
    # Steps with prompts of one size: run, captured, replayed. No prompt comes twice, lest prefixes of it are cached.
    rounds = [[[(token + number) % 300 for token in one] for one in first] for number in range(3)]
    both: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    ours = LLM(str(tmp_path), max_model_len=256, kv_cache_memory_bytes=1 << 28, **both)
    wanted = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, logprobs=0)
    engine = [output.outputs[0] for asked in rounds for output in ours.generate(asked, wanted)]
    answers = []
    for eager in (True, False):
        options = both | {"enforce_eager": eager, "gpu_memory_utilization": 0.1}
        # The largest is for the prompts together, where vLLM captures mixed steps of an architecture.
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 256]}
        options |= {"kv_cache_memory_bytes": 1 << 28, "compilation_config": sizes}
        with hosted(tmp_path, block_size=16, **options) as running:
            backends = {layer.backend.name for layer in running.runner.model.layers}
            mode = running.runner.compilation_config.cudagraph_mode
            assert mode.has_full_cudagraphs() != eager, f"{mode} with {backends}"
            answers.append([answer for asked in rounds for answer in running.answers(asked, COUNT)])
            graphs = running.runner.get_model().prefill.graphs
            assert graphs is None if eager else graphs is not None and graphs.replays
    for eager_one, graphed, own in zip(*answers, engine, strict=True):
        assert_close(eager_one, graphed, own)


def assert_close(eager_one: Answer, graphed: Answer, own: Any) -> None:
    """`own`: of our engine."""
    # Near ties may fall either way; up to the first of them, all is one.
    same = next((i for i, (a, b) in enumerate(zip(eager_one.ids, graphed.ids, strict=True)) if a != b), COUNT)
    assert same > 0 and own.token_ids[0] == graphed.ids[0]
    assert abs(own.logprobs[0].logprob - graphed.logprobs[0].item()) < ATOL
    torch.testing.assert_close(eager_one.logprobs[:same], graphed.logprobs[:same], atol=ATOL, rtol=0.0)
