"""Drafts get what is left: they preempt nobody, hold up nobody, and stay in the limits of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.speculating import RATES, directory, drafts, models, speculating
from engine.watching import GREEDY, assert_idle, assert_same, engine, request, run
from tiny_checkpoints import prompts

from allotrope.engine.engine import Engine
from allotrope.engine.inputs import StepPlan

PAGED = "Glm4MoeForCausalLM"
HEAD = next(name for name in models() if drafts(name, "mtp"))
LONG = replace(GREEDY, max_tokens=24)


def page_bytes(model: object, **options: Any) -> int:
    """Bytes of a page of every group together."""
    running = engine(model, load_format="dummy", **options)
    return sum(group.bytes // group.pages for group in running.memory.groups)


def plans_of(running: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that the engine runs from now on."""
    plans: list[StepPlan] = []
    inner = running._executor.run

    def noted(plan: StepPlan, prev_sampled: torch.Tensor | None = None) -> torch.Tensor:
        plans.append(plan)
        return inner(plan, prev_sampled)

    monkeypatch.setattr(running._executor, "run", noted)
    return plans


@pytest.mark.parametrize("kind", ["none", "mtp-none"])
@pytest.mark.parametrize("pages", [8, 12, 15, 20])
def test_drafts_preempt_nobody(kind: str, pages: int) -> None:
    """With wrong drafts steps are those of plain decoding, and so are preemptions: pages for drafts are given back
    where others need them."""
    torch.set_num_threads(1)
    model = directory(PAGED if kind == "none" else HEAD)
    asked = [request(f"r{i}", ids, LONG) for i, ids in enumerate(prompts((4, 6, 8, 5)))]
    counts = []
    for kinds in (None, kind):
        options: dict[str, Any] = {"page_size": 4, "max_model_len": 32, "enable_prefix_caching": False}
        if kinds is None:
            options["kv_cache_memory_bytes"] = page_bytes(model, **options) * (pages + 1)
            running = engine(model, load_format="dummy", **options)
            want = run(running, asked)
        else:
            speculation = (
                {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 7}'} if "-" in kind else {}
            )
            options["kv_cache_memory_bytes"] = page_bytes(model, **options, **speculation) * (pages + 1)
            running = speculating(model, kind, 7, want, **options)
            assert_same(run(running, asked), want)
        stats = running.stats()
        assert stats.pages_total == {"paged": pages}
        counts.append(stats.preemptions)
        assert_idle(running)
    assert counts[0] == counts[1]
    assert counts[0] or pages == 20


@pytest.mark.parametrize("rate", RATES)
def test_no_decoding_sequence_waits_because_of_drafts(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets a token at every step, beside long prompts, whatever its neighbours draft; and no limit is passed."""
    model = directory(PAGED)
    asked = [request(f"r{i}", ids, LONG) for i, ids in enumerate(prompts((3, 5, 2, 4)))]
    long = request("long", prompts((120,))[0], replace(GREEDY, max_tokens=4))
    options = {"max_num_batched_tokens": 16, "max_num_seqs": 5, "max_model_len": 160}
    want = run(engine(model, load_format="dummy", **options), [*asked, long])
    running = speculating(model, rate, 7, want, **options)
    plans = plans_of(running, monkeypatch)
    for one in asked:
        running.add(one)
    while any(not seqs[0].output_len for seqs in running._requests.open.values()):
        running.step()
    running.add(long)
    steps_of_long = []
    while running.has_work():
        decoding = {name for name in running.requests if name != "long"}
        told = {one.request_id for one in running.step()}
        assert decoding <= told
        steps_of_long += [sum(len(row.ids) for row in plans[-1].rows if row.num_logits == 0)]
    assert any(row.draft for plan in plans for row in plan.rows)
    assert max(sum(len(row.ids) for row in plan.rows) for plan in plans) <= 16
    most = running._executor.load_plan.max_decodes
    assert max(sum(len(row.ids) == 1 for row in plan.rows) for plan in plans) <= most
    # The prompt goes on beside drafts.
    assert steps_of_long[0] > 0
    assert_idle(running)


def test_drafts_stop_at_the_longest_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft stands where its token could not be told."""
    model = directory(PAGED)
    asked = [request(f"r{i}", ids, replace(GREEDY, max_tokens=i + 1)) for i, ids in enumerate(prompts((5,) * 9))]
    endless = [replace(one, params=replace(GREEDY, max_tokens=None)) for one in asked]
    expected = run(engine(model, load_format="dummy", max_model_len=14), endless)
    running = speculating(model, "all", 7, expected, max_model_len=14)
    plans = plans_of(running, monkeypatch)
    tokens = run(running, asked)
    assert tokens == {f"r{i}": expected[f"r{i}"][: i + 1] for i in range(9)}
    assert max(row.context + len(row.ids) for plan in plans for row in plan.rows) <= 14
    # One draft fewer than tokens that are left, for one more is sampled behind them.
    assert sum(row.draft > 0 for plan in plans for row in plan.rows) == sum(max(0, i - 1) for i in range(9))
    assert_idle(running)
