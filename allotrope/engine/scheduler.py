"""The scheduler chooses the sequences of the next step, and the number of tokens of each.

Rules: a decoding sequence always gets its token; what is left of the token budget goes to prompts in order of arrival,
no single one taking more than half of it while others could run; a prompt starts once there are pages for all of it,
beside the prompts that run (`scheduler_reserve_full_isl`); if pages run out, the sequence that arrived last is
preempted: it gives its pages up and is computed again. Draft tokens get what is left of tokens and pages, and preempt
nobody. The plan depends on the requests and their order alone.
"""

from __future__ import annotations

import itertools
import operator
from collections import abc, deque
from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.sequence import Sequence

PROMPT_LOGPROBS_CHUNK = 256
"""Prompt tokens of a step whose log-probabilities are computed: the logits of each are as long as the vocabulary."""


class Row(NamedTuple):
    """`tokens` more tokens of a sequence, which end at length `end`, and the drafts behind them.

    `draft_indices`: as in `Sequence`. `lookahead`: tokens behind these that have pages, if all drafts that a step
    verifies count.
    """

    seq: Sequence
    tokens: int
    end: int
    drafts: tuple[int, ...] = ()
    draft_indices: tuple[int, ...] = ()
    lookahead: int = 0

    @property
    def samples(self) -> bool:
        """Whether all tokens of the sequence are computed by it, so that its next one is sampled."""
        return self.end == len(self.seq.ids)


# Steps after which a sequence that found no pages looks for them again, where none has ended: it walks over all that is
# cached of its prompt. Steps with drafts need not wait for the host while it is known that the next one has no prompt.
_ADMISSION_STEPS = 16


class Scheduler:
    """`max_sequences`, `max_tokens`: limits of one step. `max_decodes`: rows with one token, drafts among them.
    `lookahead`: tokens behind the sampled one that a draft model stores before the next step. `stages`: as many steps
    may be in flight, each with its part of the sequences. `reserve_full_isl`: whether a prompt starts once all of it
    has pages, or its first chunk.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_sequences: int,
        max_tokens: int,
        max_decodes: int = 0,
        lookahead: int = 0,
        stages: int = 1,
        reserve_full_isl: bool = True,
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self._reserve_full_isl = reserve_full_isl
        self.max_sequences, self.max_tokens, self._stages = max_sequences, max_tokens, stages
        self.max_decodes, self.lookahead = max(max_decodes, max_sequences), lookahead
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        # Sequences with pages for the drafts of the step before.
        self._looked_ahead: list[Sequence] = []
        self._in_flight: Container[Sequence] = ()
        # The sequence that found no pages, the step in which it looks for them again, and the pages that there were.
        self._without_pages: tuple[Sequence, int, tuple[int, ...]] | None = None
        self._step = 0

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(seq)

    def remove(self, seq: Sequence, *, evict: bool = False) -> None:
        """Take a sequence out, running or waiting. `evict`: no later request may reuse its pages."""
        seq.done = True
        if seq in self.running:
            self._stop(seq, evict=evict)
        else:
            self.waiting.remove(seq)

    def _stop(self, seq: Sequence, *, evict: bool = False) -> None:
        """Take a running sequence out. Its pages may be what a waiting one lacks."""
        self.running.remove(seq)
        self.kv_cache_manager.free(seq, evict=evict)
        self._without_pages = None

    @property
    def load(self) -> int:
        """Tokens that its sequences have, or have ahead in their prompts."""
        return sum(len(seq.ids) for seq in (*self.running, *self.waiting))

    @property
    def only_decodes(self) -> bool:
        """Whether no sequence with more than one token ahead can be a part of the next step."""
        full = len(self.running) >= self.max_sequences
        return all(seq.uncomputed <= 1 for seq in self.running) and (full or not self.waiting or self._lacks_pages)

    @property
    def _lacks_pages(self) -> bool:
        """Whether the first waiting sequence found no pages, and there is no reason yet to look for them again."""
        if self._without_pages is None or not self.waiting:
            return False
        seq, retried, available = self._without_pages
        if self.waiting[0] is not seq or self._step >= retried:
            return False
        # Pages of drafts come and go.
        drafts = self.max_decodes > self.max_sequences
        return drafts or all(map(operator.le, self._available, available))

    @property
    def _available(self) -> tuple[int, ...]:
        """Pages of each group that a sequence could get."""
        return tuple(pool.available for pool in self.kv_cache_manager.pools)

    def plan(self, in_flight: Container[Sequence] = ()) -> list[Row]:
        """The next step, sequences with a single token first; empty if nothing can run. `in_flight`: sequences of other
        steps, which keep all that they have."""
        self._in_flight = in_flight
        # Pages of drafts that were rejected are anyone's again, before somebody is preempted for want of them.
        looked_ahead, self._looked_ahead = self._looked_ahead, []
        for seq in looked_ahead:
            if seq in in_flight:
                self._looked_ahead.append(seq)
            else:
                self.kv_cache_manager.trim(seq)
        preemptions = self.preemptions
        running = [seq for seq in self.running if seq not in in_flight]
        has_prompt = [seq.uncomputed > 1 for seq in running]
        prompts = sum(has_prompt) + self._startable(2)
        share = self.max_tokens if prompts <= 1 else max(1, self.max_tokens // 2)
        rows: dict[Sequence, int] = {}
        drafts = min(sum(len(seq.drafts) for seq in running), (self.max_tokens - len(running)) // 2)
        logprobs_share = self._logprobs_share(running) if prompts else PROMPT_LOGPROBS_CHUNK
        budget = _Budget(self.max_tokens - drafts, PROMPT_LOGPROBS_CHUNK, logprobs_share)
        if any(has_prompt):
            # In order of arrival, but those with one token ahead: a long prompt never holds up a decoding sequence.
            running.sort(key=lambda seq: seq.uncomputed > 1)
        max_rows = self._max_rows
        for seq in running:
            tokens = budget.chunk(seq, share) if len(rows) < max_rows else 0
            if not tokens or seq.done or (self.preemptions > preemptions and seq not in self.running):
                continue
            budget.spend(seq, tokens)
            # A sequence that is preempted for it gives its tokens back.
            budget.tokens += tokens - self._make_room(seq, tokens, rows)
        if self.waiting and self.preemptions == preemptions and not self._lacks_pages:
            self._admit(rows, budget, share)
        self._step += 1
        planned = [Row(seq, tokens, seq.computed + tokens) for seq, tokens in rows.items()]
        if drafts or self.lookahead:
            planned = self._with_drafts(planned, budget.tokens + drafts)
        return sorted(planned, key=lambda row: row.tokens > 1)

    def _logprobs_share(self, running: abc.Sequence[Sequence]) -> int:
        """Prompt tokens with log-probabilities that a sequence may have in a step: half of them if others want some."""
        waiting = itertools.islice(self.waiting, self.max_sequences)
        wants = itertools.islice((seq for seq in itertools.chain(running, waiting) if seq.computes_prompt_logprobs), 2)
        return PROMPT_LOGPROBS_CHUNK if len(list(wants)) < 2 else PROMPT_LOGPROBS_CHUNK // 2

    def _startable(self, most: int) -> int:
        """Waiting sequences, up to `most`, that nothing is known to keep from the next step."""
        room = 0 if self._lacks_pages else self.max_sequences - len(self.running)
        unblocked = (seq for seq in self.waiting if not seq.blocked)
        return sum(1 for _ in itertools.islice(unblocked, max(0, min(room, most))))

    @property
    def _max_rows(self) -> int:
        """Most sequences of a step: its part of all that may run, where several steps are in flight."""
        return -(-min(self.max_sequences, len(self.running) + len(self.waiting)) // self._stages)

    def _with_drafts(self, rows: abc.Sequence[Row], tokens: int) -> list[Row]:
        """Add as many drafts as `tokens`, the rows of a step and the pages leave room for."""
        # So many rows are sampled at most, as memory was planned for.
        decodes = max(0, self.max_decodes - sum(row.tokens == 1 or row.samples for row in rows))
        found = []
        for row in rows:
            seq = row.seq
            if row.samples:
                left = seq.max_output_len - seq.output_len - seq.unread_drafts - 1
                count = max(0, min(len(seq.drafts), tokens, decodes, left))
                lookahead = max(0, min(self.lookahead, left - count))
                if not self.kv_cache_manager.reserve(seq, row.tokens + count + lookahead):
                    count = lookahead = 0
                elif count + lookahead:
                    self._looked_ahead.append(seq)
                tokens, decodes = tokens - count, decodes - count
                drafts, indices = tuple(seq.drafts[:count]), tuple(seq.draft_indices[:count])
                row = row._replace(drafts=drafts, draft_indices=indices, lookahead=lookahead)
            found.append(row)
        return found

    def _make_room(self, seq: Sequence, tokens: int, rows: dict[Sequence, int]) -> int:
        """Put `seq` into the step, preempting later arrivals until there are pages. Returns the budget it takes."""
        used = tokens
        while not self.kv_cache_manager.reserve(seq, tokens):
            last = next(one for one in reversed(self.running) if one not in self._in_flight)
            if last is seq and any(one in self._in_flight for one in self.running):
                # Room may come of the steps in flight.
                return used - tokens
            # The last one there is starts afresh, where its pages lie in too many units.
            self._stop(last, evict=len(self.running) == 1)
            self.waiting.appendleft(last)
            self.preemptions += 1
            used -= rows.pop(last, 0)
            if last is seq:
                return used - tokens
        rows[seq] = tokens
        return used

    def _admit(self, rows: dict[Sequence, int], budget: _Budget, share: int) -> None:
        """Start waiting sequences in order, while tokens, sequences and pages last."""
        blocked: list[Sequence] = []
        most = self._max_rows
        # Prompt tokens of later steps.
        ahead = sum(max(0, seq.uncomputed - rows.get(seq, 1)) for seq in self.running)
        while self.waiting and budget.tokens > 0 and len(self.running) < self.max_sequences and len(rows) < most:
            seq = self.waiting.popleft()
            if seq.blocked or (budget.prompt_logprobs <= 0 and seq.computes_prompt_logprobs):
                # It holds up nobody.
                blocked.append(seq)
                continue
            tokens = self._start(seq, budget, share, ahead)
            if not tokens:
                self._without_pages = (seq, self._step + _ADMISSION_STEPS, self._available)
                self.waiting.appendleft(seq)
                break
            self.running.append(seq)
            rows[seq] = tokens
            ahead += seq.uncomputed - tokens
            budget.spend(seq, tokens)
        self.waiting.extendleft(reversed(blocked))

    def _start(self, seq: Sequence, budget: _Budget, share: int, ahead: int) -> int:
        """Give a waiting sequence pages for its first tokens. Returns the number of these, 0 if there is no room.
        `ahead`: prompt tokens of running sequences that have none yet.
        """
        # Alone it has room, though perhaps not beside its cached prefix: pages of that may lie in too many units.
        for _ in range(1 if self.running else 2):
            if not self.kv_cache_manager.allocate(seq):
                return 0
            tokens = budget.chunk(seq, share)
            # Whole prompts have room beside each other, or tokens would be computed in vain: over and over by one that
            # was preempted, wherefore it waits for room in any case.
            whole = self.running and (self._reserve_full_isl or seq.started)
            left = ahead + seq.uncomputed - tokens if whole else 0
            # A page for each running sequence stays free, or the newcomer would soon be preempted.
            if self.kv_cache_manager.reserve(seq, tokens, spare=len(self.running), ahead=left):
                return tokens
            self.kv_cache_manager.free(seq, evict=not self.running)
        return 0


@dataclass
class _Budget:
    """The tokens that a step still has room for, and its prompt tokens with log-probabilities, of which a sequence may
    have `logprobs_share`."""

    tokens: int
    prompt_logprobs: int
    logprobs_share: int

    def chunk(self, seq: Sequence, share: int) -> int:
        """Tokens of `seq` to run next: at most `share`, none beyond the next state checkpoint, and one where its state
        lacks drafts, which only a decode replays."""
        tokens = min(seq.uncomputed, self.tokens, 1 if seq.replay else share)
        if seq.computes_prompt_logprobs:
            tokens = min(tokens, self.prompt_logprobs, self.logprobs_share)
        return min(tokens, seq.checkpoint_positions[0] - seq.computed) if seq.checkpoint_positions else tokens

    def spend(self, seq: Sequence, tokens: int) -> None:
        """Give `tokens` tokens to `seq`."""
        self.tokens -= tokens
        if seq.computes_prompt_logprobs:
            self.prompt_logprobs -= tokens
