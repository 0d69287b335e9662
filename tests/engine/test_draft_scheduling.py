"""Drafts get what is left: they preempt nobody, hold up nobody, and stay in the limits of a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.speculating import RATES, directory, drafts, models, speculating
from engine.static_reference import static_steps
from engine.watching import GREEDY, assert_idle, assert_same, engine, request, run
from tiny_checkpoints import prompts

from allotrope.engine import drafting, in_flight
from allotrope.engine.drafting import ModelDrafting
from allotrope.engine.engine import Engine
from allotrope.engine.in_flight import InFlightStep
from allotrope.engine.inputs import StepPlan
from allotrope.ops.draft_rows import ChainRows
from allotrope.speculative_config import SpeculativeConfig

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


def test_drafts_do_not_wait_for_the_host_while_a_request_waits_for_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched before tokens are read, and the request begins once another has ended."""
    torch.set_num_threads(1)
    model = directory(HEAD)
    speculation = {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}'}
    options: dict[str, Any] = {"page_size": 4, "max_model_len": 96, "enable_prefix_caching": False}
    asked = [request(f"r{i}", ids, replace(GREEDY, max_tokens=48)) for i, ids in enumerate(prompts((8, 8, 88)))]
    asked[2] = replace(asked[2], params=replace(GREEDY, max_tokens=4))
    want = run(engine(model, load_format="dummy", **options), asked)
    options["kv_cache_memory_bytes"] = page_bytes(model, **options, **speculation) * 30
    running = speculating(model, "mtp", 2, want, async_scheduling="on", **options)
    static_steps(running)
    reads: list[bool] = []
    inner = running._loop._must_read

    def noted(before: InFlightStep) -> bool:
        reads.append(inner(before))
        return reads[-1]

    monkeypatch.setattr(running._loop, "_must_read", noted)
    for one in asked[:2]:
        running.add(one)
    found: dict[str, list[int]] = {one.request_id: [] for one in asked}
    waited, launched = 0, 0
    running.step()
    running.add(asked[2])
    while running.has_work():
        count, waiting = len(reads), running.stats().waiting
        for output in running.step():
            found[output.request_id] += output.token_ids
        if waiting and len(reads) > count:
            waited, launched = waited + reads[-1], launched + (not reads[-1])
    assert_same(found, want)
    # Of its steps without pages, those are read in which it looks for some.
    assert launched > 20 and waited <= launched // 8
    assert_idle(running)
    running.close()


def test_padding_rows_of_draft_passes_behind_prompts_read_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a former step had a sequence in their place."""
    torch.set_num_threads(1)
    running = speculating(directory(HEAD), "mtp", 3, {}, async_scheduling="on")
    static_steps(running)
    passes: Any = running._executor.worker.model_runner.drafts.passes  # type: ignore[attr-defined]
    inner = passes.advance_chain
    lens: list[int] = []

    def noted(positions: torch.Tensor, seq_lens: torch.Tensor, *args: Any) -> ChainRows:
        moved: ChainRows = inner(positions, seq_lens, *args)
        lens.extend(moved.seq_lens[seq_lens == 0].tolist())
        return moved

    monkeypatch.setattr(passes, "advance_chain", noted)
    for count in (6, 5):
        run(running, [request(f"r{count}-{i}", [3 + i] * 20, replace(LONG, max_tokens=6)) for i in range(count)])
    assert lens and not any(lens)
    running.close()


def test_times_of_steps_on_a_cpu_lack_the_passes_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes behind a step run before its tokens are read, however many ran behind the step before."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: 0.0, perf_counter=lambda: clock.now)
    for module in (drafting, in_flight):
        monkeypatch.setattr(module, "time", clock)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=3, adaptive=False)
    model = ModelDrafting(config, 3, 8, 0, lookahead=2, on_gpu=False)
    found: list[tuple[int, float]] = []
    monkeypatch.setattr(model._times, "record", lambda rows, seconds: found.append((rows, seconds)))
    seq: Any = SimpleNamespace(drafts=(), draft_indices=())
    for drafts_of_step in (0, 3, 1):
        verified = model.tokens
        clock.now += 10.0
        model.choose([(seq, drafts_of_step)])
        model.start_passes()
        clock.now += 1.0 + drafts_of_step
        model.place(torch.zeros(1 + drafts_of_step, dtype=torch.int64))
        model.record_step(1 + drafts_of_step, verified)
    assert found == [(4, 10.0), (2, 10.0)]


def test_a_step_that_nobody_waited_for_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    running = speculating(directory(HEAD), "mtp", 3, {}, async_scheduling="on")
    static_steps(running)
    rows: list[int] = []
    monkeypatch.setattr(running._drafting, "record_step", lambda count, tokens: rows.append(count))
    running.add(request("r", prompts((5,))[0], LONG))
    for _ in range(5):
        running.step()
    assert rows[-1] > 0
    running.abort(["r"])
    assert not running.has_work()
    rows.clear()
    running.add(request("s", prompts((5,))[0], LONG))
    running.step()
    assert rows == [0]
    running.close()
