"""The head by which a draft model chooses is a copy in FP8: it decides no token, and takes half of the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.speculating import LOADED, directory, speculative_config
from engine.watching import GREEDY, assert_idle, engine, request, run
from tiny_checkpoints import prompts

from allotrope.config import EngineConfig
from allotrope.engine.load_plan import resolve_load_plan
from allotrope.engine.memory import weight_bytes_of
from allotrope.engine.planning.step_cost import ModelCost
from allotrope.kernels.chip import Chip
from allotrope.layers.embedding import Head
from allotrope.ops.matmul.fp8 import Fp8
from allotrope.ops.matmul.plain import PLAIN
from allotrope.ops.matmul.weight import Weight

MODELS = Path(__file__).parents[2] / "train" / "models"
HOPPER, AMPERE = Chip("nvidia", "sm_90", 132, 228 << 10), Chip("nvidia", "sm_80", 108, 164 << 10)


def option(model: Path, method: str, dtype: str) -> str:
    return json.dumps({**json.loads(speculative_config(model, method, 3)), "draft_head_dtype": dtype})


@pytest.mark.parametrize(
    ("name", "method", "ranks"),
    [
        ("Qwen3NextForCausalLM", "mtp", 1),
        ("DeepseekV4ForCausalLM", "mtp", 1),
        ("LlamaForCausalLM", "eagle3", 1),
        ("Gemma3ForCausalLM", "eagle3", 1),
        ("Glm4MoeForCausalLM", "mtp", 2),
    ],
)
def test_tokens_are_those_without_drafts(name: str, method: str, ranks: int) -> None:
    torch.set_num_threads(1)
    model = directory(name)
    asked = [request(f"r{i}", ids, GREEDY) for i, ids in enumerate(prompts((3, 17, 30)))]
    want = run(engine(model, **LOADED), asked)
    shared: dict[str, Any] = {"tensor_parallel_size": 2, "threads": 1} if ranks > 1 else {}
    drafting = engine(model, speculative_config=option(model, method, "fp8"), **LOADED, **shared)
    try:
        assert run(drafting, asked) == want
        assert_idle(drafting)
        worker = drafting._executor.worker  # type: ignore[attr-defined]
        head, target = worker.draft_model.head, worker.model.head
        assert isinstance(head, Head) and isinstance(head.weight, Weight) and head.weight.format == Fp8()
        assert target.weight.format is PLAIN
        if head.weight.shape == target.weight.shape:
            whole, copy = target.weight.dequantize(), head.weight.dequantize()
            # e4m3 has three bits behind the point.
            assert 0 < (copy - whole).abs().max() <= whole.abs().max() / 16 * 1.01
    finally:
        drafting.close()


def test_drafts_of_a_trained_head_are_accepted() -> None:
    torch.set_num_threads(1)
    text = list((MODELS / "held_out.txt").read_bytes()[:200])
    accepted = []
    for dtype in ("model", "fp8"):
        running = engine(
            MODELS / "qwen3_next",
            speculative_config=option(MODELS, "mtp", dtype),
            **{"device": "cpu", "max_model_len": 512, "max_num_seqs": 4},
        )
        run(running, [request("a", text, GREEDY)])
        counts = running.stats().speculation
        assert counts is not None
        accepted.append(counts.accepted_tokens)
        running.close()
    assert accepted[1] >= accepted[0] - 2 > 0


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_the_plan_counts_it(method: str) -> None:
    """A copy is counted beside the model's head; a head of its own is smaller."""
    model = directory("Qwen3NextForCausalLM")
    counted, read = [], []
    for dtype in ("model", "fp8"):
        config = EngineConfig(
            model=str(model), dtype="float32", speculative_config=option(model, method, dtype), **LOADED
        )
        load_plan = resolve_load_plan(config)
        draft: Any = load_plan.meta_draft()
        counted.append(weight_bytes_of(draft))
        read.append(ModelCost(load_plan).drafted(10, (1,))["draft"].bytes)
    spec = load_plan.spec if method == "mtp" else draft.spec.model
    rows, hidden = spec.vocab_size if method == "mtp" else draft.spec.draft_vocab_size, spec.hidden
    copy, plain = rows * (hidden + 4), rows * hidden * 4
    assert counted[1] - counted[0] == (copy if method == "mtp" else copy - plain)
    assert read[1] - read[0] == copy - plain


def test_auto_takes_what_the_chip_multiplies() -> None:
    model = directory("Qwen3NextForCausalLM")

    def chosen(dtype: str, chip: Chip | None, of_model: str = "bfloat16") -> object:
        config = EngineConfig(
            model=str(model), dtype=of_model, speculative_config=option(model, "mtp", dtype), **LOADED
        )
        load_plan = resolve_load_plan(config, chip=chip, available=None if chip is None else 64 << 30)
        assert load_plan.draft_build is not None and load_plan.build.draft_head is PLAIN
        return load_plan.draft_build.draft_head

    assert chosen("auto", HOPPER) == Fp8()
    assert chosen("auto", HOPPER, "float32") is PLAIN
    assert chosen("auto", None) is PLAIN
    assert chosen("model", HOPPER) is PLAIN
    assert chosen("fp8", None, "float32") == Fp8()
