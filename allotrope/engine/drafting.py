"""Speculative decoding: the drafts of each sequence for the next step.

Owns who proposes them and how many. Must not know how a step verifies them.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from allotrope.engine.drafts.acceptance import AcceptanceStats, SyntheticAcceptance
from allotrope.engine.drafts.lookup import make_lookup_drafter
from allotrope.engine.drafts.policy import DraftPolicy, StepTimes, shared_out
from allotrope.engine.executor import Executor
from allotrope.engine.graphs import decode_sizes, padded_size
from allotrope.engine.in_flight import HostCopy
from allotrope.engine.inputs import DraftChain, StepRow
from allotrope.engine.sequence import PLACEHOLDER, Sequence
from allotrope.speculative_config import SpeculativeConfig

# Passes that the time of one is averaged over.
_KEPT_PASSES = 16


@dataclass(frozen=True)
class Drafted:
    """A sequence with a new token. `row`: of the step, that of its last stored token. `lookahead`: tokens behind the
    sampled one that have pages."""

    seq: Sequence
    row: int
    lookahead: int


class Drafting(ABC):
    """`by_model`: drafts come of a draft model. `stats`: what was accepted. `none_next`: no sequence gets drafts behind
    the next step, so that the draft model needs no output of its first pass.
    """

    by_model = False
    none_next = False

    def __init__(self, config: SpeculativeConfig, max_drafts: int, max_decodes: int, seed: int) -> None:
        """`max_drafts`: most of a sequence in a step. `max_decodes`: most rows of a decode step. `seed`: of forced
        acceptance."""
        self.max_drafts, self._max_decodes = max_drafts, max_decodes
        # Drafts that the next step has room for.
        self._room = 0
        self.stats = AcceptanceStats(max_drafts, time.monotonic())
        self._forced = SyntheticAcceptance.from_config(config, seed)
        sizes = decode_sizes(max_decodes)
        self._times = StepTimes(functools.partial(padded_size, sizes))
        self._policy = DraftPolicy(self.stats, self._times) if config.adaptive else None
        self._seen: set[Sequence] = set()

    def forced(self, seq: Sequence, num_drafts: int) -> int | None:
        """The drafts to accept whatever they are, for benchmarks; None: those that are right."""
        if self._forced is None or not num_drafts:
            return None
        return self._forced.accepted(seq, num_drafts)

    def record(self, seqs: Seq[Sequence], drafted: Seq[int], accepted: Seq[int]) -> None:
        """Count a step: the drafts of `seqs` that it verified, and how many of them were accepted."""
        self.stats.record(seqs, drafted, accepted)
        self.stats.check(time.monotonic())

    def record_time(self, rows: int, seconds: float) -> None:
        """A step took `seconds` from its launch until its tokens were read. `rows`: with one token each; 0: it had
        others."""
        if rows:
            self._times.record(rows, seconds)

    def propose(self, drafted: Seq[Drafted]) -> None:
        """Set the drafts of the sequences that have a new token and have not ended."""
        self._seen.update(one.seq for one in drafted)
        for seq in [seq for seq in self._seen if seq.done]:
            self._seen.remove(seq)
            self._end(seq)
        open_ones = []
        for one in drafted:
            one.seq.drafts = ()
            count = min(self.max_drafts, one.seq.max_output_len - one.seq.output_len - 1)
            if not one.seq.done and count > 0:
                open_ones.append((one, count))
        self._room = max(0, self._max_decodes - sum(not one.seq.done for one in drafted))
        self._propose(open_ones)

    def forget_times(self) -> None:
        """Steps run in another way from now on, such as by a graph that was just captured."""
        self._times.clear()

    def _chosen(self, wanted: Seq[tuple[Drafted, int]]) -> list[tuple[Drafted, int]]:
        """`wanted` with as many drafts as a step has room for and as are worth their time."""
        if not wanted:
            return []
        ones, limits = zip(*wanted, strict=True)
        if self._policy is None:
            return list(zip(ones, shared_out(limits, self._room), strict=True))
        keys = [one.seq for one in ones]
        return list(zip(ones, self._policy.choose(keys, limits, most_drafts=self._room), strict=True))

    def _end(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self.stats.end(seq)
        if self._forced is not None:
            self._forced.end(seq)
        if self._policy is not None:
            self._policy.end(seq)

    def tokens(self, indices: Seq[int]) -> tuple[int, ...]:
        """The drafts at `indices` of those that are placeholders; -1 where there is none. Waits for the device."""
        raise AssertionError("no draft is a placeholder")

    @abstractmethod
    def _propose(self, wanted: Seq[tuple[Drafted, int]]) -> None:
        """Set the drafts of sequences, for each up to a number of them."""


class LookupDrafting(Drafting):
    """Drafts that are looked up in former tokens."""

    def __init__(self, config: SpeculativeConfig, max_drafts: int, max_decodes: int, seed: int) -> None:
        super().__init__(config, max_drafts, max_decodes, seed)
        self._drafter = make_lookup_drafter(config)
        # Tokens that the drafter knows of each sequence.
        self._known: dict[Sequence, int] = {}

    def _propose(self, wanted: Seq[tuple[Drafted, int]]) -> None:
        found = []
        for one, count in wanted:
            seq = one.seq
            if seq not in self._known:
                self._drafter.start(seq, seq.request.prompt_ids)
                self._known[seq] = seq.prompt_len
            new_ids = seq.ids[self._known[seq] :]
            self._known[seq] = len(seq.ids)
            seq.drafts = self._drafter.propose(seq, new_ids, count)
            found.append((one, len(seq.drafts)))
        for one, count in self._chosen(found):
            one.seq.drafts = one.seq.drafts[:count]

    def _end(self, seq: Sequence) -> None:
        super()._end(seq)
        known = self._known.pop(seq, None)
        if known is not None:
            # Its last tokens too may be looked up by others.
            self._drafter.propose(seq, seq.ids[known:], 0)
            self._drafter.end(seq)


class ModelDrafting(Drafting):
    """Drafts of a draft model, whose first pass runs on the rows of the step itself."""

    by_model = True

    def __init__(
        self, executor: Executor, config: SpeculativeConfig, max_drafts: int, max_decodes: int, seed: int
    ) -> None:
        super().__init__(config, max_drafts, max_decodes, seed)
        self._executor = executor
        self._on_gpu = executor.load_plan.build.device.type == "cuda"
        # What the passes before this step drafted, for which sequences.
        self._tokens: HostCopy | None = None
        self._drafted_for: list[Sequence] = []
        # Drafts that were chosen behind a step whose first pass made no output: the next step has them.
        self._postponed: dict[Sequence, int] = {}
        # When the tokens of the step before were read, and the seconds of the passes since.
        self._read_at: float | None = None
        self._passes = 0
        self._pass_seconds = 0.0

    def forget_times(self) -> None:
        super().forget_times()
        self._read_at = None

    def tokens(self, indices: Seq[int]) -> tuple[int, ...]:
        assert self._tokens is not None
        numbers = self._tokens.numbers
        return tuple(numbers[i] for i in indices)

    def record_time(self, rows: int, seconds: float) -> None:
        now, before = time.perf_counter(), self._read_at
        self._read_at = now if rows else None
        if self._tokens is not None and self._passes:
            # On a GPU the passes run while the host plans the step.
            self._pass_seconds = self._tokens.seconds or self._pass_seconds
            own = self._pass_seconds / self._passes
            if self._policy is not None:
                former = self._policy.draft_seconds or own
                self._policy.draft_seconds = former + (own - former) / _KEPT_PASSES
        if before is not None:
            seconds = max(now - before - self._pass_seconds, seconds / 2)
        super().record_time(rows, seconds)

    def _propose(self, wanted: Seq[tuple[Drafted, int]]) -> None:
        for seq in self._drafted_for:
            seq.drafts = seq.draft_indices = ()
        counted = self._counts([(one, min(count, 1 + one.lookahead)) for one, count in wanted])
        self._drafted_for = [one.seq for one, _ in counted]
        self._tokens, self._passes, started = None, 0, time.perf_counter()
        if counted:
            since = _event() if self._on_gpu else None
            self._passes = max(count for _, count in counted)
            rows = tuple(_chain_row(one) for one, _ in counted)
            self._tokens = HostCopy(self._executor.draft(DraftChain(rows, self._passes)), since)
        for i, (one, count) in enumerate(counted):
            one.seq.drafts = (PLACEHOLDER,) * count
            one.seq.draft_indices = tuple(j * len(counted) + i for j in range(count))
        self._pass_seconds = time.perf_counter() - started

    def _counts(self, wanted: Seq[tuple[Drafted, int]]) -> list[tuple[Drafted, int]]:
        """Those of `wanted` that get drafts now, and how many. Says whether the next step will have any."""
        stored_only, postponed = self.none_next, self._postponed
        if postponed:
            limits = [min(count, postponed.get(one.seq, 0)) for one, count in wanted]
            counts = shared_out(limits, self._room) if limits else []
            chosen = [(one, count) for (one, _), count in zip(wanted, counts, strict=True)]
        else:
            chosen = self._chosen(wanted)
        chosen = [pair for pair in chosen if pair[1]]
        self._postponed = {one.seq: count for one, count in chosen} if stored_only else {}
        # Where a policy gives none, it gives none for many steps.
        self.none_next = bool(wanted) and not chosen and not postponed
        return [] if stored_only else chosen


def _event() -> torch.cuda.Event:
    """The device has come so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _chain_row(one: Drafted) -> StepRow:
    """The row of a sequence in a chain."""
    seq = one.seq
    # The sampled token and those behind it that have pages.
    return StepRow((one.row,), seq.computed - 1, seq.pages, seq.slots, 1, prev_sampled_index=one.lookahead)


def make_drafting(
    config: SpeculativeConfig | None, executor: Executor, max_drafts: int, max_decodes: int, seed: int
) -> Drafting | None:
    """Who drafts under the options; None without speculative decoding. `max_decodes`: most rows of a decode step."""
    if config is None:
        return None
    if config.drafts_from_text:
        return LookupDrafting(config, max_drafts, max_decodes, seed)
    return ModelDrafting(executor, config, max_drafts, max_decodes, seed)
