"""On a GPU: captured decode steps give the bits of eager ones, while they are captured and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.watching import Watch, assert_idle, assert_same, engine, request, run
from tiny_checkpoints import prompts, write_tiny

from allotrope.models.llama import tiny_llama, tiny_mistral
from allotrope.models.qwen3_moe import tiny_qwen3_moe
from allotrope.models.qwen3_next import tiny_qwen3_next
from allotrope.request import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: nothing can be captured")

CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "experts": tiny_qwen3_moe,
    "hybrid": tiny_qwen3_next,
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(CONFIGS[request.param](), tmp_path_factory.mktemp("tiny")).directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_the_bits_of_eager_steps(model: Path, dtype: str) -> None:
    """Captured one by one between the steps: some steps run eagerly, the rest as graphs, and none can be told."""
    asked = [request(f"r{i}", ids) for i, ids in enumerate(prompts((5, 33, 7, 30, 2, 9, 11, 70, 1)))]
    options = {"device": "cuda", "dtype": dtype, "max_num_seqs": 7, "max_num_batched_tokens": 128}
    graphs, eager = Watch(), Watch()
    captured = engine(model, graphs, **options)
    plain = engine(model, eager, cuda_graphs=False, **options)
    assert_same(run(captured, asked), run(plain, asked))
    assert captured.graph_replays and not plain.graph_replays
    for name, positions in eager.seen.items():
        for position, logits in positions.items():
            assert torch.equal(graphs.seen[name][position], logits), (name, position)
    assert_idle(captured)


def test_overlap_on_a_gpu_says_the_same(model: Path) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=7, seed=3, logprobs=2),
        SamplingParams(temperature=1.1, top_p=0.9, max_tokens=12, seed=4, stop_token_ids=(11, 12, 13, 14)),
        SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.3),
    ]
    asked = [
        request(f"r{i}", ids, params[i % 4], eos_ids=tuple(range(20, 40)))
        for i, ids in enumerate(prompts((5, 33, 7, 30, 2, 9, 11, 70, 1, 12)))
    ]
    options = {"device": "cuda", "max_num_seqs": 5, "max_num_batched_tokens": 48, "page_size": 16}
    want = run(engine(model, overlap="off", **options), asked)
    running = engine(model, overlap="on", **options)
    assert_same(run(running, asked), want)
    assert_idle(running)
