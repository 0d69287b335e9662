"""Which queries of a step have sparse indices, and which index keys they are scored against: built once per step.

A query that sees at most `topk` tokens attends to all of them, by the code of dense latent attention. The other queries
form `ScoreChunk`s, in which each is scored against every index key that it sees; then each reads its own top-k cache
entries. A query's own position alone decides whether it is sparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex, on_device
from allotrope.attention.dsa.sharing import SharedQueries, share
from allotrope.attention.dsa.spec import DsaSpec
from allotrope.attention.mla.plan import MlaPlan, Span, Writes, bucket, page_rows, plan_spans, token_index, writes

# Queries of one prefill that are scored together: their scores are QUERY_BLOCK x L.
QUERY_BLOCK = 128


@dataclass(frozen=True)
class ScoreChunk:
    """b requests with q queries each that are scored against L index keys.

    `tokens`: the b * q tokens. `rows`: [b, L] int64 rows of the index pool, filled up with row 0. `seen`: [b * q, 1]
    number of them that each query sees, above `topk`.
    """

    tokens: slice | torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True)
class SparseQueries:
    """The t queries with sparse indices. `tokens`: theirs in the batch. `request`: [t] int64. `pages`: page tables."""

    tokens: slice | torch.Tensor
    request: torch.Tensor
    pages: PageIndex


@dataclass(frozen=True)
class DsaPlan:
    """`dense`: the plan of queries that attend to all tokens, and all latent writes. `index_writes`: None without an
    indexer. `topk_indices`: [T, K] of queries that attend to all tokens; K is `topk`, or the longest request if that is
    shorter. `chunks`: those that this rank scores, of prompts first; `shared`: the queries of prompts that it shares
    with others.
    """

    dense: MlaPlan
    index_writes: Writes | None
    chunks: tuple[ScoreChunk, ...]
    sparse_queries: SparseQueries | None
    topk_indices: torch.Tensor
    shared: SharedQueries | None


def build_plan(spec: DsaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> DsaPlan:
    """Plan one step. `index` has the entry "latent", and "index" for a layer with an indexer."""
    latent = index["latent"]
    assert isinstance(latent, PageIndex)
    dense, sparse = [], []
    for b, (token, position, queries) in enumerate(
        zip(batch.query_start, batch.context_lens, batch.query_lens, strict=False)
    ):
        num_dense = min(queries, max(0, spec.topk - position))
        if num_dense:
            dense.append(Span(b, token, position, num_dense))
        if num_dense < queries:
            sparse.append(Span(b, token + num_dense, position + num_dense, queries - num_dense))
    index_writes: Writes | None = None
    chunks: tuple[ScoreChunk, ...] = ()
    shared: SharedQueries | None = None
    if spec.indexer is not None:
        keys = index["index"]
        assert isinstance(keys, PageIndex)
        prompts = [span for span in sparse if span.queries > 1]
        decodes = [span for span in sparse if span.queries == 1]
        own, shared = share(prompts, QUERY_BLOCK, spec.indexer.rank, spec.indexer.ranks, batch.device)
        index_writes, chunks = writes(keys), (*_prefill_chunks(keys, own), *_decode_chunks(keys, decodes))
    column = torch.arange(min(spec.topk, max(batch.seq_lens)), device=batch.device)
    dense_indices = torch.where(column <= batch.positions[:, None], column, -1)
    dense_plan, sparse_queries = plan_spans(spec.mla, latent, dense), _sparse_queries(latent, sparse)
    return DsaPlan(dense_plan, index_writes, chunks, sparse_queries, dense_indices, shared)


def _decode_chunks(paged: PageIndex, spans: Sequence[Span]) -> Iterator[ScoreChunk]:
    device = paged.table.device
    for length, members in bucket(spans):
        table = paged.table[torch.tensor([span.request for span in members], device=device)]
        seen = torch.tensor([span.position + 1 for span in members], device=device)[:, None]
        key = torch.arange(length, device=device)[None]
        tokens = token_index([span.token for span in members], device)
        yield ScoreChunk(tokens, page_rows(paged, table, key, key < seen), seen)


def _prefill_chunks(paged: PageIndex, spans: Sequence[Span]) -> Iterator[ScoreChunk]:
    device = paged.table.device
    for span in spans:
        key = torch.arange(span.position + span.queries, device=device)[None]
        table = paged.table[span.request : span.request + 1]
        rows = page_rows(paged, table, key, torch.ones_like(key, dtype=torch.bool))
        for begin in range(0, span.queries, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, span.queries)
            seen = torch.arange(span.position + begin + 1, span.position + end + 1, device=device)[:, None]
            yield ScoreChunk(slice(span.token + begin, span.token + end), rows[:, : span.position + end], seen)


def _sparse_queries(paged: PageIndex, spans: Sequence[Span]) -> SparseQueries | None:
    if not spans:
        return None
    tokens = [token for span in spans for token in range(span.token, span.token + span.queries)]
    request = [span.request for span in spans for _ in range(span.queries)]
    device = paged.table.device
    return SparseQueries(token_index(tokens, device), on_device(request, torch.int64, device), paged)
