"""Latent attention of prompts, expanded: keys and values of every head are made for a bounded number of rows at a time.

Owns: which rows are expanded together, the kernel that reads them back from their pages, the kernel that attends, and
their launch. Must not know: which requests are better absorbed.

A `Chunk` holds slices of the keys of one or several requests. What the queries of a request found in one slice is
joined with what they found in those before it, in the program that attends; so scratch does not grow with the context.
Prompts without context go to cuDNN where it is: there it is faster, and does nothing else.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from allotrope.attention.batch import PageIndex
from allotrope.attention.mla.plan import Span
from allotrope.attention.mla.spec import MlaSpec
from allotrope.attention.mla.triton_rows import load_rows
from allotrope.attention.mla.triton_store import planes
from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import at_least, higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E, LOWEST
from allotrope.kernels.tiles import next_power_of_2

# Queries of a tile of a plan; a kernel may share it out among several programs.
TILE = 128
# Rows of a slice are read back, and lie in scratch, in blocks of so many.
ROWS = 64
# Tokens of a prompt that cuDNN attends to: at least, and what they are rounded up to.
WHOLE_LEAST = 1024
WHOLE_STEP = 256
# Bytes of the keys and values of a chunk.
SCRATCH = 1 << 29


@dataclass(frozen=True)
class Chunk:
    """Keys that are expanded together, and who reads them.

    `rows`: scratch rows. `blocks`: [n, 4] int32, of at most `ROWS` of them each: request, first key, how many, first
    row. `tiles`: [m, 8] int32 of each tile of queries: first token, how many, position of the first, first key of its
    slice, keys of the slice, the slice's first scratch row, whether it is its request's first slice, whether the last.
    """

    rows: int
    blocks: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True)
class Whole:
    """A prompt without context that cuDNN attends to.

    `rows`, `blocks`: as in `Chunk`; `rows` is rounded up, so that few sizes ever meet. `tokens`: which of the step's.
    """

    rows: int
    blocks: torch.Tensor
    tokens: slice


@dataclass(frozen=True)
class Expanded:
    """`chunks`: in the order in which they are attended to. `joined`: whether a request has several slices. `whole`:
    what cuDNN does.
    """

    chunks: tuple[Chunk, ...]
    joined: bool
    whole: tuple[Whole, ...] = ()


@dataclass(frozen=True)
class Config:
    """`queries`, `keys`: of one program's products; `queries` divides `TILE`."""

    queries: int
    keys: int
    warps: int
    stages: int


def config(chip: Chip, spec: MlaSpec, dtype: torch.dtype) -> Config:
    """Launch parameters. `dtype`: of the queries."""
    if chip.vendor == "cpu":
        return Config(32, 32, 4, 1)
    if dtype == torch.float32:
        return Config(16, 32, 4, 1)
    wide = max(spec.nope_dim + spec.rope_dim, spec.v_head_dim) > 192
    if chip.vendor == "amd":
        return Config(64 if wide else 128, 32, 8, 1)
    if not chip.has_wgmma:
        # Two stages of keys and values beside the queries are less than 99 KiB.
        return Config(64, 32, 8, 2) if wide else Config(128, 64, 8, 2)
    return Config(128, 64, 8, 2) if wide else Config(128, 64, 8, 3)


def plan_expanded(spec: MlaSpec, spans: Sequence[Span], device: torch.device, scratch: int = SCRATCH) -> Expanded:
    """Share out the keys of `spans` among chunks of at most `scratch` bytes, and their queries among tiles."""
    size = spec.num_heads * (spec.nope_dim + spec.v_head_dim) * (4 if spec.kv_dtype == torch.float32 else 2)
    most = max(1, scratch // size // ROWS) * ROWS
    whole = [span for span in spans if _goes_whole(span, most) and _cudnn_can(spec, device)]
    chunks: list[Chunk] = []
    blocks: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    joined, row = False, 0
    for span in (span for span in spans if span not in whole):
        end = span.position + span.queries
        first = 0
        while first < end:
            last = min(end, first + most - row)
            blocks += _blocks(span.request, first, last, row)
            joined |= last - first < end
            for q in reversed(range(0, span.queries, TILE)):
                count = min(TILE, span.queries - q)
                if span.position + q + count > first:
                    ends = last >= span.position + q + count
                    here = (span.token + q, count, span.position + q, first, last - first, row, first == 0, ends)
                    tiles.append(here)
            row += last - first
            first = last
            if row >= most:
                chunks.append(Chunk(row, _table(blocks, device), _table(tiles, device)))
                blocks, tiles, row = [], [], 0
    if blocks:
        chunks.append(Chunk(row, _table(blocks, device), _table(tiles, device)))
    alone = [
        Whole(
            -(-span.queries // WHOLE_STEP) * WHOLE_STEP,
            _table(_blocks(span.request, 0, span.queries, 0), device),
            slice(span.token, span.token + span.queries),
        )
        for span in whole
    ]
    return Expanded(tuple(chunks), joined, tuple(alone))


def _goes_whole(span: Span, most: int) -> bool:
    """Long prompts only: short ones are better attended to side by side, and a plan has few long ones."""
    return span.position == 0 and WHOLE_LEAST <= span.queries <= most - most % WHOLE_STEP


def _blocks(request: int, first: int, last: int, row: int) -> list[tuple[int, ...]]:
    """Entries of `Chunk.blocks` for keys `first` to `last`, which lie from scratch row `row` on."""
    return [(request, key, min(ROWS, last - key), row + key - first) for key in range(first, last, ROWS)]


def _table(rows: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _cudnn_can(spec: MlaSpec, device: torch.device) -> bool:
    """Whether cuDNN has keys and values of these sizes, in half precision, and is faster: measured on Hopper."""
    chip = chip_of(device)
    if not chip.has_wgmma or not torch.backends.cudnn.is_available():
        return False
    sizes = (spec.nope_dim + spec.rope_dim, spec.v_head_dim)
    fits = all(size % 8 == 0 and 64 <= size <= 256 for size in sizes)
    return fits and spec.kv_dtype != torch.float32


@pdl_jit
def gather_kernel(
    c_pool, pe_pool, factors, table, blocks, latent, rope, kv_scale,
    c_page, c_row, pe_page, pe_row, f_page, f_row, table_b,
    C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    STEP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """STEP of a block's rows as numbers, side by side: `latent` [rows, C] and `rope` [rows, R]."""
    gdc_wait()
    gdc_launch_dependents()
    block = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)
    request = tl.load(blocks + block * 4).to(tl.int64)
    key = tl.load(blocks + block * 4 + 1) + place
    there = place < tl.load(blocks + block * 4 + 2)
    page = tl.load(table + request * table_b + key // PAGE, mask=there, other=-1).to(tl.int64)
    c, tail = load_rows(
        c_pool, pe_pool, factors, page, key % PAGE, there & (page >= 0), c_page, c_row, pe_page, pe_row, f_page, f_row,
        tl.float32, C, R, BLOCK_C, BLOCK_R, STEP, SCALED,
    )  # fmt: skip
    channel, dim = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    row = tl.load(blocks + block * 4 + 3).to(tl.int64) + place
    kind: tl.constexpr = latent.dtype.element_ty
    tl.store(
        latent + row[:, None] * C + channel[None, :],
        (c * kv_scale).to(kind),
        mask=there[:, None] & (channel < C)[None, :],
    )
    tl.store(
        rope + row[:, None] * R + dim[None, :], (tail * kv_scale).to(kind), mask=there[:, None] & (dim < R)[None, :]
    )


@triton.jit
def _part(base, row, stride, dims, SIZE: tl.constexpr, there, WHOLE: tl.constexpr):
    """[rows, BLOCK] of a matrix, zeros beyond `SIZE` and, unless WHOLE, where not `there`."""
    at = base + row[:, None].to(tl.int64) * stride + dims[None, :]
    if WHOLE:
        if dims.shape[0] == SIZE:
            return tl.load(at)
        return tl.load(at, mask=(dims < SIZE)[None, :], other=0.0)
    return tl.load(at, mask=there[:, None] & (dims < SIZE)[None, :], other=0.0)


@triton.jit
def _over_keys(
    mixed, top, total, q_a, q_b, q_pe, k, rope, v, k_row, r_row, v_row, begin, end, limit, first, position, factor,
    A: tl.constexpr, B: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `begin` to `end` of a slice whose first key has position `first` and which has `limit` of them."""
    for start in range(begin, end, KEYS):
        row = start + tl.arange(0, KEYS)
        there = row < limit
        k_a = _part(k, row, k_row, tl.arange(0, BLOCK_A), A, there, not MASKED)
        logits = tl.dot(q_a, tl.trans(k_a), input_precision=PRECISION)
        if B > 0:
            k_b = _part(k + A, row, k_row, tl.arange(0, BLOCK_B), B, there, not MASKED)
            logits = tl.dot(q_b, tl.trans(k_b), logits, input_precision=PRECISION)
        k_pe = _part(rope, row, r_row, tl.arange(0, BLOCK_R), R, there, not MASKED)
        logits = tl.dot(q_pe, tl.trans(k_pe), logits, input_precision=PRECISION) * factor
        if MASKED:
            seen = there[None, :] & ((first + row)[None, :] <= position[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        higher = higher_of(top, highest(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        values = _part(v, row, v_row, tl.arange(0, BLOCK_V), V, there, not MASKED)
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
        top = higher
    return mixed, top, total


@pdl_jit
def prefill_kernel(
    q, q_pe, k, rope, v, tiles, held, lse, out, scale, q_t, q_h, pe_t, pe_h, out_t, out_h,
    H: tl.constexpr, A: tl.constexpr, B: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, JOINED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One of PARTS of a tile of queries of one head over one slice of keys.

    `k`: [rows, H, A + B]. `rope`: [rows, R]. `v`: [rows, H, V]. With JOINED, `held` [T, H, V] fp32 and `lse` [T, H]
    (base 2) have what a tile found in the slices so far.
    """
    gdc_wait()
    gdc_launch_dependents()
    tile = tiles + tl.program_id(0) // PARTS * 8
    part = tl.program_id(0) % PARTS * QUERIES
    head = tl.program_id(1)
    token = tl.load(tile) + part
    count = tl.minimum(tl.load(tile + 1) - part, QUERIES)
    offset = tl.load(tile + 2) + part
    first = tl.load(tile + 3)
    limit = tl.load(tile + 4)
    place = tl.load(tile + 5).to(tl.int64)
    inner = tl.arange(0, QUERIES)
    real = inner < count
    position = offset + inner
    row = (token + inner).to(tl.int64)
    values = tl.arange(0, BLOCK_V)
    q += head * q_h
    queries_a = _part(q, row, q_t, tl.arange(0, BLOCK_A), A, real, False)
    queries_b = queries_a
    if B > 0:
        queries_b = _part(q + A, row, q_t, tl.arange(0, BLOCK_B), B, real, False)
    queries_pe = _part(q_pe + head * pe_h, row, pe_t, tl.arange(0, BLOCK_R), R, real, False)
    k += place * (H * (A + B)) + head * (A + B)
    v += place * (H * V) + head * V
    rope += place * R
    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK_V], tl.float32)
    # Up to `common` every query sees every key.
    end = tl.minimum(limit, offset + count - first)
    common = tl.maximum(0, tl.minimum(limit, offset + 1 - first)) // KEYS * KEYS
    mixed, top, total = _over_keys(
        mixed, top, total, queries_a, queries_b, queries_pe, k, rope, v, H * (A + B), R, H * V, 0, common, limit,
        first, position, scale * LOG2E, A, B, R, V, BLOCK_A, BLOCK_B, BLOCK_R, BLOCK_V, KEYS, False, PRECISION,
    )  # fmt: skip
    mixed, top, total = _over_keys(
        mixed, top, total, queries_a, queries_b, queries_pe, k, rope, v, H * (A + B), R, H * V, common, end, limit,
        first, position, scale * LOG2E, A, B, R, V, BLOCK_A, BLOCK_B, BLOCK_R, BLOCK_V, KEYS, True, PRECISION,
    )  # fmt: skip
    kept = real[:, None] & (values < V)[None, :]
    mixed = mixed / at_least(total, 1.0e-30)[:, None]
    to = out + row[:, None] * out_t + head * out_h + values[None, :]
    if JOINED:
        found = tl.where(total == 0.0, LOWEST, top + tl.log2(at_least(total, 1.0e-30)))
        at = held + (row[:, None] * H + head) * V + values[None, :]
        if tl.load(tile + 6) == 0:
            before = tl.load(lse + row * H + head, mask=real, other=LOWEST)
            higher = higher_of(before, found)
            left, right = tl.exp2(before - higher), tl.exp2(found - higher)
            mixed = mixed * (right / (left + right))[:, None]
            mixed += tl.load(at, mask=kept, other=0.0) * (left / (left + right))[:, None]
            found = higher + tl.log2(left + right)
        if tl.load(tile + 7) == 0:
            tl.store(at, mixed, mask=kept)
            tl.store(lse + row * H + head, found, mask=real)
        else:
            tl.store(to, mixed.to(out.dtype.element_ty), mask=kept)
    else:
        tl.store(to, mixed.to(out.dtype.element_ty), mask=kept)


def attend(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    plan: Expanded,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
) -> None:
    """Attend with the queries of `plan`'s tiles, and write their rows of `out` [T, H, V]."""
    for prompts in plan.whole:
        _attend_whole(spec, pools, paged, prompts, q_nope, q_pe, w_uk, w_uv, kv_scale, out)
    held = lse = out
    if plan.joined:
        held = torch.empty(len(out), *out.shape[1:], dtype=torch.float32, device=out.device)
        lse = torch.empty(len(out), out.shape[1], dtype=torch.float32, device=out.device)
    chosen = config(chip_of(out.device), spec, q_nope.dtype)
    for chunk in plan.chunks:
        latent, rope = read_back(spec, pools, paged, chunk, q_nope.dtype, kv_scale)
        k = torch.mm(latent, w_uk.flatten(0, 1).t())
        v = torch.mm(latent, w_uv.flatten(0, 1).t())
        parts = TILE // chosen.queries
        prefill_kernel[(len(chunk.tiles) * parts, spec.num_heads)](
            q_nope, q_pe, k, rope, v, chunk.tiles, held, lse, out, spec.scale,
            q_nope.stride(0), q_nope.stride(1), q_pe.stride(0), q_pe.stride(1), out.stride(0), out.stride(1),
            H=spec.num_heads, V=spec.v_head_dim, R=spec.rope_dim, **_parts(spec),
            BLOCK_R=_padded(spec.rope_dim), BLOCK_V=_padded(spec.v_head_dim),
            PARTS=parts, QUERIES=chosen.queries, KEYS=chosen.keys, JOINED=plan.joined,
            PRECISION="ieee",
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def _attend_whole(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    prompt: Whole,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_scale: float,
    out: torch.Tensor,
) -> None:
    """cuDNN wants keys and queries whole: the rotated part beside the other, for every head.

    Rows behind the prompt's are zeros, which its own queries do not see.
    """
    count = prompt.tokens.stop - prompt.tokens.start
    latent, rope = read_back(spec, pools, paged, prompt, q_nope.dtype, kv_scale)
    latent[count:], rope[count:] = 0, 0
    shape = (prompt.rows, spec.num_heads, spec.nope_dim + spec.rope_dim)
    k, q = latent.new_empty(shape), latent.new_empty(shape)
    torch.bmm(latent.expand(spec.num_heads, -1, -1), w_uk.transpose(1, 2), out=k[..., : spec.nope_dim].transpose(0, 1))
    k[..., spec.nope_dim :] = rope[:, None]
    v = torch.mm(latent, w_uv.flatten(0, 1).t()).unflatten(1, (spec.num_heads, -1))
    q[:count, :, : spec.nope_dim], q[:count, :, spec.nope_dim :] = q_nope[prompt.tokens], q_pe[prompt.tokens]
    q[count:] = 0
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=spec.scale)
    out[prompt.tokens] = found[0].transpose(0, 1)[:count]


def read_back(
    spec: MlaSpec,
    pools: Mapping[str, torch.Tensor],
    paged: PageIndex,
    chunk: Chunk | Whole,
    dtype: torch.dtype,
    kv_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a chunk as numbers: [rows, C] and [rows, R] of `dtype`."""
    device = paged.table.device
    latent = torch.empty(chunk.rows, spec.latent_dim, dtype=dtype, device=device)
    rope = torch.empty(chunk.rows, spec.rope_dim, dtype=dtype, device=device)
    c_pool, pe_pool, factors = planes(spec, pools)
    step = ROWS if device.type == "cpu" else 8
    gather_kernel[(len(chunk.blocks), ROWS // step)](
        c_pool, pe_pool, factors, paged.table, chunk.blocks, latent, rope, kv_scale,
        *c_pool.stride()[:2], *pe_pool.stride()[:2], *factors.stride()[:2], paged.table.stride(0),
        C=spec.latent_dim, R=spec.rope_dim, PAGE=paged.page_size, BLOCK_C=_padded(spec.latent_dim),
        BLOCK_R=_padded(spec.rope_dim), STEP=step, SCALED=spec.row_format == "scaled", num_warps=4,
    )  # fmt: skip
    return latent, rope


def _padded(size: int) -> int:
    return max(16, next_power_of_2(size))


def _parts(spec: MlaSpec) -> dict[str, int]:
    """Query dims without rotation as a power of two and a rest, so that little is multiplied by zeros."""
    size = spec.nope_dim
    a = size if size == next_power_of_2(size) else next_power_of_2(size) // 2
    return {"A": a, "B": size - a, "BLOCK_A": _padded(a), "BLOCK_B": _padded(size - a)}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes in bf16: heads of 128 and 64 rotated, and of 192 and 64 with values of 256."""
    made = []
    for name, nope, values, joined in (("192/128", 128, 128, True), ("256/256", 192, 256, False)):
        spec = MlaSpec(
            num_heads=128, latent_dim=512, rope_dim=64, nope_dim=nope, v_head_dim=values, scale=0.07,
            kv_dtype=torch.bfloat16,
        )  # fmt: skip
        chosen = config(chip, spec, torch.bfloat16)
        signature = dict.fromkeys(("q", "q_pe", "k", "rope", "v", "out"), "*bf16")
        signature |= {"tiles": "*i32", "held": "*fp32", "lse": "*fp32", "scale": "fp32"}
        signature |= dict.fromkeys(("q_t", "q_h", "pe_t", "pe_h", "out_t", "out_h"), "i32")
        signature = {argument: kind if kind == "fp32" else f"{kind}:16" for argument, kind in signature.items()}
        constants = {
            "H": 128, **_parts(spec), "R": 64, "V": values, "BLOCK_R": 64, "BLOCK_V": values,
            "PARTS": TILE // chosen.queries, "QUERIES": chosen.queries, "KEYS": chosen.keys, "JOINED": joined,
            "PRECISION": "ieee",
        }  # fmt: skip
        made.append(
            Specialization(f"mla prefill {name}", prefill_kernel, signature, constants, chosen.warps, chosen.stages)
        )
    return made
