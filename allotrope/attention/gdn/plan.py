"""Which requests advance together: built on the host once a step, shared by all layers.

A step becomes `SubBatch`es: b requests with L new tokens each. All requests of a sub-batch have equally many new
tokens, so nothing is padded. Small recurrent states advance together. Large states advance one by one in place, which
is faster than gathering them. A long prefill becomes several sub-batches in order, which pass the state on in its slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, SlotIndex
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.attention.gdn.verify import VerifyPlan, holds_drafts, plan_verify

# Tokens of one sub-batch, a multiple of the chunked form's chunk: bounds the memory of a prefill.
PART_TOKENS = 256
# Bytes of recurrent state that advance together: more would not stay in the processor's cache.
TOGETHER_BYTES = 1 << 20

Slots = slice | torch.Tensor


@dataclass(frozen=True)
class SubBatch:
    """b requests with `length` new tokens each, request after request.

    `tokens`: the b * length tokens, a slice or an index into the batch. `slots`: the b slots. `states`: slices of the b
    requests whose recurrent states advance together, each with its slots.
    """

    tokens: slice | torch.Tensor
    length: int
    slots: Slots
    states: tuple[tuple[slice, Slots], ...]


@dataclass(frozen=True)
class GdnPlan:
    """`fresh`: [F] slots of requests at position 0, whose bytes are stale and must be cleared first; None if there are
    none. `complete`: every token is planned; the output of other tokens is zero. `verify`: in a step with drafts, its
    decodes; the sub-batches are then those of its prompts."""

    fresh: torch.Tensor | None
    complete: bool
    sub_batches: tuple[SubBatch, ...]
    verify: VerifyPlan | None = None


def build_plan(spec: GdnSpec, batch: BatchLayout, index: Mapping[str, CacheIndex], first: int = 0) -> GdnPlan:
    """Plan one step. `index` has the entry "state"; requests whose slot is 0 or less are padding and left out.

    `first`: the requests before this one are left out too.
    """
    where = index["state"]
    assert isinstance(where, SlotIndex)
    slots = where.slots.tolist()
    real = [b for b in range(first, batch.num_requests) if slots[b] > 0]
    complete = len(real) == batch.num_requests - first
    verify = plan_verify(batch, slots) if first < batch.num_decodes and holds_drafts(spec, batch) else None
    if verify is not None:
        real = [b for b in real if b >= batch.num_decodes]
    fresh = [slots[b] for b in real if batch.context_lens[b] == 0]
    return GdnPlan(
        torch.tensor(fresh, device=batch.device) if fresh else None,
        complete,
        tuple(_sub_batches(batch, slots, real, max(1, TOGETHER_BYTES // spec.state_bytes))),
        verify,
    )


def _sub_batches(batch: BatchLayout, slots: Sequence[int], real: Sequence[int], together: int) -> Iterator[SubBatch]:
    buckets: dict[tuple[int, int], list[int]] = {}
    for b in real:
        for begin in range(0, batch.query_lens[b], PART_TOKENS):
            buckets.setdefault((begin, min(PART_TOKENS, batch.query_lens[b] - begin)), []).append(b)
    for (begin, length), bucket in sorted(buckets.items()):
        for members in _runs(bucket, max(1, PART_TOKENS // length)):
            member_slots = [slots[b] for b in members]
            yield SubBatch(
                _rows([batch.query_start[b] + begin for b in members], length, batch.device),
                length,
                _rows(member_slots, 1, batch.device),
                tuple(
                    (slice(at, at + together), _rows(run, 1, batch.device))
                    for at, run in zip(
                        range(0, len(member_slots), together), _runs(member_slots, together), strict=True
                    )
                ),
            )


def _runs(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _rows(first: Sequence[int], length: int, device: torch.device) -> slice | torch.Tensor:
    """`length` consecutive indices from each of `first`; a slice where all are consecutive."""
    if all(later - earlier == length for earlier, later in pairwise(first)):
        return slice(first[0], first[-1] + length)
    return (torch.tensor(first, device=device)[:, None] + torch.arange(length, device=device)).flatten()
