"""Drafts of the checkpoint's own head, in every architecture that has one: the tokens are those without drafts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.static_reference import static_steps
from engine.watching import assert_idle, engine, request, run
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.request import SamplingParams

MODELS = Path(__file__).parents[2] / "train" / "models"
DRAFTING = [name for name in ARCHITECTURES if find_architecture({"architectures": [name]}, name).tiny_draft]
THREE = json.dumps({"method": "mtp", "num_speculative_tokens": 3, "adaptive": False})
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", DRAFTING)
def test_drafts_change_no_token(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    made = find_architecture({"architectures": [name]}, name).tiny_draft
    assert made is not None
    (tmp_path / "config.json").write_text(json.dumps(made()))
    options = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    asked = [request(f"r{i}", ids) for i, ids in enumerate(prompts((3, 17, 40, 1)))]
    asked += [request(f"s{i}", ids, SEEDED) for i, ids in enumerate(prompts((5, 30)))]
    want = run(engine(tmp_path, device="cpu", **options), asked)
    drafting = engine(tmp_path, device="cpu", speculative_config=THREE, **options)
    assert run(drafting, asked) == want
    assert_idle(drafting)


@pytest.mark.parametrize("on_static_buffers", [False, True])
def test_later_drafts_reuse_the_top_k_of_the_first(on_static_buffers: bool, tmp_path: Path) -> None:
    """GLM-5 with `index_share_for_mtp_iteration`, behind more tokens than its indexer selects."""
    torch.set_num_threads(1)
    name = "GlmMoeDsaForCausalLM"
    made = find_architecture({"architectures": [name]}, name).tiny_draft
    assert made is not None
    config = made()
    assert config["index_share_for_mtp_iteration"] and config["index_topk"] == 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "max_model_len": 128, "max_num_seqs": 4, "device": "cpu"}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    asked = [request(f"r{i}", ids, params) for i, ids in enumerate(prompts((60, 9, 45)))]
    want = run(engine(tmp_path, **options), asked)
    drafting = engine(tmp_path, speculative_config=THREE, async_scheduling="on", **options)
    if on_static_buffers:
        static_steps(drafting)
    mixer: Any = drafting._executor.worker.draft_model.layers[0].mixer  # type: ignore[attr-defined]
    inner, first, later = mixer.backend, [torch.empty(0)], []

    def watched(spec: Any, plan: Any, caches: Any, inputs: Any) -> Any:
        attended, indices = inner.run(spec, plan, caches, inputs)
        if inputs.index is not None:
            first[0] = indices.clone()
        else:
            later.append((inputs.topk_indices.clone(), first[0]))
        return attended, indices

    mixer.backend = dataclasses.replace(inner, run=watched)
    assert run(drafting, asked) == want
    # Two passes behind each first one with drafts; their rows are rows of it, none where there is padding.
    assert len(later) >= 10
    for indices, of_first in later:
        padded = torch.nn.functional.pad(of_first, (0, 32 - of_first.shape[1]), value=-1)
        known = {tuple(row) for row in padded.tolist()} | {(-1,) * 32}
        assert {tuple(row) for row in indices.tolist()} <= known
    assert any(bool((indices >= 32).any()) for indices, _ in later)
    assert_idle(drafting)
    drafting.close()


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
def test_trained_heads_are_accepted(name: str) -> None:
    torch.set_num_threads(1)
    text = list((MODELS / "held_out.txt").read_bytes()[:200])
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    options = {"device": "cpu", "max_model_len": 512, "max_num_seqs": 4}
    want = run(engine(MODELS / name, **options), [request("a", text, params)])
    drafting = engine(MODELS / name, speculative_config=THREE, **options)
    assert run(drafting, [request("a", text, params)]) == want
    counts = drafting.stats().speculation
    assert counts is not None
    # 24 of 30 first drafts are accepted, or 22 of 25; one of 320 tokens is right by chance.
    assert counts.accepted_per_position[0] > 0.6 * counts.drafts
