"""Counts of accepted drafts, the warning of useless ones, forced acceptance, and how many drafts a step gets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from allotrope.engine.drafts.acceptance import AcceptanceStats, SyntheticAcceptance, rates_of_length
from allotrope.engine.drafts.policy import RETRY_STEPS, DraftPolicy
from allotrope.engine.drafts.step_times import PassTimes, StepTimes
from allotrope.engine.report import SpeculationStats
from allotrope.speculative_config import SpeculativeConfig


def test_counts() -> None:
    stats = AcceptanceStats(3)
    assert stats.rate("a") is None
    stats.record(["a", "b", "c"], [3, 2, 0], [1, 2, 0])
    stats.record(["a"], [3], [3])
    assert stats.summary() == SpeculationStats(
        drafts=3, draft_tokens=8, accepted_tokens=6, accepted_per_position=(3, 2, 1), reached_per_position=(3, 3, 1)
    )
    stats.end("a")
    stats.end("never")
    assert stats.rate("a") is None
    assert stats.summary().drafts == 3


def test_rates_of_a_sequence_decay() -> None:
    stats = AcceptanceStats(2)
    for _ in range(50):
        stats.record(["good", "bad"], [2, 2], [2, 0])
    assert stats.rate("good") == 1.0
    assert stats.rate("bad") == 0.0
    for _ in range(30):
        stats.record(["good"], [2], [0])
    rate = stats.rate("good")
    assert rate is not None and rate < 0.1


def test_expected_acceptance_is_the_product_over_positions() -> None:
    stats = AcceptanceStats(3)
    # Draft 0 is always accepted, draft 1 in half of the steps, draft 2 never.
    for step in range(400):
        stats.record(["a"], [3], [1 + step % 2])
    first, second, third = stats.expected(["a"])[0]
    assert first > 0.99
    assert second == pytest.approx(0.5, abs=0.07)
    assert third < 0.02
    # A new sequence begins with the rates of all.
    assert stats.expected(["new"])[0] == pytest.approx([first, second, third], abs=0.1)
    # What lies behind a refused draft says nothing: position 2 keeps its rate, but for what time makes of it.
    before = stats.expected(["a"])[0, 2] / stats.expected(["a"])[0, 1]
    for _ in range(20):
        stats.record(["a"], [3], [0])
    after = stats.expected(["a"])[0, 2] / stats.expected(["a"])[0, 1]
    assert after == pytest.approx(before, abs=0.05)


def test_rows_of_ended_sequences_are_used_again() -> None:
    stats = AcceptanceStats(2)
    for i in range(500):
        stats.record([i, "all"], [2, 2], [2, 2])
        if i % 10:
            stats.end(i)
    assert len(stats._trials) <= 128
    stats.record(["late"], [2], [0])
    assert stats.rate("late") == 0.0 and stats.rate("all") == 1.0 and stats.rate(490) == 1.0


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    caplog.set_level(logging.WARNING, "allotrope.engine")
    # The package's loggers may be cut off from the root one.
    logger = logging.getLogger("allotrope.engine")
    logger.addHandler(caplog.handler)
    yield lambda: sum("drafted tokens were accepted" in record.message for record in set(caplog.records))
    logger.removeHandler(caplog.handler)


def test_useless_drafts_are_warned_of_once_in_ten_minutes(warnings: Callable[[], int]) -> None:
    stats = AcceptanceStats(3)
    counts = []
    for second in range(1500):
        stats.record(["a"] * 10, [3] * 10, [0] * 10)
        stats.check(float(second))
        counts.append(warnings())
    assert counts[59] == 0 and counts[60] == 1
    assert counts[650] == 1 and counts[665] == 2 and counts[-1] == 3


def test_good_or_few_drafts_are_not_warned_of(warnings: Callable[[], int]) -> None:
    good, few = AcceptanceStats(3), AcceptanceStats(3)
    for second in range(600):
        good.record(["a"] * 10, [3] * 10, [1] * 10)
        good.check(float(second))
        if second % 10 == 0:
            few.record(["a"], [3], [0])
        few.check(float(second))
    assert warnings() == 0


@pytest.mark.parametrize(
    ("length", "drafts", "rates"),
    [
        (2.6, 3, (1.0, 0.6, 0.0)),
        (1.0, 3, (0.0, 0.0, 0.0)),
        (4.0, 3, (1.0, 1.0, 1.0)),
        (3.5, 4, (1.0, 1.0, 0.5, 0.0)),
    ],
)
def test_rates_of_a_length(length: float, drafts: int, rates: tuple[float, ...]) -> None:
    assert rates_of_length(length, drafts) == pytest.approx(rates)


@pytest.mark.parametrize("length", [1.0, 1.37, 2.0, 3.39, 4.0])
def test_forced_acceptance_has_its_mean_and_least_variance(length: float) -> None:
    config = SpeculativeConfig.parse(
        {"method": "mtp", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",
         "synthetic_acceptance_length": length}
    )  # fmt: skip
    forced, again = SyntheticAcceptance.from_config(config, seed=7), SyntheticAcceptance.from_config(config, seed=7)
    assert forced is not None and again is not None
    for key in ("a", "b"):
        counts = [forced.accepted(key, 3) for _ in range(10000)]
        assert sum(counts) / len(counts) == pytest.approx(length - 1, abs=1e-3)
        assert set(counts) <= {int(length - 1), int(length - 1) + 1}
        assert counts == [again.accepted(key, 3) for _ in range(10000)]
    assert SyntheticAcceptance.from_config(SpeculativeConfig.parse({"method": "suffix"})) is None


def test_forced_acceptance_by_position() -> None:
    forced = SyntheticAcceptance([0.9, 0.5, 0.2], seed=1)
    counts = [forced.accepted("a", 3) for _ in range(20000)]
    for position, rate in enumerate((0.9, 0.5, 0.2)):
        assert sum(count > position for count in counts) / len(counts) == pytest.approx(rate, abs=1e-3)
    assert max(forced.accepted("a", 1) for _ in range(100)) == 1
    assert forced.accepted("a", 0) == 0
    # Sequences do not step alike.
    assert [forced.accepted("b", 3) for _ in range(30)] != [forced.accepted("c", 3) for _ in range(30)]


def measured(cost: Callable[[int], float], rows: range = range(1, 400)) -> StepTimes:
    times = StepTimes()
    for count in rows:
        for _ in range(4):
            times.record(count, cost(count))
    return times


def measured_passes(seconds: float, rows: range = range(1, 400)) -> PassTimes:
    """Each pass takes `seconds`, and storing none."""
    passes = PassTimes()
    for number in range(5):
        for count in rows:
            for _ in range(4):
                passes.record(number, count, seconds * number)
    return passes


def after_steps(accepted: dict[str, int], k: int = 4) -> AcceptanceStats:
    stats = AcceptanceStats(k)
    for _ in range(60):
        stats.record(list(accepted), [k] * len(accepted), list(accepted.values()))
    return stats


def memory_bound(rows: int) -> float:
    return 5e-3 + 1e-5 * rows


def compute_bound(rows: int) -> float:
    return 1e-3 * rows


def test_cheap_rows_and_good_drafts_get_all() -> None:
    stats = after_steps({"a": 4, "b": 4})
    policy = DraftPolicy(stats, measured(memory_bound), measured_passes(1e-4))
    assert policy.choose(["a", "b"]) == [4, 4]
    assert policy.choose(["a", "b"], limits=[1, 9]) == [1, 4]
    assert policy.choose(["a", "b"], limits=[-1, 2], other_rows=3) == [0, 2]
    assert policy.choose([]) == []


def test_compute_bound_rows_get_none() -> None:
    stats = after_steps({"a": 3, "b": 3})
    assert DraftPolicy(stats, measured(compute_bound)).choose(["a", "b"]) == [0, 0]


def test_each_sequence_gets_what_its_text_is_worth() -> None:
    stats = after_steps({"good": 4, "half": 1, "bad": 0})
    policy = DraftPolicy(stats, measured(lambda rows: 5e-3 + 1e-3 * rows))
    assert policy.choose(["good", "half", "bad"]) == [4, 1, 0]


def test_costly_draft_passes_shorten_drafts() -> None:
    stats = AcceptanceStats(4)
    for step in range(400):
        stats.record(["a"], [4], [(0, 1, 2, 4)[step % 4]])
    times = measured(memory_bound)
    lengths = [
        DraftPolicy(stats, times, measured_passes(seconds)).choose(["a"])[0] for seconds in (0.0, 1e-3, 3e-3, 1e-1)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4 and lengths[-1] == 0


def test_a_padded_step_is_filled() -> None:
    """Rows that run anyway cost nothing: 5 rows run as 8."""
    times = StepTimes(lambda rows: 1 << (rows - 1).bit_length())
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(4):
            times.record(rows, 1e-3 * rows)
    stats = after_steps({str(i): 4 for i in range(5)})
    chosen = DraftPolicy(stats, times).choose([str(i) for i in range(5)])
    assert sum(chosen) == 3


def test_unknown_times_are_measured_with_drafts_and_without() -> None:
    stats, times = after_steps({"a": 0}), StepTimes()
    policy = DraftPolicy(stats, times)
    chosen = []
    for _ in range(12):
        drafts = policy.choose(["a"])[0]
        chosen.append(drafts)
        times.record(1 + drafts, compute_bound(1 + drafts))
    assert chosen == [4] * 4 + [0] * 8


def test_few_requests_get_drafts_after_many(k: int = 3) -> None:
    """A pass behind a step of many rows takes longer than one behind few: what it took says nothing of these."""
    stats, times, passes = AcceptanceStats(k), StepTimes(), PassTimes()
    policy = DraftPolicy(stats, times, passes)

    def serve(count: int, steps: int) -> list[int]:
        keys, found, drafts = [f"{count}-{i}" for i in range(count)], [], [0] * count
        for _ in range(steps):
            rows = count + sum(drafts)
            stats.record(keys, drafts, drafts)
            times.record(rows, 1e-3 + 1e-4 * rows)
            drafts = policy.choose(keys)
            passes.record(max(drafts), rows, 1e-5 + max(drafts) * 2e-4 * rows)
            found.append(sum(drafts))
        for key in keys:
            stats.end(key)
            policy.end(key)
        return found

    # Alone, a request gains from its drafts.
    assert serve(1, 40)[-20:] == [k] * 20
    # Of 64 requests, passes take longer than the tokens that they save.
    assert sum(serve(64, 60)[-20:]) <= 20
    # Neither the one nor the other decides for the next request alone.
    assert serve(1, 40)[-20:] == [k] * 20


@pytest.mark.parametrize("busy", [range(40), range(10, 20), range(300, 400)])
def test_what_was_measured_on_a_busy_host_is_measured_again(busy: range, k: int = 3) -> None:
    """The first draft is right in 4 of 5 steps, and no other. For some steps all take the host as long as 4 rows with
    their passes take the device: then the drafts that are best are not those that seemed to be."""
    step_of, passes_of = {1: 1.45, 2: 1.75, 3: 2.3, 4: 2.6}, [0.1, 0.4, 0.8, 1.2]
    stats, times, passes = AcceptanceStats(k), StepTimes(), PassTimes()
    policy, chosen, drafts = DraftPolicy(stats, times, passes), [], 0
    for step in range(1000):
        stats.record(["a"], [drafts], [min(drafts, 1) if step % 5 else 0])
        (ahead,) = policy.choose(["a"])
        times.record(1 + drafts, max(step_of[1 + drafts], 3.8 - passes_of[ahead] if step in busy else 0.0))
        passes.record(ahead, 1 + drafts, passes_of[ahead])
        drafts = ahead
        chosen.append(drafts)
    after = chosen[busy.stop + 200 :]
    assert after.count(1) >= 0.95 * len(after)


def test_passes_of_other_numbers_take_their_share() -> None:
    passes = PassTimes()
    for _ in range(4):
        passes.record(0, 5, 1e-4)
        passes.record(3, 8, 7e-4)
    assert passes.cost(np.array([0, 1, 2, 3]), 5).tolist() == pytest.approx([1e-4, 3e-4, 5e-4, 7e-4])
    assert passes.knows(3, 8) and not passes.knows(3, 4) and not passes.knows(2, 8)
    # Measured behind so many rows, one pass has a time of its own.
    for _ in range(4):
        passes.record(1, 6, 6e-4)
    assert passes.cost(np.array([0, 1, 2, 3]), 5).tolist() == pytest.approx([1e-4, 6e-4, 5e-4, 7e-4])
    passes.clear()
    assert passes.cost(np.array([0, 3]), 5).tolist() == [0.0, 0.0]


def test_few_steps_make_all_numbers_of_rows_known() -> None:
    """Steps that are not padded have any number of rows."""
    times = StepTimes()
    for rows in range(100, 200):
        times.record(rows, 1e-3 + 1e-5 * rows)
    assert all(times.knows(rows) for rows in range(105, 193))
    assert times.cost(150, 1)[0] == pytest.approx(2.5e-3, rel=0.1)
    assert times.cost(400, 1)[0] == pytest.approx(2 * times.cost(200, 1)[0], rel=0.1)


def test_times_are_medians_that_forget() -> None:
    times = StepTimes()
    for seconds in (9.0, 1.0, 1.0, 1.0, 1.0):
        times.record(8, seconds)
    assert times.cost(8, 1)[0] == 1.0
    for _ in range(40):
        times.record(8, 2.0)
    assert times.cost(8, 1)[0] == 2.0
    assert times.knows(8) and not times.knows(9)
    for _ in range(9000):
        times.record(16, 3.0)
    assert not times.knows(8) and times.knows(16)


def test_a_sequence_without_drafts_is_retried_and_recovers() -> None:
    stats = after_steps({"good": 4, "bad": 0})
    policy = DraftPolicy(stats, measured(lambda rows: 5e-3 + 1e-3 * rows))
    tries, fewer = [], 0
    for step in range(12 * RETRY_STEPS):
        good, bad = policy.choose(["good", "bad"])
        fewer += good < 4
        assert good >= 3
        stats.record(["good", "bad"], [good, bad], [good, bad if step > 3 * RETRY_STEPS else 0])
        tries.append(bad)
    early = [step for step, drafts in enumerate(tries[: 3 * RETRY_STEPS]) if drafts]
    assert len(early) == 1 and tries[early[0]] == 1, early
    assert fewer == 4
    assert tries[-50:] == [4] * 50


def test_sequences_are_retried_a_few_at_a_time() -> None:
    keys = [str(i) for i in range(32)]
    stats = after_steps(dict.fromkeys(keys, 0))
    policy = DraftPolicy(stats, measured(compute_bound))
    drafting = []
    for _ in range(2 * RETRY_STEPS):
        chosen = policy.choose(keys)
        stats.record(keys, chosen, [0] * 32)
        drafting.append(sum(chosen))
    assert max(drafting) == 8 and sum(drafting) >= 32
    # Each in vain waits longer.
    for _ in range(30 * RETRY_STEPS):
        chosen = policy.choose(keys)
        stats.record(keys, chosen, [0] * 32)
        drafting.append(sum(chosen))
    assert sum(drafting[-16 * RETRY_STEPS :]) <= 2 * 32


@pytest.mark.parametrize("tokens", [60, 10**9], ids=["short requests", "one long request"])
def test_longer_drafts_are_tried_again(tokens: int) -> None:
    """Where only the first draft was ever right, others are hardly made, and yet it is seen when they become right. A
    few steps measure the time of one more or one fewer."""
    stats = AcceptanceStats(3)
    policy = DraftPolicy(stats, measured(lambda rows: 5e-3 + 1e-3 * rows), measured_passes(5e-4))
    lengths = []
    for step in range(4000):
        key = step // tokens
        (drafts,) = policy.choose([key])
        stats.record([key], [drafts], [drafts if step >= 3000 else min(drafts, 1)])
        lengths.append(drafts)
    useless = sum(drafts > 1 for drafts in lengths[:3000])
    assert 0 < useless <= 60 and lengths.count(0) <= 4
    assert lengths[-400:].count(3) >= 398


def test_choosing_is_cheap() -> None:
    keys = list(range(64))
    stats = AcceptanceStats(4)
    for _ in range(20):
        stats.record(keys, [4] * 64, [key % 5 for key in keys])
    policy = DraftPolicy(stats, measured(lambda rows: 5e-3 + 1e-4 * rows), measured_passes(1e-4))
    seconds = []
    for _ in range(50):
        begin = time.thread_time()
        policy.choose(keys)
        seconds.append(time.thread_time() - begin)
    # Far above what it takes: only growth by orders is an error here.
    assert sorted(seconds)[25] < 2e-3
