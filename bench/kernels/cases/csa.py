"""Compressed sparse attention as DeepSeek V4 has it: each kind of layer and of row, decode and prefill.

A case is a whole layer's call: what it stores, chooses and attends to. "attend" cases leave out storing and choosing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, CacheIndex
from allotrope.attention.cache_layout import PagedRows, pool_bytes, views
from allotrope.attention.check import Comparison, compare
from allotrope.attention.csa import CSA, CsaSpec, IndexerSpec
from allotrope.attention.csa.cases import draw
from allotrope.attention.csa.indexer import scores
from allotrope.attention.csa.plan import CsaPlan
from allotrope.attention.csa.rotary import rotate_tail
from allotrope.ops.rope import RopeSpec
from bench.kernels.cases.case import KernelCase, Timed, prefill_batch

DTYPE = torch.bfloat16
# Differences of two index scores, in parts of their RMS, that rounding decides. The order of sums moves a score by less
# than 1e-5; an element of a rotated query that rounds to the other neighbour, as one query in ten has, by up to 1e-3.
NEAR = 1e-3
ROPE = RopeSpec(dim=64, theta=160000.0, interleaved=True)
KINDS: dict[str, dict[str, Any]] = {
    "window": {},
    "chosen": {"ratio": 4, "overlap": True, "indexer": IndexerSpec(num_heads=64, head_dim=128, topk=512)},
    "all": {"ratio": 128},
}
ROWS = {"bf16": (DTYPE, "plain"), "fp8": (torch.float8_e4m3fn, "plain"), "scaled": (torch.float8_e4m3fn, "scaled")}


@dataclass(frozen=True)
class Inputs:
    """A step of one layer. `index`, `pools`: of every cache, filled with rows of the right type."""

    spec: CsaSpec
    batch: BatchLayout
    index: dict[str, CacheIndex]
    pools: dict[str, dict[str, torch.Tensor]]
    given: dict[str, Any]


def cases() -> list[KernelCase]:
    found = []
    for kind in KINDS:
        for rows in ROWS if kind == "chosen" else ("bf16",):
            for requests in (64, 4):
                found.append(_case(f"decode B{requests} 8192 {kind} {rows}", kind, rows, (1,) * requests, 8192))
        if kind != "window":
            found.append(_case(f"prefill 8192 {kind} bf16", kind, "bf16", (8192,), 8192))
    return [*found, _case("tiny chosen bf16", "chosen", "bf16", (1, 9), 24, tiny=True)]


def _spec(kind: str, rows: str, tiny: bool) -> CsaSpec:
    kv_dtype, row_format = ROWS[rows]
    if tiny:
        rope, numbers = RopeSpec(dim=16, theta=1e4, interleaved=True), dict(KINDS[kind])
        numbers["indexer"] = IndexerSpec(num_heads=8, head_dim=16, topk=4)
        return CsaSpec(num_heads=4, head_dim=32, scale=32**-0.5, window=8, rope=rope, kv_dtype=kv_dtype, **numbers)
    return CsaSpec(
        num_heads=64, head_dim=512, scale=512**-0.5, window=128, rope=ROPE, kv_dtype=kv_dtype, row_format=row_format,
        **KINDS[kind],
    )  # fmt: skip


def _case(name: str, kind: str, rows: str, query_lens: tuple[int, ...], seen: int, tiny: bool = False) -> KernelCase:
    spec = _spec(kind, rows, tiny)
    tokens, heads, dim = sum(query_lens), spec.num_heads, spec.head_dim
    decode = tokens == len(query_lens)
    row = sum(field.bytes for field in spec.caches()["window"].fields)
    moved, flops = 2 * tokens * heads * dim * DTYPE.itemsize, 0
    for q in query_lens:
        for position in range(seen - q, seen) if not decode else (seen - 1,):
            visible = spec.visible_entries(position + 1)
            read = min(position + 1, spec.window)
            read += min(visible, spec.indexer.topk) if spec.indexer else visible
            flops += 4 * heads * dim * read
            moved += row * read if decode else 0
            if spec.indexer and visible > spec.indexer.topk:
                flops += 2 * spec.indexer.num_heads * spec.indexer.head_dim * visible
                moved += 2 * spec.indexer.head_dim * visible if decode else 0
    return KernelCase(
        family="csa",
        name=name,
        make=functools.partial(_make, spec, query_lens, (seen,) * len(query_lens)),
        ours=lambda x: _timed(x, CSA.backends[0], x.pools),
        check=_check,
        bytes=moved,
        flops=flops,
        tiny=tiny,
        absent={}
        if tiny
        else {"flashmla": "its sparse decode takes 576-dim rows; the one for V4 is not in this release"},
    )


def _make(spec: CsaSpec, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], device: torch.device) -> Inputs:
    pools, index = {}, {}
    batch = None
    for seed, (name, layout) in enumerate(spec.caches().items()):
        size = 256 if isinstance(layout, PagedRows) else 64
        batch, index[name], pages = prefill_batch(query_lens, seq_lens, size, device, seed)
        buffer = torch.randint(0, 96, (pool_bytes(layout, size, pages),), dtype=torch.uint8, device=device)
        pools[name] = views(layout, size, pages, buffer)
        for field, view in pools[name].items():
            if field == "factors":
                view.random_(120, 126)
            elif field == "row":
                plain = spec.head_dim - spec.rope.dim
                view[..., plain:].view(DTYPE).normal_()
            elif view.dtype != torch.float8_e4m3fn:
                view.normal_()
    assert batch is not None
    drawn = draw(spec, sum(query_lens), torch.Generator().manual_seed(0), DTYPE)
    given: dict[str, Any] = {name: t.to(device) for name, t in (drawn.tokens | drawn.layer).items() if t is not None}
    if spec.kv_dtype != DTYPE and spec.row_format == "plain":
        # Of the codes above, whose largest is 30.
        given["kv_scale"] = 0.05
    return Inputs(spec, batch, dict(index), pools, given)


def _timed(x: Inputs, backend: AttentionBackend, pools: dict[str, dict[str, torch.Tensor]]) -> Timed:
    plan = backend.plan(x.spec, x.batch, x.index)
    inputs = CSA.ready_inputs(x.spec, **x.given)
    return lambda: backend.run(x.spec, plan, pools, inputs)


def _check(x: Inputs, timed: Timed) -> Sequence[Comparison]:
    """Both work on equal pools, and write the same rows into them. What is chosen is judged by itself; the reference
    then attends to the same entries."""
    copies = {name: {field: view.clone() for field, view in fields.items()} for name, fields in x.pools.items()}
    reference = CSA.backends[-1]
    plan: CsaPlan = reference.plan(x.spec, x.batch, x.index)
    got, sparse_indices = _run(timed)
    wrong = []
    if plan.chunks:
        assert sparse_indices is not None, "nothing was selected"
        wrong = _wrong_topk(x, plan, sparse_indices)
        if not wrong:
            plan = _with_topk(x.spec, plan, sparse_indices)
    found = compare(got, reference.run(x.spec, plan, copies, CSA.ready_inputs(x.spec, **x.given)), "bf16")
    found = replace(found, wrong=(*wrong, *found.wrong))
    if plan.index_compressor is None or plan.index_compressor.closed is None:
        return [found]
    stored = plan.index_compressor.closed.writes.rows
    keys, wanted = (pools["index"]["k"].flatten(0, 1)[stored] for pools in (x.pools, copies))
    return [found, compare(keys, wanted, "bf16")]


def _run(timed: Timed) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output, and the rows of entries [T, n] that queries selected on the way to it; None if they see all."""
    from allotrope.attention.csa import triton_index

    own, sparse_indices = triton_index.resolve, []

    def resolve(*given: Any) -> torch.Tensor:
        sparse_indices.append(own(*given))
        return sparse_indices[-1]

    with mock.patch.object(triton_index, "resolve", resolve):
        return timed(), sparse_indices[0] if sparse_indices else None


def _wrong_topk(x: Inputs, plan: CsaPlan, sparse_indices: torch.Tensor) -> list[str]:
    """Reasons to refuse rows `sparse_indices` [T, n]. Each query of a contest has to select `topk` entries that it
    sees, and none that it selects or passes over may lie further than NEAR on the wrong side of its last place, by the
    reference's scores of the index keys as they were stored."""
    indexer = x.spec.indexer
    assert indexer is not None
    q = rotate_tail(x.given["index_q"], plan.rotation)
    far = torch.zeros(x.batch.num_tokens, device=x.batch.device)
    counts = torch.full_like(far, indexer.topk, dtype=torch.int64)
    for chunk in plan.chunks:
        rows = chunk.compressed_rows.int().repeat_interleave(chunk.queries, dim=0)
        taken = (sparse_indices[chunk.tokens, : indexer.topk, None] == rows[:, None]).any(1)
        found = scores(indexer, chunk, x.pools["index"]["k"], q, x.given["index_weights"])
        last = found.topk(indexer.topk).values[:, -1:]
        spread = found.where(found.isfinite(), 0).square().mean(1).sqrt()
        far[chunk.tokens] = torch.where(taken, last - found, found - last).amax(1) / spread
        counts[chunk.tokens] = (taken & found.isfinite()).sum(1)
    wrong, odd = [], counts != indexer.topk
    if odd.any():
        token = int(odd.int().argmax())
        wrong.append(f"token {token} selects {counts[token]} entries that it sees; wanted {indexer.topk}")
    beyond = ~(far <= NEAR)
    if beyond.any():
        token = int(far.argmax())
        wrong.append(f"{int(beyond.sum())} of {len(far)} tokens pick others, token {token} by {far[token]:.1e} of its "
                     f"scores' RMS off the last place; allowed: {NEAR:.0e}")  # fmt: skip
    return wrong


def _with_topk(spec: CsaSpec, plan: CsaPlan, sparse_indices: torch.Tensor) -> CsaPlan:
    """`plan` with rows `sparse_indices` [T, n] in place of contests."""
    assert spec.indexer is not None
    chosen = sparse_indices[:, : spec.indexer.topk].long()
    sub_batches = (
        replace(p, compressed_rows=chosen[p.tokens]) if p.compressed_rows is None else p for p in plan.sub_batches
    )
    return replace(plan, sub_batches=tuple(sub_batches), chunks=())
