"""A first pass of the draft model that stores alone leaves in the caches what a whole one does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.draft_steps import DraftSteps, _step
from device_under_test import DEVICE
from engine.speculating import LOADED, directory, speculating
from engine.static_reference import static_steps
from engine.watching import GREEDY, assert_idle, assert_same, engine, request, run
from tiny_checkpoints import prompts

from allotrope.architectures.registry import ARCHITECTURES, find_architecture
from allotrope.attention.check import cases
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, at_random
from allotrope.engine.engine import Engine
from allotrope.kernels.chip import CPU as CPU_CHIP

DRAFTING = [name for name in ARCHITECTURES if find_architecture({"architectures": [name]}, name).tiny_draft]
STORING = [(family.name, one.name) for family in FAMILIES.values() for one in family.backends if one.store is not None]


def stored(family: str, backend: str, case: str, *, alone: bool) -> list[torch.Tensor]:
    """The bytes of the caches of a case whose steps have run, or have been stored."""
    one = next(one for one in FAMILIES[family].backends if one.name == backend)
    known, device = cases(family)[case], DEVICE if backend == "triton" else "cpu"
    if backend == "triton":
        known = dataclasses.replace(known, lengths=(6, 2))
    if backend != "triton" and one.rejects(known.spec, CPU_CHIP):
        pytest.skip("the backend cannot run the case")

    def store(spec: Any, plan: Any, caches: Any, inputs: Any) -> torch.Tensor:
        assert one.store is not None
        one.store(spec, plan, caches, inputs)
        return torch.zeros(sum(known.lengths), 1)

    replay = Replay(known, dataclasses.replace(one, run=store) if alone else one, device)
    replay.play(at_random(known.lengths, 3))
    views = [view for fields in replay.pools.values() for view in fields.values()]
    return [view.contiguous().view(torch.uint8).cpu() for view in views]


def test_every_family_but_two_stores_alone() -> None:
    assert {family for family, _ in STORING} == set(FAMILIES) - {"gdn", "csa"}


@pytest.mark.parametrize(("family", "backend"), STORING)
def test_a_store_is_that_of_a_run(family: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    for case in list(cases(family))[: 1 if backend == "triton" else 3]:
        want, got = (stored(family, backend, case, alone=alone) for alone in (False, True))
        assert all(map(torch.equal, got, want)) and any((view != 0xFF).any() for view in want)


@pytest.mark.parametrize("name", DRAFTING)
def test_a_stored_pass_of_a_head_is_a_pass(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    made = find_architecture({"architectures": [name]}, name).tiny_draft
    assert made is not None
    (tmp_path / "config.json").write_text(json.dumps(made()))
    steps = DraftSteps(tmp_path, seed=1)
    ids = prompts((40,))[0]
    assert steps.draft.stores_alone == (name != "DeepseekV4ForCausalLM")
    caches = []
    for whole in (True, False):
        steps.clear()
        _, features = steps.target_pass(ids[:-1], 0)
        following = _step(ids[1:], 0, steps.draft.attention, steps._draft_caches)
        with torch.inference_mode():
            steps.draft(features, following) if whole else steps.draft.store(features, following)
        views = [view for layer in steps._draft_caches for fields in layer.values() for view in fields.values()]
        caches.append([view.contiguous().view(torch.uint8) for view in views])
    assert all(map(torch.equal, *caches)) and any(view.any() for view in caches[0])


def rarely(running: Engine) -> dict[str, int]:
    """Let the engine draft behind every fifth step alone. Returns counts of passes that are stored alone."""
    drafting: Any = running._loop._drafting
    model = running._executor.worker.draft_model  # type: ignore[attr-defined]
    chosen, store, counts = drafting._chosen, model.store, {"chosen": 0, "stored": 0}

    def choose(wanted: Any) -> list[int]:
        counts["chosen"] += 1
        found = chosen(wanted)
        return found if counts["chosen"] % 5 == 0 else [0] * len(found)

    def counted(hidden: torch.Tensor, step: Any) -> None:
        counts["stored"] += 1
        store(hidden, step)

    drafting._chosen, model.store = choose, counted
    return counts


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        ("Qwen3NextForCausalLM", "mtp", "eager"),
        ("Qwen3NextForCausalLM", "eagle3", "static"),
        ("DeepseekV32ForCausalLM", "mtp", "static"),
        ("DeepseekV4ForCausalLM", "mtp", "static"),
        ("DeepseekV3ForCausalLM", "mtp", "eager"),
    ],
)
def test_drafts_behind_stored_passes_are_those_behind_whole_ones(name: str, kind: str, mode: str) -> None:
    torch.set_num_threads(1)
    model = directory(name)
    params = dataclasses.replace(GREEDY, max_tokens=24)
    asked = [request(f"r{i}", ids, params) for i, ids in enumerate(prompts((3, 40, 12)))]
    options = {"max_num_batched_tokens": 16}
    want = run(engine(model, **LOADED, **options), asked)
    drafted = []
    for rare in (False, True):
        running = speculating(model, kind, 3, want, **options)
        counts = rarely(running) if rare else {}
        runner: Any = static_steps(running) if mode == "static" else None
        assert_same(run(running, asked), want)
        assert_idle(running)
        drafted.append(running.head.drafted)  # type: ignore[attr-defined]
        if rare:
            # V4's decode steps run whole passes.
            assert counts["stored"] >= (3 if name == "DeepseekV4ForCausalLM" else 8)
            stats = running.stats().speculation
            assert stats is not None and stats.drafts >= 3
        if runner is not None:
            stores = runner.drafts._static._store_graphs
            whole_passes = runner.drafts._static._first_graphs
            assert (stores is whole_passes) == (name == "DeepseekV4ForCausalLM")
            assert stores is whole_passes or (stores.eager > 3) == rare
        running.close()
    whole, rare_ones = drafted
    found = {key: drafts for key, drafts in rare_ones.items() if drafts}
    assert len(found) >= 3
    for key, drafts in found.items():
        shared = min(len(drafts), len(whole[key]))
        assert shared and whole[key][:shared] == drafts[:shared]
