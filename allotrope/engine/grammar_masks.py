"""The packed masks of the rows that follow grammars: filled on the host while the device runs the forward pass.

Owns how a grammar's mask is combined with the other limits of a row. Must not know how a grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from allotrope.engine.sampling_batch import DraftRow, RowSampling
from allotrope.grammars.backend import pack, words
from allotrope.grammars.constraint import Constraint, fill_masks
from allotrope.ops.token_mask import BitMask
from allotrope.request import NOTHING_ALLOWED


class GrammarMasks:
    """`vocab_size`: V, ids that the logits score. `device`: where tokens are sampled."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._pinned = device.type == "cuda"
        self._thread: ThreadPoolExecutor | None = None

    def start(self, rows: Sequence[RowSampling]) -> Future[BitMask]:
        """Begin to fill the masks of those `rows`, the rows of the logits in order, that have a grammar."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._thread.submit(self.fill, rows)

    def fill(self, rows: Sequence[RowSampling]) -> BitMask:
        """The masks of those `rows` that have a grammar, on the device."""
        held = list(_held(rows))
        mask = torch.empty(len(held), words(self._vocab_size), dtype=torch.int32, pin_memory=self._pinned)
        bits = mask.numpy()
        # An output that has ended is sampled no more, and its matcher has nothing to say.
        live = [(constraint, place) for place, (_, _, constraint) in enumerate(held) if not constraint.ended]
        bits[...] = -1
        fill_masks(live, bits)
        for constraint, place in live:
            _combine(held[place][1], constraint, bits[place], self._vocab_size)
        numbers = torch.tensor([i for i, _, _ in held], dtype=torch.int64, pin_memory=self._pinned)
        return BitMask(*(one.to(self._device, non_blocking=True) for one in (numbers, mask)))

    def close(self) -> None:
        """Let go of the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _held(rows: Sequence[RowSampling]) -> Iterator[tuple[int, RowSampling, Constraint]]:
    """Index, row and constraint of the rows with a grammar. Behind drafts, which follow their sequence's own row, what
    holds if these are accepted; no row is sampled for good behind one that the grammar does not allow."""
    last: Constraint | None = None
    for i, row in enumerate(rows):
        if row.constraint is None:
            continue
        if isinstance(row, DraftRow):
            assert last is not None
            row.constraint = last.after(row.row.drafts[row.count - 1])
        last = row.constraint
        yield i, row, last


def _combine(row: RowSampling, constraint: Constraint, bits: NDArray[np.int32], vocab_size: int) -> None:
    """Take from `bits` [W] what the row's request forbids beside its grammar. Where only an end may follow, it may."""
    if constraint.complete:
        return
    if row.params.ignore_eos:
        bits &= ~constraint.of.ends
    if row.params.allowed_token_ids is not None:
        bits &= row.allowed_bits(vocab_size)
        if not bits.any() and constraint.failure is None:
            constraint.stop(NOTHING_ALLOWED)
    if row.num_output < row.params.min_tokens:
        kept = bits & ~pack(row.ends[row.ends < vocab_size], vocab_size)
        if kept.any():
            bits[...] = kept
