"""Everything about a step that follows from positions and page tables: built once, shared by all layers of one kind.

Three things are planned: where rows, states and entries are written; which states each closing entry pools; and which
rows each query reads. A step is cut into `SubBatch`es: b requests with q queries each that read L rows.
Decoding requests of similar length share a part; a prefill is cut into blocks of queries. Queries that see more entries
than the indexer picks have lists of their own: one part row each, its entries filled in by each layer's contest.
A row that a request lacks is row 0 of its pool, which is never written and holds zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.csa.rotary import rotation_at
from allotrope.attention.csa.rows import put
from allotrope.attention.csa.spec import CsaSpec
from allotrope.ops.rope import Rotation

Tokens = slice | torch.Tensor

# Queries of one prefill that share the rows they read: a larger block reads more rows before each query's window.
QUERY_BLOCK = 64
# Elements that one part may gather (queries with lists of their own) or score (contests).
GATHER_BUDGET = SCORE_BUDGET = 1 << 24


@dataclass(frozen=True)
class Writes:
    """`rows`: [n] rows of a pool. `tokens`: [n] tokens whose rows go there; None is all of the step's, in order."""

    rows: torch.Tensor
    tokens: torch.Tensor | None

    def put(self, pool: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` [tokens, ...], in the pool's type, to `pool` [P, S, ...]."""
        chosen = values if self.tokens is None else values[self.tokens]
        put(pool, self.rows, chosen.to(pool.dtype))


@dataclass(frozen=True)
class ClosedBlocks:
    """The E entries that close in this step.

    `kvs`, `scores`: [E, K], where the kv and the score of each pooled token lie in the state pool, seen as rows of one
    stream. `bias`: [E, K, 1], -inf before the first token, else 0. `writes`: where the entries go. `rotation`: at the
    first token that each entry owns.
    """

    kv_rows: torch.Tensor
    scores: torch.Tensor
    bias: torch.Tensor
    writes: Writes
    rotation: Rotation


@dataclass(frozen=True)
class CompressorPlan:
    """One compressor's step. `phase`: [T] position mod ratio. `saves`: where states go. `closing`: None if none is."""

    phase: torch.Tensor
    state_writes: Writes
    closed: ClosedBlocks | None


@dataclass(frozen=True)
class SubBatch:
    """b requests with q queries each, request after request.

    `tokens`: the b * q tokens. `window_rows`: [b, Lw] rows of the window cache. `entry_rows`: [b, N] rows of the
    compressed cache; None stands for the picks of the tokens (q is 1). `bias`: [b, q, Lw + N], 0 where a row is seen,
    else -inf.
    """

    tokens: Tokens
    queries: int
    window_rows: torch.Tensor
    compressed_rows: torch.Tensor | None
    bias: torch.Tensor


@dataclass(frozen=True)
class ScoreChunk:
    """b requests with q queries each whose N entries are scored.

    `tokens`: the b * q tokens. `key_rows`, `entry_rows`: [b, N] rows of the index and of the compressed cache. `bias`:
    [b, q, N], 0 where an entry is seen, else -inf.
    """

    tokens: Tokens
    queries: int
    key_rows: torch.Tensor
    compressed_rows: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class CsaPlan:
    """`rotation`: of each token. The rest as named above."""

    rotation: Rotation
    window: Writes
    compressor: CompressorPlan | None
    index_compressor: CompressorPlan | None
    sub_batches: tuple[SubBatch, ...]
    chunks: tuple[ScoreChunk, ...]


@dataclass(frozen=True)
class _Queries:
    """b * q queries in the making: `requests` [b], and `seen` [b, q] tokens that each query sees, its own included."""

    tokens: Tokens
    requests: torch.Tensor
    seen: torch.Tensor


def build_plan(spec: CsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CsaPlan:
    """Plan one step for every layer that has `spec`. `index` has an entry for each of the spec's caches."""
    paged = {name: _paged(entry) for name, entry in index.items()}
    every = torch.ones_like(batch.positions, dtype=torch.bool)
    compressor = _compressor_plan(spec, batch, paged["state"], paged["compressed"]) if spec.ratio else None
    index_compressor = _compressor_plan(spec, batch, paged["index_state"], paged["index"]) if spec.indexer else None
    return CsaPlan(
        rotation=rotation_at(spec.rope, batch.positions),
        window=_writes(paged["window"].slots, 1, every),
        compressor=compressor,
        index_compressor=index_compressor,
        sub_batches=(*_decode_sub_batches(spec, batch, paged), *_prefill_sub_batches(spec, batch, paged)),
        chunks=(*_decode_chunks(spec, batch, paged), *_prefill_chunks(spec, batch, paged)),
    )


def _paged(entry: CacheIndex) -> PageIndex:
    assert isinstance(entry, PageIndex)
    return entry


def _writes(slots: torch.Tensor, stride: int, wanted: torch.Tensor) -> Writes:
    """The `wanted` [T] tokens that have a slot. `stride`: tokens per row."""
    kept = wanted & (slots >= 0)
    if bool(kept.all()):
        return Writes(slots // stride, None)
    tokens = kept.nonzero().squeeze(1)
    return Writes(slots[tokens] // stride, tokens)


def _compressor_plan(spec: CsaSpec, batch: BatchLayout, state: PageIndex, entries: PageIndex) -> CompressorPlan:
    position = batch.positions
    every = torch.ones_like(position, dtype=torch.bool)
    phase = position % spec.ratio
    state_writes = _writes(state.slots, 1, every)
    writes = _writes(entries.slots, spec.ratio, phase == spec.ratio - 1)
    closing = torch.arange(len(position), device=batch.device) if writes.tokens is None else writes.tokens
    if not len(closing):
        return CompressorPlan(phase, state_writes, None)
    size = spec.streams * spec.ratio
    member = torch.arange(size, device=batch.device)
    pooled = position[closing, None] - (size - 1) + member
    rows = _rows(state, state.table[batch.request_of_token[closing]], pooled, pooled >= 0, 1)
    bias = torch.zeros(pooled.shape, dtype=torch.float32, device=batch.device).masked_fill_(pooled < 0, -torch.inf)
    first = position[closing] // spec.ratio * spec.ratio
    # A state row is [kv streams | score streams].
    kv_rows = rows * (2 * spec.streams) + member // spec.ratio
    # Entries are computed in the order in which they are written, so that all of them are taken.
    where = Writes(writes.rows, None)
    return CompressorPlan(
        phase,
        state_writes,
        ClosedBlocks(kv_rows, kv_rows + spec.streams, bias[..., None], where, rotation_at(spec.rope, first)),
    )


def _rows(
    paged: PageIndex, table: torch.Tensor, position: torch.Tensor, inside: torch.Tensor, stride: int
) -> torch.Tensor:
    """[b, L] pool row that holds token `position` [b, L]; row 0 where it is not `inside` the request."""
    run = (position // paged.page_size).clamp(min=0, max=table.shape[1] - 1)
    page = table.gather(1, run)
    rows = page * (paged.page_size // stride) + position % paged.page_size // stride
    return torch.where(inside & (page >= 0), rows, 0)


def _selects(spec: CsaSpec, seen: int) -> bool:
    """Whether a query that sees `seen` tokens has more entries than it may attend to."""
    return spec.indexer is not None and spec.visible_entries(seen) > spec.indexer.topk


def _padded(length: int) -> int:
    """Width that `length` rows are padded to: at most an eighth more, so that widths are few."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def _decodes(batch: BatchLayout, members: list[int]) -> _Queries:
    contiguous = members[-1] - members[0] + 1 == len(members)
    requests = torch.tensor(members, device=batch.device)
    tokens = slice(members[0], members[-1] + 1) if contiguous else requests
    seen = torch.tensor([[batch.seq_lens[b]] for b in members], device=batch.device)
    return _Queries(tokens, requests, seen)


def _block(batch: BatchLayout, request: int, begin: int, end: int, *, alone: bool) -> _Queries:
    """Queries at positions `begin` to `end` of one request: its only row of queries, or each a row of its own."""
    token = batch.query_start[request] - batch.context_lens[request]
    seen = torch.arange(begin + 1, end + 1, device=batch.device)
    rows = seen[:, None] if alone else seen[None]
    requests = torch.full((len(rows),), request, device=batch.device)
    return _Queries(slice(token + begin, token + end), requests, rows)


def _decode_sub_batches(spec: CsaSpec, batch: BatchLayout, paged: Mapping[str, PageIndex]) -> Iterator[SubBatch]:
    groups: dict[tuple[int, int | None], list[int]] = {}
    for b, n in enumerate(batch.seq_lens[: batch.num_decodes]):
        entries = None if _selects(spec, n) else _padded(spec.visible_entries(n))
        groups.setdefault((_padded(min(n, spec.window)), entries), []).append(b)
    for (width, entries), members in groups.items():
        yield _sub_batch(spec, paged, _decodes(batch, members), width, entries)


def _prefill_sub_batches(spec: CsaSpec, batch: BatchLayout, paged: Mapping[str, PageIndex]) -> Iterator[SubBatch]:
    for b in range(batch.num_decodes, batch.num_requests):
        context, end = batch.context_lens[b], batch.seq_lens[b]
        border = _first_sparse(spec, context, end)
        for begin in range(context, border, QUERY_BLOCK):
            stop = min(begin + QUERY_BLOCK, border)
            width = stop - max(0, begin + 1 - spec.window)
            yield _sub_batch(spec, paged, _block(batch, b, begin, stop, alone=False), width, spec.visible_entries(stop))
        topk_indices = spec.indexer.topk if spec.indexer else 0
        step = max(1, GATHER_BUDGET // ((spec.window + topk_indices) * spec.head_dim))
        for begin in range(border, end, step):
            stop = min(begin + step, end)
            width = min(stop, spec.window)
            yield _sub_batch(spec, paged, _block(batch, b, begin, stop, alone=True), width, None)


def _first_sparse(spec: CsaSpec, begin: int, end: int) -> int:
    """The first position from `begin` on whose query has to pick, or `end`."""
    if spec.indexer is None:
        return end
    return min(end, max(begin, (spec.indexer.topk + 1) * spec.ratio - 1))


def _sub_batch(
    spec: CsaSpec, paged: Mapping[str, PageIndex], queries: _Queries, width: int, entries: int | None
) -> SubBatch:
    """`width`: window rows to read. `entries`: compressed rows to read, from the first; None for each layer's picks."""
    seen, window = queries.seen, paged["window"]
    first = (seen[:, :1] - spec.window).clamp(min=0)
    key = first + torch.arange(width, device=seen.device)
    window_rows = _rows(window, window.table[queries.requests], key, key < seen[:, -1:], 1)
    hidden = (key[:, None] >= seen[..., None]) | (key[:, None] < seen[..., None] - spec.window)
    compressed_rows = None
    if entries is None:
        assert spec.indexer is not None
        hidden = torch.nn.functional.pad(hidden, (0, spec.indexer.topk))
    elif entries:
        compressed_rows, unseen = _entries(spec, paged["compressed"], queries, entries)
        hidden = torch.cat((hidden, unseen), dim=-1)
    else:
        compressed_rows = window_rows[:, :0]
    return SubBatch(queries.tokens, seen.shape[1], window_rows, compressed_rows, _bias(hidden))


def _entries(spec: CsaSpec, paged: PageIndex, queries: _Queries, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, N] rows of the first `count` entries of each request, and [b, q, N] whether a query does not see them."""
    visible = queries.seen // spec.ratio
    entry = torch.arange(count, device=visible.device).expand(len(visible), -1)
    rows = _rows(paged, paged.table[queries.requests], entry * spec.ratio, entry < visible[:, -1:], spec.ratio)
    return rows, entry[:, None] >= visible[..., None]


def _bias(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _decode_chunks(spec: CsaSpec, batch: BatchLayout, paged: Mapping[str, PageIndex]) -> Iterator[ScoreChunk]:
    groups: dict[int, list[int]] = {}
    for b, n in enumerate(batch.seq_lens[: batch.num_decodes]):
        if _selects(spec, n):
            groups.setdefault(_padded(spec.visible_entries(n)), []).append(b)
    for count, members in groups.items():
        yield _score_chunk(spec, paged, _decodes(batch, members), count)


def _prefill_chunks(spec: CsaSpec, batch: BatchLayout, paged: Mapping[str, PageIndex]) -> Iterator[ScoreChunk]:
    if spec.indexer is None:
        return
    for b in range(batch.num_decodes, batch.num_requests):
        end = batch.seq_lens[b]
        step = max(1, SCORE_BUDGET // (spec.indexer.num_heads * max(1, spec.visible_entries(end))))
        for begin in range(_first_sparse(spec, batch.context_lens[b], end), end, step):
            stop = min(begin + step, end)
            yield _score_chunk(spec, paged, _block(batch, b, begin, stop, alone=False), spec.visible_entries(stop))


def _score_chunk(spec: CsaSpec, paged: Mapping[str, PageIndex], queries: _Queries, count: int) -> ScoreChunk:
    key_rows, unseen = _entries(spec, paged["index"], queries, count)
    compressed_rows, _ = _entries(spec, paged["compressed"], queries, count)
    return ScoreChunk(queries.tokens, queries.seen.shape[1], key_rows, compressed_rows, _bias(unseen))
