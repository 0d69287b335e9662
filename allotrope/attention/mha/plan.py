"""Which cache entries each query of a step reads: built on the host once, shared by all layers of one window.

A step becomes a few `SubBatch`es: b requests, each with q query tokens that read L cache entries. Decoding requests of
similar length share a sub-batch. A prefill is cut into blocks of queries, so that neither a score matrix nor the keys
before the window are ever held whole. A request's own lengths alone decide its sub-batch, and entries of other requests
are never read. So a result depends only on its own request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.mha.spec import MhaSpec

# Queries of one prefill that are scored together: bounds the score matrix to QUERY_BLOCK x L per head.
QUERY_BLOCK = 512


@dataclass(eq=False)
class SubBatch:
    """b requests with q queries each, request after request.

    `tokens`: the b * q tokens, a slice or an index into the batch. `rows`: [b, L] int64 rows of the pool, filled up
    with row 0, which is never written and holds zeros. `visible`: [b, q, L] bool, or None where query i sees the first
    L - q + i + 1 keys.
    """

    tokens: slice | torch.Tensor
    queries: int
    rows: torch.Tensor
    visible: torch.Tensor | None
    _bias: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, repr=False)
    _block_bias: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def flat_rows(self) -> torch.Tensor:
        """[b * L] `rows`, request after request."""
        return self.rows.flatten()

    @cached_property
    def contiguous(self) -> slice | None:
        """The rows as a slice of the pool, where one request on a CPU has consecutive rows: the slice needs no copy."""
        if len(self.rows) > 1 or self.rows.device.type != "cpu":
            return None
        first, length = int(self.rows[0, 0]), self.rows.shape[1]
        contiguous = torch.arange(first, first + length)
        return slice(first, first + length) if torch.equal(self.rows[0], contiguous) else None

    def block_bias(self, start: int, size: int, repeat: int, dtype: torch.dtype) -> torch.Tensor:
        """`bias` of `size` queries from `start`, once for each of `repeat` heads: [b or 1, 1, repeat * size, K].

        Where `visible` is None, K stops at the last key that any of them sees. All layers share the result.
        """
        key = (start, size, repeat, dtype)
        if key not in self._block_bias:
            if self.visible is not None:
                block = self.bias(dtype)[:, start : start + size]
            else:
                kv_len = self.rows.shape[1] - self.queries + start + size
                block = torch.full((1, size, kv_len), -torch.inf, dtype=dtype, device=self.rows.device)
                block.triu_(kv_len - size + 1)
            self._block_bias[key] = block.repeat(1, repeat, 1)[:, None]
        return self._block_bias[key]

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """The mask `visible` as a bias of logits: [b, q, L] of `dtype`, 0 or -inf. All layers share the result."""
        if dtype not in self._bias:
            assert self.visible is not None
            zeros = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._bias[dtype] = zeros.masked_fill_(~self.visible, -torch.inf)
        return self._bias[dtype]


@dataclass(frozen=True)
class MhaPlan:
    """`slots`: the pool row of each written token. `writes`: the tokens that are written; None means all."""

    slots: torch.Tensor
    writes: torch.Tensor | None
    sub_batches: tuple[SubBatch, ...]


def build_plan(spec: MhaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> MhaPlan:
    """Plan one step for every layer that has `spec`'s window. `index` has the entry "kv"."""
    paged = index["kv"]
    assert isinstance(paged, PageIndex)
    sub_batches = (*_decode_sub_batches(spec.window, batch, paged), *prefill_sub_batches(spec.window, batch, paged))
    return plan_of(paged, sub_batches)


def plan_of(paged: PageIndex, sub_batches: tuple[SubBatch, ...]) -> MhaPlan:
    """The plan that writes the tokens with a slot, and reads by `sub_batches`."""
    kept = paged.slots >= 0
    writes = None if bool(kept.all()) else kept.nonzero().squeeze(1)
    return MhaPlan(paged.slots if writes is None else paged.slots[writes], writes, sub_batches)


def _decode_sub_batches(window: int | None, batch: BatchLayout, paged: PageIndex) -> Iterator[SubBatch]:
    buckets: dict[int, list[int]] = {}
    for b, n in enumerate(batch.seq_lens[: batch.num_decodes]):
        buckets.setdefault(_padded(n if window is None else min(n, window)), []).append(b)
    for length, members in buckets.items():
        if len(members) == 1:
            yield _single(members[0], window, batch, paged)
            continue
        contiguous = members[-1] - members[0] + 1 == len(members)
        tokens = slice(members[0], members[-1] + 1) if contiguous else torch.tensor(members, device=batch.device)
        kv_len = torch.tensor([batch.seq_lens[b] for b in members], device=batch.device)[:, None]
        first = (kv_len - length).clamp(min=0) if window is not None else torch.zeros_like(kv_len)
        key = first + torch.arange(length, device=batch.device)
        yield SubBatch(tokens, 1, _rows(paged, paged.table[tokens], key, key < kv_len), _visible(key, kv_len, window))


def _single(b: int, window: int | None, batch: BatchLayout, paged: PageIndex) -> SubBatch:
    """The sub-batch of one decoding request: it has no padding, and so no mask."""
    kv_len = batch.seq_lens[b]
    key = torch.arange(0 if window is None else max(0, kv_len - window), kv_len, device=batch.device)[None]
    rows = _rows(paged, paged.table[b : b + 1], key, torch.ones_like(key, dtype=torch.bool))
    return SubBatch(slice(b, b + 1), 1, rows, None)


def _padded(length: int) -> int:
    """The padded number of a decoding request's `length` keys: at most an eighth more, so that few widths occur."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def prefill_sub_batches(window: int | None, batch: BatchLayout, paged: PageIndex) -> Iterator[SubBatch]:
    """Sub-batches of the requests with more than one new token."""
    for b, equal_shapes in _equal_shapes(batch):
        context, token = batch.context_lens[b], batch.query_start[b]
        for begin in range(0, batch.query_lens[b], QUERY_BLOCK):
            queries = min(QUERY_BLOCK, batch.query_lens[b] - begin)
            kv_len = torch.arange(context + begin + 1, context + begin + queries + 1, device=batch.device)[None]
            last = context + begin + queries
            first = 0 if window is None else max(0, context + begin + 1 - window)
            key = torch.arange(first, last, device=batch.device)[None]
            plain = window is None or window >= last - first
            visible = None if plain else _visible(key, kv_len, window)
            table = paged.table[b : b + equal_shapes]
            rows = _rows(paged, table, key.expand(equal_shapes, -1), torch.ones_like(key, dtype=torch.bool))
            yield SubBatch(slice(token + begin, token + begin + equal_shapes * queries), queries, rows, visible)


def _equal_shapes(batch: BatchLayout) -> Iterator[tuple[int, int]]:
    """Groups of neighbouring prompts of equal context and length that fit into one block: (first request, count)."""
    b = batch.num_decodes
    while b < batch.num_requests:
        shape = (batch.context_lens[b], batch.query_lens[b])
        end = b + 1
        while (
            shape[1] <= QUERY_BLOCK
            and end < batch.num_requests
            and (batch.context_lens[end], batch.query_lens[end]) == shape
        ):
            end += 1
        yield b, end - b
        b = end


def _rows(paged: PageIndex, table: torch.Tensor, key: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """[b, L] pool row of key position `key` [b, L]; row 0 outside of the request, where `inside` is False."""
    page = table.gather(1, (key // paged.page_size).clamp(max=table.shape[1] - 1))
    return torch.where(inside & (page >= 0), page * paged.page_size + key % paged.page_size, 0)


def _visible(key: torch.Tensor, kv_len: torch.Tensor, window: int | None) -> torch.Tensor:
    """[b, q, L]: whether key position `key` [b, L] is below `kv_len` [b, q] and in the window that ends there."""
    mask = key[:, None, :] < kv_len[:, :, None]
    if window is not None:
        mask &= key[:, None, :] >= kv_len[:, :, None] - window
    return mask
