"""The in-flight step: the host's record of a step that the device still runs, and the reading of its tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from allotrope.engine.sampling_batch import SamplingBatch
from allotrope.engine.sequence import Sequence
from allotrope.ops.logprobs.reference import TokenScores
from allotrope.ops.sampling.reference import Sampled
from allotrope.request import TokenLogprobs


@dataclass(frozen=True)
class InFlightStep:
    """`seqs`: the sequences that were sampled, in the order of the logits rows. `output_indices`: per sequence, the
    index of its placeholder token in the output.

    `prev_sampled`: [n] int64 on the device. `sampled`: the same tokens and their log-probabilities on their way to the
    host.
    """

    seqs: tuple[Sequence, ...]
    output_indices: tuple[int, ...]
    prev_sampled: torch.Tensor
    batch: SamplingBatch
    sampled: Sampled
    copied: torch.cuda.Event | None

    @cached_property
    def row_of(self) -> dict[Sequence, int]:
        """Per sequence, the row of its token in `prev_sampled`."""
        return {seq: row for row, seq in enumerate(self.seqs)}

    def read(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the step and return its tokens, as `SamplingBatch.read` does."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.batch.read(self.sampled)


def start_copy(seqs: Many[Sequence], batch: SamplingBatch, sampled: Sampled) -> InFlightStep:
    """Start copying the sampled tokens to the host, and append a placeholder token to each sequence."""
    indices = tuple(seq.append_placeholder() for seq in seqs)
    if sampled.token_ids.device.type != "cuda":
        return InFlightStep(tuple(seqs), indices, sampled.token_ids, batch, sampled, None)
    scores = sampled.scores
    on_host = Sampled(_to_host(sampled.token_ids), None if scores is None else _scores_to_host(scores))
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(sampled.token_ids.device))
    return InFlightStep(tuple(seqs), indices, sampled.token_ids, batch, on_host, copied)


def _scores_to_host(scores: TokenScores) -> TokenScores:
    columns = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
    return replace(scores, **{name: _to_host(getattr(scores, name)) for name in columns})


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
