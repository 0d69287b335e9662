"""The step loop: schedule, launch, sample, collect; one forward pass for each `step`.

Owns the in-flight step. Must not know how requests arrive or how a layer computes.
"""

from __future__ import annotations

import logging
from collections import abc
from concurrent.futures import Future

import torch

from allotrope.engine.executor import Executor
from allotrope.engine.grammar_masks import GrammarMasks
from allotrope.engine.in_flight import InFlightStep, start_copy
from allotrope.engine.inputs import StepPlan, StepRow
from allotrope.engine.observer import Observer
from allotrope.engine.requests import RequestTable
from allotrope.engine.sampling_batch import SamplingBatch, read_logprobs
from allotrope.engine.scheduler import Row
from allotrope.engine.sequence import Sequence
from allotrope.engine.step_log import StepLog
from allotrope.ops.sampling.sampler import Sampler
from allotrope.ops.sampling.spec import Sampled
from allotrope.ops.token_mask import BitMask
from allotrope.request import FinishReason, SequenceOutput, TokenLogprobs

log = logging.getLogger("allotrope.engine")

_NO_TOKEN = "the model's scores for the next token are not numbers, or every token is masked"


class StepLoop:
    """`copies`: (group, source, target) pages to copy before the next pass; the loop empties the list. `step_log`:
    runs the plans where steps are timed.
    """

    def __init__(
        self,
        executor: Executor,
        requests: RequestTable,
        copies: list[tuple[int, int, int]],
        sampler: Sampler,
        vocab_size: int,
        device: torch.device,
        *,
        async_scheduling: bool,
        observer: Observer | None,
        step_log: StepLog | None,
    ) -> None:
        self._executor, self._requests, self._copies = executor, requests, copies
        self._step_log, self._sampler = step_log, sampler
        self._vocab_size, self._device = vocab_size, device
        self._async, self._observer = async_scheduling, observer
        self._masks = GrammarMasks(vocab_size, device)
        self._sampling: SamplingBatch | None = None
        self._in_flight: InFlightStep | None = None
        self._logged_wait = False

    def step(self) -> list[SequenceOutput]:
        """Run one forward pass and return new tokens; [] when there is nothing to run.

        With async scheduling these are the tokens of the pass before, read while the device runs this one.
        """
        before = self._in_flight
        if before is not None and any(seq.reads_output for seq in before.seqs):
            self._in_flight = None
            self._log_wait()
            return self._collect(before)
        rows = self._requests.scheduler.plan()
        if not rows:
            self._in_flight = None
            return [] if before is None else self._collect(before)
        launched, outputs = self._launch(rows, before)
        if not self._async:
            self._commit(rows)
            outputs = [] if launched is None else self._collect(launched)
        else:
            self._in_flight = launched
            if outputs is None:
                outputs = [] if before is None else self._collect(before)
            # Keys of full pages need the tokens before this pass, which are known only now.
            self._commit(rows)
        self._executor.capture_next()
        return outputs

    def _launch(
        self, rows: abc.Sequence[Row], before: InFlightStep | None
    ) -> tuple[InFlightStep | None, list[SequenceOutput] | None]:
        """Start the pass and sample from it: the new step, None if no sequence has all its tokens computed.

        A grammar's mask needs the tokens of the step before, which the pass does not: where a sequence follows one,
        they are read while the device runs the pass. Returns their outputs too, None where nothing was read.
        """
        copies = tuple(self._copies)
        self._copies.clear()
        num_logits = [self._num_logits(row) for row in rows]
        row_of = {} if before is None else before.row_of
        steps = [_step_row(row, count, row_of.get(row.seq, -1)) for row, count in zip(rows, num_logits, strict=True)]
        prev_sampled = None if before is None else before.prev_sampled
        run = self._executor.run if self._step_log is None else self._step_log.run
        ready = [row.seq for row in rows if row.end == len(row.seq.ids)]
        greedy = self._chosen_by_ranks(ready, sum(num_logits))
        mask = None
        collects = before is not None and any(seq.sampling.constraint is not None and seq.unread for seq in ready)
        if not collects:
            mask = self._start_mask(ready)
        plan = StepPlan(tuple(steps), copies, sampled=len(ready) if self._async else 0, greedy=greedy)
        out = run(plan, prev_sampled)
        if not greedy:
            logits_of_rows = out.split(num_logits)
            self._read_prompt_logits(rows, logits_of_rows)
        for row in rows:
            self._requests.start(row.seq)
        if greedy:
            return start_copy(ready, self._batch(ready), Sampled(out, None)), None
        last_logits = [own[-1:] for row, own in zip(rows, logits_of_rows, strict=True) if row.end == len(row.seq.ids)]
        outputs = None
        if collects:
            assert before is not None
            outputs = self._collect(before)
            mask = self._start_mask(ready)
        return self._sample(ready, last_logits, out, mask), outputs

    def _start_mask(self, seqs: abc.Sequence[Sequence]) -> Future[BitMask] | None:
        """Begin to fill the masks of the sequences that follow grammars, in a thread; None if none does."""
        rows = [seq.sampling for seq in seqs]
        return self._masks.start(rows) if any(row.constraint is not None for row in rows) else None

    def _chosen_by_ranks(self, ready: abc.Sequence[Sequence], num_logits: int) -> bool:
        """Whether the ranks choose the step's tokens together: nobody needs its logits whole."""
        if self._executor.ranks == 1 or self._observer is not None or num_logits != len(ready):
            return False
        return bool(ready) and all(seq.sampling.greedy for seq in ready)

    def _batch(self, seqs: abc.Sequence[Sequence]) -> SamplingBatch:
        """The sampling of `seqs`; that of the step before where these are the same."""
        records = [seq.sampling for seq in seqs]
        if self._sampling is None or not self._sampling.serves(records):
            self._sampling = SamplingBatch(records, self._vocab_size, self._device)
        return self._sampling

    def close(self) -> None:
        """Let go of the thread that fills masks."""
        self._masks.close()

    def _commit(self, rows: abc.Sequence[Row]) -> None:
        for row in rows:
            if not row.seq.done:
                self._requests.kv_cache_manager.commit(row.seq, row.tokens)

    def _log_wait(self) -> None:
        if not self._logged_wait:
            self._logged_wait = True
            log.info("async scheduling pauses while a request with penalties runs: these need the tokens before")

    def _num_logits(self, row: Row) -> int:
        """Trailing tokens of a row whose logits are computed."""
        wants_prompt = row.seq.wants_prompt_logprobs and row.seq.output_len == 0
        if self._observer is not None or wants_prompt:
            return row.tokens
        return int(row.end == len(row.seq.ids))

    def _read_prompt_logits(self, rows: abc.Sequence[Row], logits_of_rows: abc.Sequence[torch.Tensor]) -> None:
        """Show logits to the observer, and record prompt log-probabilities for the sequences that ask for them."""
        for row, logits in zip(rows, logits_of_rows, strict=True):
            seq = row.seq
            if self._observer is not None:
                self._observer.logits(seq.request.request_id, seq.index, seq.computed, logits)
            start = seq.computed + 1
            targets = seq.ids[start : min(start + len(logits), seq.prompt_len)]
            if seq.wants_prompt_logprobs and targets:
                count = seq.request.params.prompt_logprobs or 0
                token_ids = torch.tensor(targets, device=logits.device)
                scores = self._sampler.gather_logprobs(logits[: len(targets)], token_ids, count)
                seq.prompt_logprobs.update(enumerate(read_logprobs(scores, [count] * len(targets)), start))

    def _sample(
        self,
        seqs: abc.Sequence[Sequence],
        last_logits: abc.Sequence[torch.Tensor],
        logits: torch.Tensor,
        mask: Future[BitMask] | None,
    ) -> InFlightStep | None:
        """Sample a token for each of `seqs`, whose tokens are all computed. `last_logits`: theirs, of `logits`."""
        if not seqs:
            return None
        batch = self._batch(seqs)
        if len(logits) != len(seqs):
            logits = torch.cat(list(last_logits))
        sampled = self._sampler(logits, batch.step(None if mask is None else mask.result()))
        if self._async:
            self._executor.share_sampled(sampled.token_ids)
        return start_copy(seqs, batch, sampled)

    def _collect(self, step: InFlightStep) -> list[SequenceOutput]:
        """Read the tokens of a step. Sequences that ended since are passed over."""
        outputs = []
        tokens, logprobs = step.read()
        for seq, index, token, record in zip(step.seqs, step.output_indices, tokens, logprobs, strict=True):
            if seq.done:
                continue
            if self._observer is not None:
                token = self._observer.token(seq.request.request_id, seq.index, token)
            outputs.append(self._output(seq, index, token, record))
        return outputs

    def _output(self, seq: Sequence, index: int, token: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """Fill the placeholder at `index` with its token, end the sequence if it is the last, and return the output."""
        constraint = seq.sampling.constraint
        if token < 0:
            failure = None if constraint is None else constraint.failure
            return self._failed(seq, failure or _NO_TOKEN, evict=True)
        first = index == 0
        seq.fill_placeholder(index, token)
        if constraint is not None:
            constraint.take(token)
            if constraint.failure is not None and not constraint.ended:
                return self._failed(seq, constraint.failure)
        reason, stopped_by = _finish(seq, index + 1, token)
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        if first and seq.wants_prompt_logprobs:
            prompt_logprobs = (None, *(seq.prompt_logprobs[i] for i in range(1, seq.prompt_len)))
        if reason is not None:
            seq.truncate(index + 1)
            self._requests.end(seq)
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            (token,),
            reason,
            stopped_by,
            None if logprobs is None else (logprobs,),
            prompt_logprobs,
            seq.cached_tokens,
            cache_lost=dict(seq.cache_lost.items()) if first else {},
            queued_seconds=seq.queued_seconds if first else 0.0,
        )

    def _failed(self, seq: Sequence, error: str, *, evict: bool = False) -> SequenceOutput:
        """End a sequence that has no next token. `evict`: see `RequestTable.end`."""
        self._requests.end(seq, evict=evict)
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            finish_reason="error",
            cached_tokens=seq.cached_tokens,
            error=error,
        )


def _finish(seq: Sequence, output_len: int, token: int) -> tuple[FinishReason | None, int | None]:
    """Why `token`, number `output_len` of the output, is the last of `seq`, and its stop id; None: it is not."""
    params = seq.request.params
    if output_len > params.min_tokens:
        if token in seq.sampling.stop_ids:
            return "stop", token
        if token in seq.sampling.eos_ids:
            return "stop", None
    if seq.sampling.constraint is not None and seq.sampling.constraint.ended:
        return "stop", None
    return ("length", None) if output_len >= seq.max_output_len else (None, None)


def _step_row(row: Row, num_logits: int, prev_sampled_index: int) -> StepRow:
    """`prev_sampled_index`: where the step before sampled the last token of the sequence, -1 if it did not."""
    seq = row.seq
    ids = tuple(seq.ids[seq.computed : row.end])
    return StepRow(ids, seq.computed, seq.pages, seq.slots, num_logits, prev_sampled_index)
