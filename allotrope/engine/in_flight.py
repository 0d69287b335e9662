"""The in-flight step: the host's record of a step that the device still runs, and the reading of its tokens."""

from __future__ import annotations

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
    """`seqs`: the sequences that were sampled, in the order of the logits rows. `output_indices`: per sequence, the
    index of its placeholder token in the output. `drafts`: per sequence, the drafts whose rows follow its own, which
    may be placeholders for those at `draft_indices` of what a draft model drafted.

    `prev_sampled`: [n] int64 on the device. `sampled`: the same tokens and their log-probabilities on their way to the
    host. `logits`: per sequence, those that it was sampled from, where an observer wants them.
    """

    seqs: tuple[Sequence, ...]
    output_indices: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...]
    draft_indices: tuple[tuple[int, ...], ...]
    prev_sampled: torch.Tensor
    batch: SamplingBatch
    sampled: Sampled
    copied: torch.cuda.Event | None
    logits: tuple[torch.Tensor, ...] | None = None

    @cached_property
    def row_of(self) -> dict[Sequence, int]:
        """Per sequence, the row of its token in `prev_sampled`, where none has drafts."""
        return {seq: row for row, seq in enumerate(self.seqs)}

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the step and return its tokens, as `SamplingBatch.read` does."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.batch.read(self.sampled)


class HostCopy:
    """Integers on their way from the device to the host. `since`: an event; the copy tells the seconds from it on."""

    def __init__(self, values: torch.Tensor, since: torch.cuda.Event | None) -> None:
        self._since, self._copied = since, None
        self._values = values
        if values.device.type == "cuda":
            self._values = _to_host(values)
            self._copied = torch.cuda.Event(enable_timing=since is not None)
            self._copied.record(torch.cuda.current_stream(values.device))

    @cached_property
    def numbers(self) -> list[int]:
        """The integers. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[int] = self._values.tolist()
        return numbers

    @property
    def seconds(self) -> float:
        """Seconds of the device from `since` to the copy; 0 where that is not known yet."""
        if self._since is None or self._copied is None or not self._copied.query():
            return 0.0
        return self._since.elapsed_time(self._copied) / 1e3


def start_copy(rows: abc.Sequence[Row], batch: SamplingBatch, sampled: Sampled) -> InFlightStep:
    """Start copying the sampled tokens to the host, and append a placeholder token to each sequence."""
    seqs = tuple(row.seq for row in rows)
    drafts = tuple(row.drafts for row in rows), tuple(row.draft_indices for row in rows)
    indices = tuple(seq.append_placeholder() for seq in seqs)
    if sampled.token_ids.device.type != "cuda":
        return InFlightStep(seqs, indices, *drafts, sampled.token_ids, batch, sampled, None)
    scores = sampled.scores
    on_host = Sampled(_to_host(sampled.token_ids), None if scores is None else _scores_to_host(scores))
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(sampled.token_ids.device))
    return InFlightStep(seqs, indices, *drafts, sampled.token_ids, batch, on_host, copied)


def _scores_to_host(scores: LogprobsTensors) -> LogprobsTensors:
    columns = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
    return replace(scores, **{name: _to_host(getattr(scores, name)) for name in columns})


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
