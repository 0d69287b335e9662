"""Which cache entries each query of a step reads and in which form: built on the host once, shared by all layers.

A step becomes `SubBatch`es: b requests with q queries each, whose keys are read in `KeySlice`s of bounded size and
whose queries are scored in `Tile`s of bounded size; the results over the slices are merged by log-sum-exp. So neither
the gathered entries, nor the decompressed keys, nor the scores grow with the context. A request's own lengths alone
decide its sub-batches, and entries of other requests are never read.

Each sub-batch takes the cheaper of two forms of the same attention. Per head, in multiply-adds, with N visible pairs of
q queries and L keys:

    absorbed       N (2C + R)    + q C (P + V)     the query is projected to the latent, and the result from it
    decompressed   N (P + R + V) + L C (P + V)     the latents are projected to the head's keys and values

so a single query is absorbed, and a long prompt decompressed (V3: from about 170 queries on).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex, on_device
from allotrope.attention.mla.spec import MlaSpec

# Keys of one request that are decompressed together, and queries scored together: H x 128 x 1024 scores at a time.
KEY_SLICE = 1024
QUERY_BLOCK = 128
# Cache entries that requests with one query gather together.
DECODE_ROWS = 1 << 16


@dataclass(frozen=True)
class Tile:
    """A block of queries, and the keys of a slice that it reads.

    `queries`: a slice of the sub-batch's q. `keys`: how many of the slice's keys are read, from the first. `bias`:
    [b, q, w] fp32, 0 or -inf, is added to the logits of the last w of these; None means that all are visible.
    """

    queries: slice
    keys: int
    bias: torch.Tensor | None


@dataclass(frozen=True)
class KeySlice:
    """`rows`: [b, L] int64 rows of the pool, filled up with row 0, which holds zeros."""

    rows: torch.Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class SubBatch:
    """b requests with q queries each. `tokens`: the b * q tokens, request after request. `queries`: q."""

    tokens: slice | torch.Tensor
    queries: int
    slices: tuple[KeySlice, ...]


@dataclass(frozen=True)
class Writes:
    """`slots`: the pool row of each written token. `tokens`: the tokens that are written; None means all."""

    slots: torch.Tensor
    tokens: torch.Tensor | None


@dataclass(frozen=True)
class MlaPlan:
    """`writes`: None in a plan of reads. `absorbed_tokens`: tokens whose queries are absorbed, all at once; the
    sub-batches of `absorbed` index these. `decompressed`: sub-batches in the decompressed form; they index the batch.
    """

    writes: Writes | None
    absorbed_tokens: slice | torch.Tensor | None
    absorbed: tuple[SubBatch, ...]
    decompressed: tuple[SubBatch, ...]


@dataclass(frozen=True)
class Span:
    """Consecutive queries of one request: its index in the batch, the token and position of the first, their number."""

    request: int
    token: int
    position: int
    queries: int


def build_plan(spec: MlaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> MlaPlan:
    """Plan one step for every layer with `spec`'s sizes. `index` has the entry "latent"."""
    paged = index["latent"]
    assert isinstance(paged, PageIndex)
    starts = zip(batch.query_start, batch.context_lens, batch.query_lens, strict=False)
    return plan_spans(spec, paged, [Span(b, token, position, q) for b, (token, position, q) in enumerate(starts)])


def plan_spans(spec: MlaSpec, paged: PageIndex, spans: Sequence[Span]) -> MlaPlan:
    """Plan the queries of `spans`, which see all tokens up to their own, and the writes of all new tokens."""
    return replace(plan_reads(spec, paged, spans), writes=writes(paged))


def plan_reads(spec: MlaSpec, paged: PageIndex, spans: Sequence[Span]) -> MlaPlan:
    """As `plan_spans`, without the writes."""
    decompressed = [
        _prefill_sub_batch(paged, equal_shapes)
        for equal_shapes in _equal_shapes([span for span in spans if decompresses(spec, span)])
    ]
    tokens: list[int] = []
    absorbed: list[Span] = []
    for span in spans:
        if not decompresses(spec, span):
            absorbed.append(replace(span, token=len(tokens)))
            tokens.extend(range(span.token, span.token + span.queries))
    sub_batches = [*_decode_sub_batches(paged, [span for span in absorbed if span.queries == 1])]
    sub_batches += [
        _prefill_sub_batch(paged, equal_shapes)
        for equal_shapes in _equal_shapes([span for span in absorbed if span.queries > 1])
    ]
    absorbed_tokens = token_index(tokens, paged.table.device) if tokens else None
    return MlaPlan(None, absorbed_tokens, tuple(sub_batches), tuple(decompressed))


def writes(paged: PageIndex) -> Writes:
    """The slots of the step's new tokens."""
    kept = paged.slots >= 0
    if bool(kept.all()):
        return Writes(paged.slots, None)
    tokens = kept.nonzero().squeeze(1)
    return Writes(paged.slots[tokens], tokens)


def decompresses(spec: MlaSpec, span: Span) -> bool:
    """Whether decompressing the keys costs fewer multiply-adds than absorbing the queries; never for one query."""
    if span.queries == 1:
        return False
    c, r, p, v = spec.latent_dim, spec.rope_dim, spec.nope_dim, spec.v_head_dim
    keys = span.position + span.queries
    pairs = span.queries * span.position + span.queries * (span.queries + 1) // 2
    return pairs * (p + r + v) + keys * c * (p + v) < pairs * (2 * c + r) + span.queries * c * (p + v)


def token_index(tokens: Sequence[int], device: torch.device) -> slice | torch.Tensor:
    """The tokens as a slice where they are consecutive, else as an index."""
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(tokens[0], tokens[-1] + 1)
    return on_device(tokens, torch.int64, device)


def bucket(spans: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Group spans of one query by a padded number of keys, at most an eighth more than they see: few widths occur."""
    buckets: dict[int, list[Span]] = {}
    for span in spans:
        keys = span.position + 1
        step = max(16, 1 << max(0, keys.bit_length() - 4))
        buckets.setdefault(-(-keys // step) * step, []).append(span)
    yield from buckets.items()


def _decode_sub_batches(paged: PageIndex, spans: Sequence[Span]) -> Iterator[SubBatch]:
    device = paged.table.device
    for length, members in bucket(spans):
        tokens = token_index([span.token for span in members], device)
        table = paged.table[torch.tensor([span.request for span in members], device=device)]
        seen = torch.tensor([span.position + 1 for span in members], device=device)[:, None]
        shortest = min(span.position for span in members) + 1
        width = max(16, DECODE_ROWS // len(members))
        slices = []
        for first in range(0, length, width):
            last = min(first + width, length)
            key = torch.arange(first, last, device=device)[None]
            inside = key < seen
            bias = None if last <= shortest else _bias(inside[:, None])
            slices.append(KeySlice(page_rows(paged, table, key, inside), (Tile(slice(0, 1), last - first, bias),)))
        yield SubBatch(tokens, 1, tuple(slices))


def _equal_shapes(spans: Sequence[Span]) -> list[list[Span]]:
    """Groups of neighbours with equal positions and numbers of queries, whose keys together fit into one slice."""
    runs: list[list[Span]] = []
    for span in spans:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.position, last.queries) == (span.position, span.queries)
            and (last.request + 1, last.token + last.queries) == (span.request, span.token)
            and (len(runs[-1]) + 1) * (span.position + span.queries) <= KEY_SLICE
        ):
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _prefill_sub_batch(paged: PageIndex, equal_shapes: Sequence[Span]) -> SubBatch:
    device, span = paged.table.device, equal_shapes[0]
    table = paged.table[span.request : span.request + len(equal_shapes)]
    end = span.position + span.queries
    slices = []
    for first in range(0, end, KEY_SLICE):
        last = min(first + KEY_SLICE, end)
        key = torch.arange(first, last, device=device)[None]
        blocks = (slice(b, min(b + QUERY_BLOCK, span.queries)) for b in range(0, span.queries, QUERY_BLOCK))
        tiles = tuple(
            _tile(span, queries, first, last, device) for queries in blocks if first < span.position + queries.stop
        )
        slices.append(KeySlice(page_rows(paged, table, key, torch.ones_like(key, dtype=torch.bool)), tiles))
    return SubBatch(slice(span.token, span.token + len(equal_shapes) * span.queries), span.queries, tuple(slices))


def _tile(span: Span, queries: slice, first: int, last: int, device: torch.device) -> Tile:
    """The tile of some queries of a span on the slice of keys `first` to `last`."""
    last = min(last, span.position + queries.stop)
    # All of the queries see every key before this one.
    common = max(first, span.position + queries.start + 1)
    if common >= last:
        return Tile(queries, last - first, None)
    key = torch.arange(common, last, device=device)
    own = torch.arange(span.position + queries.start, span.position + queries.stop, device=device)
    return Tile(queries, last - first, _bias((key <= own[:, None])[None]))


def _bias(visible: torch.Tensor) -> torch.Tensor:
    """The bias of logits: 0 where `visible`, else -inf."""
    return torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, -torch.inf)


def page_rows(paged: PageIndex, table: torch.Tensor, key: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """[b, L] pool row of key position `key` [b, L] or [1, L]; row 0 outside of the request, where `inside` is False.

    `table`: [b, W] page table of the b requests.
    """
    width = table.shape[1]
    page = table.gather(1, (key // paged.page_size).clamp(0, width - 1).expand(len(table), -1))
    return torch.where(inside & (page >= 0), page * paged.page_size + key % paged.page_size, 0)
