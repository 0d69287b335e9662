"""The in-flight step: the host's record of a step that the device still runs, and the reading of its tokens."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from allotrope.engine.sampling_batch import SamplingBatch
from allotrope.engine.scheduler import Row
from allotrope.engine.sequence import Sequence
from allotrope.ops.logprobs import LogprobsTensors
from allotrope.ops.sampling.spec import Sampled
from allotrope.request import TokenLogprobs


@dataclass(frozen=True)
class InFlightStep:
    """`seqs`: the sequences that were sampled, in the order of the logits rows. `drafts`: per sequence, the drafts that
    were verified, whose rows follow its own; placeholders among them stand for `draft_tokens` at `draft_indices`.
    `forced`: per sequence, the number of drafts to accept whatever they are; None: those that are right.

    `prev_sampled`: [n] int64 on the device. `sampled`: the same tokens and their log-probabilities on their way to the
    host. `logits`: per sequence, those that it was sampled from, where an observer wants them. `accepted`: with a draft
    model, [S] on the device, accepted drafts of each sequence. `rows`: of the step, where all have one token, else 0.
    """

    seqs: tuple[Sequence, ...]
    drafts: tuple[tuple[int, ...], ...]
    draft_indices: tuple[tuple[int, ...], ...]
    prev_sampled: torch.Tensor
    batch: SamplingBatch
    sampled: Sampled
    copied: torch.cuda.Event | None
    logits: tuple[torch.Tensor, ...] | None = None
    forced: tuple[int | None, ...] = ()
    draft_tokens: HostCopy | None = None
    accepted: torch.Tensor | None = None
    rows: int = 0

    @cached_property
    def row_of(self) -> dict[Sequence, int]:
        """The index of each sequence in `seqs`. Without drafts it is the index of its token in `prev_sampled`; with a
        draft model, that of its last token in `DraftedTokens.next_tokens`."""
        return {seq: row for row, seq in enumerate(self.seqs)}

    @cached_property
    def verifies(self) -> bool:
        """Whether any sequence has drafts."""
        return any(self.drafts)

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the step and return its tokens, as `SamplingBatch.read` does."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.batch.read(self.sampled)


class HostCopy:
    """What `passes` passes of a draft model made, on its way to the host. `since`: when they began: an event of a GPU,
    seconds of a CPU."""

    def __init__(self, values: torch.Tensor, since: torch.cuda.Event | float, passes: int) -> None:
        self.passes, self._since, self._copied = passes, since, None
        self._until = time.perf_counter()
        self._values = values
        if values.device.type == "cuda":
            self._values = _to_host(values)
            self._copied = torch.cuda.Event(enable_timing=True)
            self._copied.record(torch.cuda.current_stream(values.device))

    @cached_property
    def numbers(self) -> list[int]:
        """The integers. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[int] = self._values.tolist()
        return numbers

    def at(self, indices: abc.Sequence[int]) -> tuple[int, ...]:
        """The integers at `indices`. Waits for the device."""
        numbers = self.numbers
        return tuple([numbers[i] for i in indices])

    @property
    def seconds(self) -> float:
        """Seconds from `since` to the copy. Waits for the device."""
        if isinstance(self._since, float):
            return self._until - self._since
        assert self._copied is not None
        self._copied.synchronize()
        return self._since.elapsed_time(self._copied) / 1e3


def start_copy(rows: abc.Sequence[Row], batch: SamplingBatch, sampled: Sampled) -> InFlightStep:
    """Start copying the sampled tokens to the host, and append a placeholder token to each sequence."""
    seqs = tuple(row.seq for row in rows)
    drafts = tuple(row.drafts for row in rows), tuple(row.draft_indices for row in rows)
    for seq in seqs:
        seq.append_placeholder()
    if sampled.token_ids.device.type != "cuda":
        return InFlightStep(seqs, *drafts, sampled.token_ids, batch, sampled, None)
    scores = sampled.scores
    on_host = Sampled(_to_host(sampled.token_ids), None if scores is None else _scores_to_host(scores))
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(sampled.token_ids.device))
    return InFlightStep(seqs, *drafts, sampled.token_ids, batch, on_host, copied)


def _scores_to_host(scores: LogprobsTensors) -> LogprobsTensors:
    columns = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
    return replace(scores, **{name: _to_host(getattr(scores, name)) for name in columns})


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
