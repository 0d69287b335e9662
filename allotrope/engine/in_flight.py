"""A step that the device is still busy with: what the host remembers of it, and the reading of what it chose."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from allotrope.engine.sampling_batch import SamplingBatch
from allotrope.engine.sequence import Sequence
from allotrope.ops.logprobs import LogprobsTensors
from allotrope.ops.sampling.spec import Sampled
from allotrope.request import TokenLogprobs


@dataclass(frozen=True)
class Flight:
    """`seqs`: whose tokens were chosen, in the order of the rows. `places`: per sequence, which of its output tokens.

    `chosen`: [n] int64 on the device. `sampled`: the same and its log-probabilities on their way to the host.
    """

    seqs: tuple[Sequence, ...]
    places: tuple[int, ...]
    chosen: torch.Tensor
    batch: SamplingBatch
    sampled: Sampled
    arrived: torch.cuda.Event | None

    @cached_property
    def rows(self) -> dict[Sequence, int]:
        """Per sequence, the row of its token."""
        return {seq: row for row, seq in enumerate(self.seqs)}

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the step and return what it chose, as `SamplingBatch.read` does."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.batch.read(self.sampled)


def send_off(seqs: Many[Sequence], batch: SamplingBatch, sampled: Sampled) -> Flight:
    """Start copying what was sampled to the host, and leave a place for each token in its sequence."""
    places = tuple(seq.leave_place() for seq in seqs)
    if sampled.token_ids.device.type != "cuda":
        return Flight(tuple(seqs), places, sampled.token_ids, batch, sampled, None)
    scores = sampled.scores
    on_host = Sampled(_to_host(sampled.token_ids), None if scores is None else _scores_to_host(scores))
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(sampled.token_ids.device))
    return Flight(tuple(seqs), places, sampled.token_ids, batch, on_host, arrived)


def _scores_to_host(scores: LogprobsTensors) -> LogprobsTensors:
    columns = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
    return replace(scores, **{name: _to_host(getattr(scores, name)) for name in columns})


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
