"""The plan of a step from positions and page tables: built once, shared by all layers of equal spec.

It has three parts: the rows that window entries, compressor states and compressed entries are written to; the states
that each closed block pools; and the entries that each query reads. A step becomes `SubBatch`es: b requests with q
queries each that read L entries. Decoding requests of similar length share a sub-batch; a prefill is cut into blocks of
queries. A query that sees more compressed entries than the top-k has sparse indices of its own: each layer's indexer
computes them. Lists of rows are filled up with row 0 of the pool, which is never written and holds zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex
from allotrope.attention.csa.rotary import rotation_at
from allotrope.attention.csa.rows import put
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.dsa.sharing import SharedQueries, share
from allotrope.attention.mla.plan import Span
from allotrope.ops.rope import Rotation

Tokens = slice | torch.Tensor

# Queries of one prefill that share the entries they read: a larger block reads more entries before each query's window.
QUERY_BLOCK = 64
# Elements that one sub-batch may gather (queries with sparse indices) or one chunk may score.
GATHER_BUDGET = SCORE_BUDGET = 1 << 24
# Queries of a prompt that one of the ranks which share it scores together.
SHARED_BLOCK = 1024


@dataclass(frozen=True)
class Writes:
    """`rows`: [n] rows of a pool. `tokens`: [n] tokens that are written there; None is all of the step's, in order."""

    rows: torch.Tensor
    tokens: torch.Tensor | None

    def put(self, pool: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` [tokens, ...], in the pool's type, to `pool` [P, S, ...]."""
        values = values if self.tokens is None else values[self.tokens]
        put(pool, self.rows, values.to(pool.dtype))


@dataclass(frozen=True)
class ClosedBlocks:
    """The E blocks whose boundary is in this step: each becomes one compressed entry.

    `kv_rows`, `scores`: [E, K] rows of each pooled token's kv and score in the state pool, viewed by streams.
    `bias`: [E, K, 1], -inf before the first token, else 0. `writes`: of the compressed entries. `rotation`: at the
    first token of each block.
    """

    kv_rows: torch.Tensor
    scores: torch.Tensor
    bias: torch.Tensor
    writes: Writes
    rotation: Rotation


@dataclass(frozen=True)
class CompressorPlan:
    """One compressor's step. `phase`: [T] position mod ratio. `state_writes`: of the tokens' states. `closed`: None if
    the step has no block boundary."""

    phase: torch.Tensor
    state_writes: Writes
    closed: ClosedBlocks | None


@dataclass(frozen=True)
class SubBatch:
    """b requests with q queries each, request after request.

    `tokens`: the b * q tokens. `window_rows`: [b, Lw] rows of the window cache. `compressed_rows`: [b, N] rows of the
    compressed cache; None where each token has sparse indices (q is 1). `bias`: [b, q, Lw + N], 0 where a row is
    visible, else -inf.
    """

    tokens: Tokens
    queries: int
    window_rows: torch.Tensor
    compressed_rows: torch.Tensor | None
    bias: torch.Tensor


@dataclass(frozen=True)
class ScoreChunk:
    """b requests with q queries each that are scored against N compressed entries.

    `tokens`: the b * q tokens. `key_rows`, `compressed_rows`: [b, N] rows of the index and of the compressed cache.
    `bias`: [b, q, N], 0 where an entry is visible, else -inf.
    """

    tokens: Tokens
    queries: int
    key_rows: torch.Tensor
    compressed_rows: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class CsaPlan:
    """`rotation`: of each token. `window`: writes of the window cache. `compressor`, `index_compressor`: None where the
    spec has none. `sub_batches`, `chunks`: attention, and the index scores of this rank. `shared`: the queries of
    prompts that it shares with others."""

    rotation: Rotation
    window: Writes
    compressor: CompressorPlan | None
    index_compressor: CompressorPlan | None
    sub_batches: tuple[SubBatch, ...]
    chunks: tuple[ScoreChunk, ...]
    shared: SharedQueries | None


@dataclass(frozen=True)
class _Queries:
    """b * q queries: `requests` [b], and `seen` [b, q] the number of tokens that each query sees, its own included."""

    tokens: Tokens
    requests: torch.Tensor
    seen: torch.Tensor


def build_plan(spec: CsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> CsaPlan:
    """Plan one step for every layer that has `spec`. `index` has an entry for each of the spec's caches."""
    paged = {name: _paged(entry) for name, entry in index.items()}
    every = torch.ones_like(batch.positions, dtype=torch.bool)
    compressor = _compressor_plan(spec, batch, paged["state"], paged["compressed"]) if spec.ratio else None
    index_compressor = _compressor_plan(spec, batch, paged["index_state"], paged["index"]) if spec.indexer else None
    spans, shared = _scored_prompts(spec, batch)
    return CsaPlan(
        rotation=rotation_at(spec.rope, batch.positions),
        window=_writes(paged["window"].slots, 1, every),
        compressor=compressor,
        index_compressor=index_compressor,
        sub_batches=(*_decode_sub_batches(spec, batch, paged), *_prefill_sub_batches(spec, batch, paged)),
        chunks=(*_decode_chunks(spec, batch, paged), *_prefill_chunks(spec, batch, paged, spans)),
        shared=shared,
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
    # The compressor returns only closed blocks, in the order of their rows, so that all of them are written.
    block_writes = Writes(writes.rows, None)
    return CompressorPlan(
        phase,
        state_writes,
        ClosedBlocks(kv_rows, kv_rows + spec.streams, bias[..., None], block_writes, rotation_at(spec.rope, first)),
    )


def _rows(
    paged: PageIndex, table: torch.Tensor, position: torch.Tensor, inside: torch.Tensor, stride: int
) -> torch.Tensor:
    """[b, L] pool row that holds token `position` [b, L]; row 0 outside of the request, where `inside` is False."""
    column = (position // paged.page_size).clamp(min=0, max=table.shape[1] - 1)
    page = table.gather(1, column)
    rows = page * (paged.page_size // stride) + position % paged.page_size // stride
    return torch.where(inside & (page >= 0), rows, 0)


def _selects(spec: CsaSpec, seen: int) -> bool:
    """Whether a query that sees `seen` tokens sees more compressed entries than the top-k."""
    return spec.indexer is not None and spec.visible_entries(seen) > spec.indexer.topk


def _padded(length: int) -> int:
    """The padded width of `length` rows: at most an eighth more, so that few widths occur."""
    step = max(16, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def _decodes(batch: BatchLayout, members: list[int]) -> _Queries:
    contiguous = members[-1] - members[0] + 1 == len(members)
    requests = torch.tensor(members, device=batch.device)
    tokens = slice(members[0], members[-1] + 1) if contiguous else requests
    seen = torch.tensor([[batch.seq_lens[b]] for b in members], device=batch.device)
    return _Queries(tokens, requests, seen)


def _block(batch: BatchLayout, request: int, begin: int, end: int, *, alone: bool) -> _Queries:
    """Queries at positions `begin` to `end` of one request: as one row of queries, or `alone`, one row each."""
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
    """The first position from `begin` on whose query has sparse indices, or `end`."""
    if spec.indexer is None:
        return end
    return min(end, max(begin, (spec.indexer.topk + 1) * spec.ratio - 1))


def _sub_batch(
    spec: CsaSpec, paged: Mapping[str, PageIndex], queries: _Queries, width: int, entries: int | None
) -> SubBatch:
    """`width`: window entries to read. `entries`: compressed entries to read, the first ones; None for the top-k."""
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
    """[b, N] rows of the first `count` entries of each request, and [b, q, N] whether each is hidden from a query."""
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


def _scored_prompts(spec: CsaSpec, batch: BatchLayout) -> tuple[list[Span], SharedQueries | None]:
    """The queries of prompts that this rank scores, and where it shares them with others."""
    if spec.indexer is None:
        return [], None
    spans = []
    for b in range(batch.num_decodes, batch.num_requests):
        context, end = batch.context_lens[b], batch.seq_lens[b]
        first = _first_sparse(spec, context, end)
        if first < end:
            spans.append(Span(b, batch.query_start[b] + first - context, first, end - first))
    return share(spans, SHARED_BLOCK, spec.indexer.rank, spec.indexer.ranks, batch.device, spec.ratio)


def _prefill_chunks(
    spec: CsaSpec, batch: BatchLayout, paged: Mapping[str, PageIndex], spans: Sequence[Span]
) -> Iterator[ScoreChunk]:
    for span in spans:
        assert spec.indexer is not None
        end = span.position + span.queries
        step = max(1, SCORE_BUDGET // (spec.indexer.num_heads * max(1, spec.visible_entries(end))))
        for begin in range(span.position, end, step):
            stop = min(begin + step, end)
            queries = _block(batch, span.request, begin, stop, alone=False)
            yield _score_chunk(spec, paged, queries, spec.visible_entries(stop))


def _score_chunk(spec: CsaSpec, paged: Mapping[str, PageIndex], queries: _Queries, count: int) -> ScoreChunk:
    key_rows, unseen = _entries(spec, paged["index"], queries, count)
    compressed_rows, _ = _entries(spec, paged["compressed"], queries, count)
    return ScoreChunk(queries.tokens, queries.seen.shape[1], key_rows, compressed_rows, _bias(unseen))
