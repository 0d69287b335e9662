"""The step loop: schedule, launch, sample, collect; one forward pass for each `step`.

Owns the in-flight step. Must not know how requests arrive or how a layer computes.
"""

from __future__ import annotations

import logging
import time
from collections import abc
from concurrent.futures import Future
from dataclasses import replace

import torch

from allotrope.engine.drafting import LookupDrafting, ModelDrafting
from allotrope.engine.executor import Executor
from allotrope.engine.grammar_masks import GrammarMasks
from allotrope.engine.in_flight import InFlightStep, start_copy
from allotrope.engine.inputs import SampledSequence, StepPlan, StepRow
from allotrope.engine.observer import Observer
from allotrope.engine.requests import RequestTable
from allotrope.engine.sampled_tokens import NO_TOKEN, SampledTokens, keep_tokens
from allotrope.engine.sampling_batch import RowSampling, SamplingBatch, read_logprobs
from allotrope.engine.scheduler import Row
from allotrope.engine.sequence import PLACEHOLDER, Sequence
from allotrope.engine.step_log import StepLog
from allotrope.engine.step_rows import decode_rows, sampled_sequences, sampling_rows, step_rows, wanted_drafts
from allotrope.ops.sampling.sampler import Sampler
from allotrope.ops.sampling.spec import Sampled
from allotrope.ops.token_mask import BitMask
from allotrope.request import SequenceOutput, TokenLogprobs

log = logging.getLogger("allotrope.engine")

PageCopy = tuple[int, int, int, int]
"""Data-parallel rank, group, and the pages to copy from and to."""


class StepLoop:
    """`copies`: pages to copy before the next pass; the loop empties the list. `step_log`: runs the plans where steps
    are timed. `drafting`: proposes draft tokens; None without speculative decoding.
    """

    def __init__(
        self,
        executor: Executor,
        requests: RequestTable,
        copies: list[PageCopy],
        sampler: Sampler,
        vocab_size: int,
        device: torch.device,
        *,
        async_scheduling: bool,
        observer: Observer | None,
        step_log: StepLog | None,
        drafting: LookupDrafting | ModelDrafting | None = None,
    ) -> None:
        self._executor, self._requests, self._copies = executor, requests, copies
        self._step_log, self._sampler = step_log, sampler
        self._vocab_size, self._device = vocab_size, device
        self._async, self._observer, self._drafting = async_scheduling, observer, drafting
        # Drafts of a model are made before the tokens of a step are read, those from text behind these.
        self._draft_model = drafting if isinstance(drafting, ModelDrafting) else None
        self._lookups = drafting if isinstance(drafting, LookupDrafting) else None
        self._masks = GrammarMasks(vocab_size, device)
        self._sampling: SamplingBatch | None = None
        self._in_flight: InFlightStep | None = None
        self._logged_wait = False

    def step(self) -> list[SequenceOutput]:
        """Run one forward pass and return new tokens; [] when there is nothing to run.

        With async scheduling these are the tokens of the pass before, read while the device runs this one.
        """
        before = self._in_flight
        if before is not None and self._must_read(before):
            self._in_flight = None
            return self._collect(before)
        rows = self._requests.plan()
        if not rows:
            self._in_flight = None
            return [] if before is None else self._collect(before)
        started = time.perf_counter()
        if self._draft_model is not None:
            rows = [self._with_known_drafts(row) for row in rows]
        launched, outputs = self._launch(rows, before)
        if not self._async:
            sampled = [] if launched is None else self._take_tokens(launched)
            self._commit(rows, {one.seq: one.num_accepted for one in sampled})
            outputs = [self._output(one) for one in sampled]
            if self._lookups is not None:
                self._lookups.record_time(decode_rows(rows), time.perf_counter() - started)
                having = {one.seq for one in sampled if not one.seq.done}
                self._lookups.propose(wanted_drafts([row for row in rows if row.seq in having]))
        else:
            self._in_flight = launched
            if outputs is None:
                outputs = [] if before is None else self._collect(before)
            # Keys of full pages need the tokens before this pass, which are known only now.
            self._commit(rows)
        if self._executor.capture_next() and self._drafting is not None:
            self._drafting.forget_times()
        return outputs

    def _must_read(self, before: InFlightStep) -> bool:
        """Whether the next step cannot be launched before the tokens of the one before it are read."""
        seqs = [seq for seq in before.seqs if not seq.done]
        if any(seq.reads_output for seq in seqs):
            self._log_wait()
            return True
        if not before.verifies:
            return False
        # Where it accepts drafts, lengths are known to the device alone.
        unknown = not self._executor.static_decodes or not self._requests.only_decodes
        return unknown or any(seq.reads_output_len for seq in seqs)

    def _launch(
        self, rows: abc.Sequence[Row], before: InFlightStep | None
    ) -> tuple[InFlightStep | None, list[SequenceOutput] | None]:
        """Start the pass and sample from it. Returns the new step, None if no sequence has all its tokens computed, and
        the outputs of the step `before`, None where that was not read.

        Where a sequence follows a grammar, the step before is read while the device runs the pass: the pass needs only
        its placeholders, but the grammar's mask needs its tokens.
        """
        num_logits = [self._num_logits(row) for row in rows]
        ready = [row for row in rows if row.samples]
        forced = self._forced(ready)
        greedy = self._chosen_by_ranks(ready, sum(num_logits))
        reads_before = before is not None and any(
            row.seq.sampling.constraint is not None and row.seq.unread for row in ready
        )
        mask = None if reads_before else self._start_mask(ready)
        # Those that this step verifies, before the draft model is asked for the next ones.
        drafts = None if self._draft_model is None else self._draft_model.tokens
        sequences = self._choose_drafts(rows, ready, forced)
        plan = self._step_plan(rows, num_logits, {} if before is None else before.row_of, sequences)
        plan = replace(plan, greedy=greedy)
        if self._draft_model is not None:
            plan = replace(plan, passes=self._draft_model.passes)
        if self._async or self._draft_model is not None:
            plan = replace(plan, sampled=sum(1 + len(row.drafts) for row in ready))
        run = self._executor.run if self._step_log is None else self._step_log.run
        out = run(plan, None if before is None else before.prev_sampled)
        last_logits = None if greedy else self._last_logits(rows, num_logits, out, len(ready))
        for row in rows:
            self._requests.start(row.seq)
        outputs: list[SequenceOutput] | None = None
        if greedy:
            launched: InFlightStep | None = start_copy(ready, self._batch(sampling_rows(ready)), Sampled(out, None))
        else:
            if reads_before:
                assert before is not None
                outputs = self._collect(before)
                mask = self._start_mask(ready)
            launched = self._sample(ready, last_logits, out, mask, before)
        if launched is not None:
            launched = replace(launched, forced=forced, rows=decode_rows(rows), draft_tokens=drafts)
        if self._draft_model is not None:
            launched = self._run_drafts(launched, shared=greedy or self._async)
        return launched, outputs

    def _choose_drafts(
        self, rows: abc.Sequence[Row], ready: abc.Sequence[Row], forced: abc.Sequence[int | None]
    ) -> list[tuple[SampledSequence, ...]]:
        """With a draft model, decide how many drafts it makes behind the step. Returns the sequences that each
        data-parallel rank samples from; none of them without a draft model."""
        dp_ranks = range(len(self._requests.schedulers))
        model = self._draft_model
        if model is None:
            return [() for _ in dp_ranks]
        model.choose(wanted_drafts(ready, model.unstored))
        accepts = iter(forced)
        of_ranks = ([row for row in rows if row.seq.dp_rank == dp_rank] for dp_rank in dp_ranks)
        return [tuple(sampled_sequences(own, accepts)) for own in of_ranks]

    def _run_drafts(self, launched: InFlightStep | None, *, shared: bool) -> InFlightStep | None:
        """Run the draft model behind a step, which is None if nothing was sampled. `shared`: every rank has the sampled
        tokens. Returns the step with the number of its accepted drafts, on the device."""
        model = self._draft_model
        assert model is not None
        model.start_passes()
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        drafted = self._executor.run_drafts(none if launched is None else launched.prev_sampled, shared=shared)
        model.place(drafted.next_tokens)
        return None if launched is None else replace(launched, accepted=drafted.accepted)

    def _step_plan(
        self,
        rows: abc.Sequence[Row],
        num_logits: abc.Sequence[int],
        row_of: abc.Mapping[Sequence, int],
        sequences: abc.Sequence[tuple[SampledSequence, ...]],
    ) -> StepPlan:
        """What each data-parallel rank runs. `num_logits`: per row, its trailing tokens whose logits are computed.
        `row_of`: as in `InFlightStep`, of the step before, where its tokens are yet to be read. `sequences`: of each
        rank, as from `_choose_drafts`."""
        of_ranks: list[list[StepRow]] = [[] for _ in sequences]
        for row, count in zip(rows, num_logits, strict=True):
            of_ranks[row.seq.dp_rank] += step_rows(row, count, row_of.get(row.seq, -1))
        copies: list[list[tuple[int, int, int]]] = [[] for _ in sequences]
        for dp_rank, group, source, target in self._copies:
            copies[dp_rank].append((group, source, target))
        self._copies.clear()
        parts = [
            StepPlan(tuple(own), tuple(copied), sequences=of_rank)
            for own, copied, of_rank in zip(of_ranks, copies, sequences, strict=True)
        ]
        return parts[0] if len(parts) == 1 else StepPlan.of_ranks(parts)

    def _forced(self, ready: abc.Sequence[Row]) -> tuple[int | None, ...]:
        """Per row that is sampled, as in `InFlightStep`."""
        if self._drafting is None:
            return (None,) * len(ready)
        return tuple([self._drafting.forced(row.seq, len(row.drafts)) for row in ready])

    def _with_known_drafts(self, row: Row) -> Row:
        """Where sampling reads the drafts before a token, such as for penalties, they cannot be placeholders."""
        if PLACEHOLDER not in row.drafts or not (row.seq.reads_output or row.seq.sampling.constraint is not None):
            return row
        assert self._draft_model is not None and self._draft_model.tokens is not None
        drafts = self._draft_model.tokens.at(row.draft_indices)
        # Behind hidden states that are not numbers there is no draft.
        drafts = drafts[: drafts.index(PLACEHOLDER)] if PLACEHOLDER in drafts else drafts
        return row._replace(drafts=drafts, draft_indices=row.draft_indices[: len(drafts)])

    def _start_mask(self, ready: abc.Sequence[Row]) -> Future[BitMask] | None:
        """Begin to fill the masks of the sequences that follow grammars, in a thread; None if none does."""
        if all(row.seq.sampling.constraint is None for row in ready):
            return None
        return self._masks.start(sampling_rows(ready))

    def _chosen_by_ranks(self, ready: abc.Sequence[Row], num_logits: int) -> bool:
        """Whether the ranks choose the step's tokens together: nobody needs its logits whole. `num_logits`: without
        those of drafts."""
        if self._executor.ranks == 1 or self._observer is not None or num_logits != len(ready):
            return False
        return bool(ready) and all(row.seq.sampling.greedy for row in ready)

    def _batch(self, records: abc.Sequence[RowSampling]) -> SamplingBatch:
        """The sampling of rows; that of the step before where these are the same."""
        if self._sampling is None or not self._sampling.serves(records):
            self._sampling = SamplingBatch(records, self._vocab_size, self._device)
        return self._sampling

    def close(self) -> None:
        """Let go of the thread that fills masks."""
        self._masks.close()

    def _commit(self, rows: abc.Sequence[Row], accepted: abc.Mapping[Sequence, int] | None = None) -> None:
        """Account for the tokens that the step stores: those of its rows, and the accepted drafts. `accepted`: their
        number by sequence; None where that is yet to be read."""
        managers = [scheduler.kv_cache_manager for scheduler in self._requests.schedulers]
        for row in rows:
            seq = row.seq
            if seq.done:
                continue
            if accepted is None:
                seq.replay = 0
                managers[seq.dp_rank].commit(seq, row.tokens, len(row.drafts))
            else:
                seq.replay = accepted.get(seq, 0)
                managers[seq.dp_rank].commit(seq, row.tokens + seq.replay)

    def _log_wait(self) -> None:
        if not self._logged_wait:
            self._logged_wait = True
            log.info("async scheduling pauses while a request with penalties runs: these need the tokens before")

    def _num_logits(self, row: Row) -> int:
        """Trailing tokens of a row whose logits are computed."""
        seq = row.seq
        if self._observer is not None or seq.computes_prompt_logprobs:
            return row.tokens
        return int(row.end == len(seq.ids))

    def _last_logits(
        self, rows: abc.Sequence[Row], num_logits: abc.Sequence[int], out: torch.Tensor, ready: int
    ) -> list[torch.Tensor] | None:
        """Per row that is sampled, the logits of its last token and its drafts, once the others are read; None where
        `out` has no others. `ready`: rows that are sampled."""
        if self._observer is None and sum(num_logits) == ready:
            return None
        logits_of_rows = out.split([count + len(row.drafts) for row, count in zip(rows, num_logits, strict=True)])
        self._read_prompt_logits(rows, logits_of_rows)
        return [own[-1 - len(row.drafts) :] for row, own in zip(rows, logits_of_rows, strict=True) if row.samples]

    def _read_prompt_logits(self, rows: abc.Sequence[Row], logits_of_rows: abc.Sequence[torch.Tensor]) -> None:
        """Show logits to the observer, and record prompt log-probabilities for the sequences that ask for them."""
        for row, logits in zip(rows, logits_of_rows, strict=True):
            seq = row.seq
            if self._observer is not None:
                # Those behind drafts are shown once these are accepted.
                self._observer.logits(seq.request.request_id, seq.index, seq.computed, logits[: row.tokens])
            start = seq.computed + 1
            targets = seq.ids[start : min(start + len(logits), seq.prompt_len)]
            if seq.wants_prompt_logprobs and targets:
                count = seq.request.params.prompt_logprobs or 0
                token_ids = torch.tensor(targets, device=logits.device)
                scores = self._sampler.gather_logprobs(logits[: len(targets)], token_ids, count)
                seq.prompt_logprobs.update(enumerate(read_logprobs(scores, [count] * len(targets)), start))

    def _sample(
        self,
        ready: abc.Sequence[Row],
        last_logits: abc.Sequence[torch.Tensor] | None,
        logits: torch.Tensor,
        mask: Future[BitMask] | None,
        before: InFlightStep | None,
    ) -> InFlightStep | None:
        """Sample a token behind the last of each row and behind each draft. `last_logits`: theirs, of `logits`; None:
        these are theirs."""
        if not ready:
            return None
        records = sampling_rows(ready)
        batch = self._batch(records)
        if last_logits is not None:
            logits = torch.cat(list(last_logits))
        ahead, most_ahead = self._ahead(ready, before) if batch.draws else (None, 0)
        step_sampling = batch.step(None if mask is None else mask.result(), ahead, most_ahead)
        sampled = self._sampler(logits, step_sampling)
        if self._async:
            self._executor.share_sampled(sampled.token_ids)
        step = start_copy(ready, batch, sampled)
        return step if last_logits is None or self._observer is None else replace(step, logits=tuple(last_logits))

    def _ahead(self, ready: abc.Sequence[Row], before: InFlightStep | None) -> tuple[torch.Tensor | None, int]:
        """Per row that is sampled, the accepted drafts of the step before, on the device, and the most of a sequence;
        None where these are read."""
        most = max(row.seq.unread_drafts for row in ready)
        if before is None or before.accepted is None or not most:
            return None, 0
        read = len(before.accepted)
        places: list[int] = []
        for row in ready:
            places += [before.row_of[row.seq] if row.seq.unread_drafts else read] * (1 + len(row.drafts))
        accepted = torch.cat([before.accepted, before.accepted.new_zeros(1)])
        return accepted[torch.tensor(places).to(self._device, non_blocking=True)], most

    def _collect(self, step: InFlightStep) -> list[SequenceOutput]:
        """Read the tokens of a step. Sequences that ended since are passed over."""
        return [self._output(one) for one in self._take_tokens(step)]

    def _take_tokens(self, step: InFlightStep) -> list[SampledTokens]:
        """Read the tokens of a step into its sequences, but for those that ended since.

        A draft is accepted if it is the token that was sampled behind the one before it, so that the tokens are those
        of decoding without drafts.
        """
        tokens, logprobs = step.read()
        found, row = [], 0
        launched = {} if self._in_flight is None or self._in_flight is step else self._in_flight.row_of
        for i, (seq, drafts) in enumerate(zip(step.seqs, step.drafts, strict=True)):
            own = slice(row, row + 1 + len(drafts))
            row = own.stop
            if seq.done:
                continue
            if PLACEHOLDER in drafts:
                assert step.draft_tokens is not None
                # Where there is no draft, token 0 was verified.
                drafts = tuple([max(token, 0) for token in step.draft_tokens.at(step.draft_indices[i])])
            taken = tokens[own]
            if drafts or step.logits is not None:
                logits = None if step.logits is None else step.logits[i]
                taken = self._accept(seq, drafts, step.forced[i], taken, logits)
            index = seq.fill_placeholder(taken if taken[-1] >= 0 else taken[:-1])
            found.append(SampledTokens(seq, index, taken, logprobs[own][: len(taken)], len(drafts)))
            if self._async and seq.unread_drafts:
                self._requests.scheduler_of(seq).kv_cache_manager.accept(seq, len(taken) - 1)
                # A step that was launched since has replayed them.
                seq.replay = 0 if seq in launched else len(taken) - 1
        self._record(step, found)
        return found

    def _record(self, step: InFlightStep, sampled: abc.Sequence[SampledTokens]) -> None:
        """Count what was accepted, and the time of the step."""
        drafting = self._drafting
        if drafting is None:
            return
        if self._draft_model is not None:
            # A step whose sequences had all ended may have been read long after it ran.
            self._draft_model.record_step(step.rows if sampled else 0, step.draft_tokens)
        verified = [one for one in sampled if one.num_drafts]
        drafting.record(
            [one.seq for one in verified],
            [one.num_drafts for one in verified],
            [one.num_accepted for one in verified],
        )
        drafting.forget_ended(step.seqs)

    def _accept(
        self,
        seq: Sequence,
        drafts: abc.Sequence[int],
        forced: int | None,
        sampled: abc.Sequence[int],
        logits: torch.Tensor | None,
    ) -> list[int]:
        """The accepted drafts and the token behind them. `sampled`: behind the last token, and behind each draft.

        `forced`: so many are accepted, None: those that are right. `logits`: of `sampled`, for the observer.
        """
        if forced is not None:
            return [*drafts[:forced], sampled[forced]]
        taken: list[int] = []
        for count, token in enumerate(sampled):
            if self._observer is not None:
                assert logits is not None
                request_id, start = seq.request.request_id, len(seq.ids) - 2 + count
                if count:
                    self._observer.logits(request_id, seq.index, start, logits[count : count + 1])
                token = self._observer.token(request_id, seq.index, token)
            taken.append(token)
            if count == len(drafts) or token != drafts[count]:
                break
        return taken

    def _output(self, sampled: SampledTokens) -> SequenceOutput:
        """End the sequence if one of its new tokens is the last, or if there is none, and return the output."""
        seq = sampled.seq
        kept = keep_tokens(sampled)
        tokens, error, reason = kept.tokens, kept.error, kept.reason
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        first = sampled.index == 0
        if first and seq.wants_prompt_logprobs and tokens:
            prompt_logprobs = (None, *(seq.prompt_logprobs[i] for i in range(1, seq.prompt_len)))
        if error is not None or reason is not None:
            seq.truncate(sampled.index + len(tokens))
            # Where scores are not numbers, no later request may reuse what it has stored. Where a grammar leaves no
            # token, others may.
            self._requests.end(seq, evict=error == NO_TOKEN)
        scored = sampled.logprobs[0] is not None
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            tuple(tokens),
            reason if error is None else "error",
            kept.stopped_by,
            tuple(one for one in sampled.logprobs[: len(tokens)] if one is not None) if scored and tokens else None,
            prompt_logprobs,
            seq.cached_tokens,
            cache_lost=dict(seq.cache_lost.items()) if first and tokens else {},
            queued_seconds=seq.queued_seconds if first and tokens else 0.0,
            error=error,
            num_draft_tokens=sampled.num_drafts,
            num_accepted_tokens=min(sampled.num_accepted, len(tokens)),
        )
