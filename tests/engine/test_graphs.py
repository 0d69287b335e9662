"""Captured decode steps give the bits of eager ones, while they are captured and after: of every family, on a GPU.

Without one nothing can be captured. What a capture rests on is held on any machine: that the plans of decode steps are
made by device operations alone, from static buffers whose host integers are upper bounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.device_only_mha import on_buffers
from engine.watching import Watch, assert_idle, assert_same, assert_same_logits, engine, request, run
from tiny_checkpoints import prompts

from allotrope.architectures.registry import find_architecture, read_spec
from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout
from allotrope.attention.registry import FAMILIES
from allotrope.engine.engine import Engine
from allotrope.kernels.backend import choose, runs_anywhere
from allotrope.kernels.chip import CPU as CPU_CHIP
from allotrope.layers.parallel import Parallel
from allotrope.request import SamplingParams

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: nothing can be captured")

# Each family, and each way that layers of a model differ: windows, sinks, head sizes, shared indexers, strides.
NAMES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Qwen3NextForCausalLM",
    "KimiLinearForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "DeepseekV4ForCausalLM",
)
# One of each family whose decode steps no other test runs on static buffers.
FEW = ("Gemma4ForCausalLM", "DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV4ForCausalLM")
# Decode steps cross windows, what indexers pick, and blocks of 4 and of 128 tokens.
LENGTHS = (5, 30, 7, 126, 2, 9, 15, 70, 1)


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tiny config of an architecture, for random weights."""
    config = find_architecture({"architectures": [request.param]}, "").tiny()
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def tiny(model: Path, watch: Watch | None = None, **options: Any) -> Engine:
    return engine(model, watch, **{"load_format": "dummy", "max_model_len": 256, "page_size": 16, **options})


def test_every_family_is_captured() -> None:
    """A family without a model in the list would be captured by no test."""
    found = set()
    for name in NAMES:
        _, spec = read_spec(find_architecture({"architectures": [name]}, "").tiny(), name)
        found |= {layer.mixer.attention(Parallel(), torch.float32, torch.float32).family for layer in spec.layers}
    assert found == set(FAMILIES)


@needs_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_the_bits_of_eager_steps(model: Path, dtype: str) -> None:
    """Captured one by one between the steps: some steps run eagerly, the rest as graphs, and none can be told."""
    asked = [request(f"r{i}", ids) for i, ids in enumerate(prompts(LENGTHS))]
    options = {"device": "cuda", "dtype": dtype, "max_num_seqs": 7, "max_num_batched_tokens": 128}
    graphs, eager = Watch(), Watch()
    captured = tiny(model, graphs, **options)
    plain = tiny(model, eager, cuda_graphs=False, **options)
    want = run(plain, asked)
    assert_same(run(captured, asked), want)
    assert captured.graph_replays and not plain.graph_replays
    assert_same_logits(graphs, eager)
    assert_idle(captured)
    # Again with every size captured, and none left out.
    captured.capture_all()
    runner = captured._executor.worker.model_runner  # type: ignore[attr-defined]
    every = (runner.graphs, runner.prefill_graphs)
    assert all(made.captured == made.sizes for made in every)
    eager_steps = [made.eager for made in every]
    again = [request(f"again {i}", ids) for i, ids in enumerate(prompts(LENGTHS))]
    assert_same(run(captured, again), {f"again {name[1:]}": tokens for name, tokens in want.items()})
    assert [made.eager for made in every] == eager_steps and runner.prefill_graphs.replays


def decodes_by_kernels(spec: Any) -> AttentionBackend:
    """The family's kernels for steps of one token a request, its backend of this machine for prompts."""
    plain, kernels = choose_any(spec), next(one for one in FAMILIES[spec.family].backends if one.in_graphs)

    def plan(spec: Any, batch: BatchLayout, index: Any) -> tuple[AttentionBackend, Any]:
        backend = kernels if batch.num_decodes == batch.num_requests else plain
        return backend, backend.plan(spec, batch, index)

    def run(spec: Any, plan: tuple[AttentionBackend, Any], *args: Any, **named: Any) -> Any:
        backend, made = plan
        return backend.run(spec, made, *args, **named)

    return AttentionBackend("kernels for decodes", runs_anywhere, run, plan=plan, in_graphs=True)


def choose_any(spec: Any) -> AttentionBackend:
    return choose(FAMILIES[spec.family], spec, CPU_CHIP).backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are not interpreted")
@pytest.mark.parametrize("model", FEW, indirect=True)
def test_decode_steps_on_static_buffers_give_the_logits_of_exact_ones(model: Path) -> None:
    """The kernels' own plans, in Triton's interpreter, against the CPU's backends with exact lengths."""
    pytest.importorskip("triton", reason="triton is not installed")
    torch.set_num_threads(1)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    asked = [request(f"r{i}", ids, params) for i, ids in enumerate(prompts((30, 126, 1)))]
    options = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 160, "max_model_len": 136}
    want, got = Watch(), Watch()
    tokens = run(tiny(model, want, **options), asked)
    running = tiny(model, got, **options)
    model_runner = on_buffers(running, 4, decodes_by_kernels, prefill_tokens=160)
    assert_same(run(running, asked), tokens)
    assert model_runner.graphs is not None and model_runner.graphs.eager == 3
    assert model_runner.prefill_graphs is not None and model_runner.prefill_graphs.eager == 2
    assert_same_logits(got, want, atol=5e-4)
    assert_idle(running)


@needs_a_gpu
def test_async_scheduling_on_a_gpu_gives_the_same(model: Path) -> None:
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
    options = {"device": "cuda", "max_num_seqs": 5, "max_num_batched_tokens": 48}
    want = run(tiny(model, async_scheduling="off", **options), asked)
    running = tiny(model, async_scheduling="on", **options)
    assert_same(run(running, asked), want)
    assert_idle(running)
