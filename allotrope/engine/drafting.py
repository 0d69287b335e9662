"""Speculative decoding: the drafts of each sequence for the next step.

Owns who proposes them and how many. Must not know how a step verifies them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from allotrope.engine.drafts.acceptance import AcceptanceStats, SyntheticAcceptance
from allotrope.engine.drafts.lookup import make_lookup_drafter
from allotrope.engine.drafts.policy import DraftPolicy, shared_out
from allotrope.engine.drafts.step_times import PassTimes, StepTimes
from allotrope.engine.in_flight import HostCopy
from allotrope.engine.sequence import PLACEHOLDER, Sequence
from allotrope.errors import ConfigError
from allotrope.graphs.captured import decode_sizes, padded_size
from allotrope.speculative_config import SpeculativeConfig

Wanted = tuple[Sequence, int]
"""A sequence, and the most drafts that it can have."""


class Drafting:
    """Drafts of any origin. `stats`: what was accepted."""

    def __init__(
        self,
        config: SpeculativeConfig,
        max_drafts: int,
        max_decodes: int,
        seed: int,
        pass_times: PassTimes | None = None,
    ) -> None:
        """`max_drafts`: most of a sequence in a step. `max_decodes`: most rows of a decode step. `seed`: of forced
        acceptance. `pass_times`: of a draft model."""
        self.max_drafts, self._max_decodes = max_drafts, max_decodes
        self.stats = AcceptanceStats(max_drafts, time.monotonic())
        self._forced = SyntheticAcceptance.from_config(config, seed)
        self._times = StepTimes(_padding(max_decodes))
        self._policy = DraftPolicy(self.stats, self._times, pass_times) if config.adaptive else None
        self._seen: set[Sequence] = set()

    def forced(self, seq: Sequence, num_drafts: int) -> int | None:
        """The drafts to accept whatever they are, for benchmarks; None: those that are right."""
        if self._forced is None or not num_drafts:
            return None
        return self._forced.accepted(seq, num_drafts)

    def set_acceptance_length(self, length: float) -> None:
        """Force another mean acceptance from the next step on, and expect what is expected at the start. Raises
        ConfigError where none is forced."""
        if self._forced is None:
            raise ConfigError("an acceptance length needs rejection_sample_method='synthetic'")
        self._forced.set_length(length)
        self.stats.forget()

    def record(self, seqs: Seq[Sequence], drafted: Seq[int], accepted: Seq[int]) -> None:
        """Count a step: the drafts of `seqs` that it verified, and how many of them were accepted."""
        self.stats.record(seqs, drafted, accepted)
        self.stats.check(time.monotonic())

    def record_time(self, rows: int, seconds: float) -> None:
        """A step took `seconds` from its launch until its tokens were read. `rows`: with one token each; 0: it had
        others."""
        if rows:
            self._times.record(rows, seconds)

    def forget_ended(self, seqs: Seq[Sequence]) -> None:
        """Forget the sequences that have ended. `seqs`: of a step whose tokens were read."""
        self._seen.update(seqs)
        for seq in [seq for seq in self._seen if seq.done]:
            self._seen.remove(seq)
            self._end(seq)

    def forget_times(self) -> None:
        """Steps run in another way from now on, such as by a graph that was just captured."""
        self._times.clear()

    def _chosen(self, wanted: Seq[Wanted]) -> list[int]:
        """Per sequence, as many drafts as a step has room for and as are worth their time."""
        limits = [max(0, min(limit, self.max_drafts)) for _, limit in wanted]
        room = max(0, self._max_decodes - len(wanted))
        if not any(limits):
            return limits
        if self._policy is None:
            return shared_out(limits, room)
        return self._policy.choose([seq for seq, _ in wanted], limits, most_drafts=room)

    def _end(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self.stats.end(seq)
        if self._forced is not None:
            self._forced.end(seq)
        if self._policy is not None:
            self._policy.end(seq)


class LookupDrafting(Drafting):
    """Drafts that are looked up in former tokens."""

    def __init__(self, config: SpeculativeConfig, max_drafts: int, max_decodes: int, seed: int) -> None:
        super().__init__(config, max_drafts, max_decodes, seed)
        self._drafter = make_lookup_drafter(config)
        # Tokens that the drafter knows of each sequence.
        self._known: dict[Sequence, int] = {}

    def propose(self, wanted: Seq[Wanted]) -> None:
        """Set the drafts of the sequences that a step has given tokens to and that have not ended."""
        found = []
        for seq, most in wanted:
            if seq not in self._known:
                self._drafter.start(seq, seq.request.prompt_ids)
                self._known[seq] = seq.prompt_len
            new_ids = seq.ids[self._known[seq] :]
            self._known[seq] = len(seq.ids)
            seq.drafts = self._drafter.propose(seq, new_ids, max(0, min(most, self.max_drafts)))
            found.append((seq, len(seq.drafts)))
        for (seq, _), count in zip(found, self._chosen(found), strict=True):
            seq.drafts = seq.drafts[:count]

    def _end(self, seq: Sequence) -> None:
        super()._end(seq)
        known = self._known.pop(seq, None)
        if known is not None:
            # Its last tokens too may be looked up by others.
            self._drafter.propose(seq, seq.ids[known:], 0)
            self._drafter.end(seq)


class ModelDrafting(Drafting):
    """Drafts of a draft model, which runs behind each step, before the host has read the step's tokens.

    `unstored`: drafts of a sequence that come of the first pass, and need no page behind the step's tokens.
    """

    def __init__(
        self, config: SpeculativeConfig, max_drafts: int, max_decodes: int, seed: int, *, lookahead: int, on_gpu: bool
    ) -> None:
        """`lookahead`: as in `LoadPlan`."""
        self._pass_times = PassTimes(_padding(max_decodes))
        super().__init__(config, max_drafts, max_decodes, seed, self._pass_times)
        self.unstored = max_drafts - lookahead
        self._on_gpu = on_gpu
        # What the last step drafted, for which sequences and how many for each.
        self.tokens: HostCopy | None = None
        self._drafted_for: list[Sequence] = []
        self._counts: list[int] = []
        self._since: torch.cuda.Event | float = 0.0
        # When the tokens of the step before were read, and its rows.
        self._read_at: float | None = None
        self._rows_before = 0

    def forget_times(self) -> None:
        super().forget_times()
        self._pass_times.clear()
        self._read_at = None

    @property
    def passes(self) -> int:
        """Drafts that the draft model is to make of each sequence."""
        return max(self._counts, default=0)

    def choose(self, wanted: Seq[Wanted]) -> None:
        """Decide how many drafts the sequences of the next step get behind it; the drafts of the step before are
        forgotten."""
        for seq in self._drafted_for:
            seq.drafts = seq.draft_indices = ()
        self._drafted_for, self._counts = [seq for seq, _ in wanted], self._chosen(wanted)

    def start_passes(self) -> None:
        """The draft model is about to run."""
        self._since = _event() if self._on_gpu else time.perf_counter()

    def place(self, next_tokens: torch.Tensor) -> None:
        """Set drafts to placeholders for what the draft model has made. `next_tokens`: as in `DraftedTokens`."""
        self.tokens = HostCopy(next_tokens, self._since, self.passes)
        count = len(self._drafted_for)
        for i, (seq, drafts) in enumerate(zip(self._drafted_for, self._counts, strict=True)):
            seq.drafts = (PLACEHOLDER,) * drafts
            seq.draft_indices = tuple(count * (1 + j) + i for j in range(drafts))

    def record_step(self, rows: int, tokens: HostCopy | None) -> None:
        """The tokens of a step were read. `rows`: of it, where each had one token, else 0. `tokens`: that the passes
        behind the step before made, which ran before it."""
        now, before, behind = time.perf_counter(), self._read_at, self._rows_before
        self._read_at, self._rows_before = now if rows else None, rows
        if not self._on_gpu:
            # On a CPU the passes behind a step have run when its tokens are read.
            tokens, behind = self.tokens, rows
        if tokens is None or before is None or not rows:
            return
        seconds = tokens.seconds
        self._pass_times.record(tokens.passes, behind, seconds)
        self._times.record(rows, max(now - before - seconds, 0.0))


def _padding(max_decodes: int) -> Callable[[int], int]:
    """The rows that a decode step of so many runs with. `max_decodes`: most of these."""
    return functools.partial(padded_size, decode_sizes(max_decodes))


def _event() -> torch.cuda.Event:
    """The device has come so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def make_drafting(
    config: SpeculativeConfig | None, max_drafts: int, max_decodes: int, seed: int, *, lookahead: int, on_gpu: bool
) -> LookupDrafting | ModelDrafting | None:
    """Who drafts under the options; None without speculative decoding. `max_decodes`: most rows of a decode step.
    `lookahead`: as in `LoadPlan`."""
    if config is None:
        return None
    if config.drafts_from_text:
        return LookupDrafting(config, max_drafts, max_decodes, seed)
    return ModelDrafting(config, max_drafts, max_decodes, seed, lookahead=lookahead, on_gpu=on_gpu)
