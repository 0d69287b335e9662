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

# Architecture, type of the model, type of the caches' entries.
CASES = (
    ("Qwen3NextForCausalLM", "float32", "auto"),
    ("GptOssForCausalLM", "float32", "auto"),
    ("Gemma4ForCausalLM", "float32", "auto"),
    ("DeepseekV32ForCausalLM", "float32", "auto"),
    ("DeepseekV4ForCausalLM", "float32", "auto"),
    ("Qwen3NextForCausalLM", "bfloat16", "fp8"),
    ("GptOssForCausalLM", "bfloat16", "fp8"),
)
LENGTHS = (1, 5, 45, 150)
COUNT = 8
# Logprobs of chosen tokens: of all tokens in fp32, and in bf16 of those before a near tie.
ATOL = {"float32": 1e-3, "bfloat16": 0.1}


@pytest.mark.parametrize("case", on_gpu_sglang.CASES)
def test_decodes_in_graphs_of_sglang(case: str, in_sglang: None, tmp_path: Path) -> None:
    try:
        hosting_sglang.write(on_gpu_sglang.CASES[case][0], tmp_path)
    except ModelError as error:
        # An earlier Transformers than ours comes with SGLang.
        pytest.skip(str(error))
    on_gpu_sglang.check(case, tmp_path)


@pytest.mark.parametrize(("architecture", "dtype", "kv_cache_dtype"), CASES)
def test_decodes_in_graphs_of_vllm(
    architecture: str, dtype: str, kv_cache_dtype: str, in_vllm: None, tmp_path: Path
) -> None:
    """Each in a process of its own: vLLM's graphs of one model share memory with those of the model before."""
    given = f"{architecture!r}, {dtype!r}, {kv_cache_dtype!r}, Path({str(tmp_path)!r})"
    code = f"from pathlib import Path; from plugins.test_on_gpu import decode_in_graphs; decode_in_graphs({given})"
    done = run_apart(code, {"OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr[-6000:]


def decode_in_graphs(architecture: str, dtype: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    config = find_architecture({"architectures": [architecture]}, architecture).tiny()
    write_random(config | {"architectures": [architecture]}, tmp_path, None, 0)
    first = prompts(LENGTHS, vocab_size=300)
    # Steps with prompts of one size: run, captured, replayed. No prompt comes twice, lest prefixes of it are cached.
    rounds = [[[(token + number) % 300 for token in one] for one in first] for number in range(3)]
    both: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
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
        if dtype == "float32":
            assert_ours(eager_one, own)
            assert_ours(graphed, own)
        else:
            assert_close(eager_one, graphed)


def assert_ours(found: Answer, own: Any) -> None:
    """`own`: of our engine, whose steps are others, so that in bf16 they round otherwise."""
    assert list(found.ids) == list(own.token_ids), (found.ids, own.token_ids)
    wanted = torch.tensor([step.logprob for step in own.logprobs])
    torch.testing.assert_close(torch.as_tensor(found.logprobs), wanted, atol=ATOL["float32"], rtol=0.0)


def assert_close(eager_one: Answer, graphed: Answer) -> None:
    # Near ties may fall either way; up to the first of them, all is one.
    same = next((i for i, (a, b) in enumerate(zip(eager_one.ids, graphed.ids, strict=True)) if a != b), COUNT)
    assert same > 0, (eager_one.ids, graphed.ids)
    torch.testing.assert_close(eager_one.logprobs[:same], graphed.logprobs[:same], atol=ATOL["bfloat16"], rtol=0.0)
