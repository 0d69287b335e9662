"""Attention of single queries over lists of rows: the window's, then the entries'.

A program owns some heads of one query and every SPLITS-th part of its list: all its heads share the rows, each of which
is key and value and is read once a program. It rotates the sum as it goes out, unless the list is split: then
`combine_kernel` adds the parts, the sink and the rotation. FP8 rows are read as they lie.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.csa.rows import BLOCK
from allotrope.attention.csa.triton_store import SCALED, pair_angles, turn
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import higher_of, highest
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.softmax import LOG2E
from allotrope.kernels.tiles import next_power_of_2

_GROUP = tl.constexpr(BLOCK)


@triton.jit
def _rows(
    codes, tail, factors, row, code_row, tail_row, factor_row, dtype,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Rows `row` [TILE] of a pool as [TILE, BLOCK_D] numbers; 0 where it is negative. Per-tensor FP8 stays divided."""
    valid = row >= 0
    row = tl.where(valid, row, 0).to(tl.int64)
    if FORMAT == SCALED:
        plain: tl.constexpr = D - R
        groups: tl.constexpr = BLOCK_D // _GROUP
        group, lane = tl.arange(0, groups), tl.arange(0, _GROUP)
        held = valid[:, None] & (group < plain // _GROUP)[None, :]
        at = (row * code_row)[:, None, None] + (group * _GROUP)[None, :, None] + lane[None, None, :]
        x = tl.load(codes + at, mask=held[:, :, None], other=0.0)
        exponent = tl.load(factors + (row * factor_row)[:, None] + group[None, :], mask=held, other=0)
        factor = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        # Codes times a power of two are exact in every type but fp16, whose range the reference's rows fit as well.
        x = (x.to(tl.float32) * factor[:, :, None]).to(dtype)
        at = (row * tail_row)[:, None] + plain // 2 + lane[None, :]
        turned = tl.load(tail + at, mask=valid[:, None] & (lane < R)[None, :], other=0.0).to(dtype)
        x = tl.where((group == plain // _GROUP)[None, :, None], turned[:, None, :], x)
        x = tl.reshape(x, [TILE, BLOCK_D])
    else:
        lane = tl.arange(0, BLOCK_D)
        at = codes + (row * code_row)[:, None] + lane[None, :]
        if D == BLOCK_D:
            x = tl.load(at, mask=valid[:, None], other=0.0)
        else:
            x = tl.load(at, mask=valid[:, None] & (lane < D)[None, :], other=0.0)
        x = x.to(dtype)
    return x


@triton.jit
def _meet(q, k, valid, top, total, summed, scale, PRECISION: tl.constexpr):
    """One more tile of rows `k` [n, D] for queries `q` [h, D]. `scale`: of logits, to base 2."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    best = higher_of(top, highest(logits, 1))
    safe = tl.where(best == float("-inf"), 0.0, best)
    share = tl.exp2(logits - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(share, axis=1)
    summed = tl.dot(share.to(k.dtype), k, summed * fade[:, None], input_precision=PRECISION)
    return best, total, summed


@pdl_jit
def attend_kernel(
    q, out, partial, stats, sinks, cos, sin, window_list, window_seen, entry_list, entry_seen,
    w_codes, w_tail, w_factors, wc_row, wt_row, wf_row, e_codes, e_tail, e_factors, ec_row, et_row, ef_row,
    window_row, entry_row, scale, row_scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, FORMAT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`q`: [T, H, D], rotated. `window_list`, `entry_list`: [T, .] int32 rows, of which the first `window_seen`,
    `entry_seen` [T] count, and -1. `row_scale`: of per-tensor FP8 rows.
    """
    gdc_wait()
    gdc_launch_dependents()
    token, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_window, n_entries = tl.load(window_seen + token), tl.load(entry_seen + token)
    window_tiles = tl.cdiv(n_window, TILE)
    tiles = window_tiles + tl.cdiv(n_entries, TILE)
    share = tl.cdiv(tiles, SPLITS)
    begin = split * share
    end = min(begin + share, tiles)
    head, lane, place = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    in_head = head < H
    inside = in_head[:, None] & (lane < D)[None, :]
    dtype = q.dtype.element_ty
    # Loaded and used as it is: then it stays in shared memory, where the products read it.
    x = tl.load(q + (token.to(tl.int64) * H + head)[:, None] * D + lane[None, :], mask=inside, other=0.0)
    factor = scale * row_scale * LOG2E
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    summed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    rows = window_list + token.to(tl.int64) * window_row
    for tile in tl.range(begin, min(end, window_tiles), num_stages=STAGES):
        index = tile * TILE + place
        row = tl.load(rows + index, mask=index < n_window, other=-1)
        k = _rows(w_codes, w_tail, w_factors, row, wc_row, wt_row, wf_row, dtype, D, R, BLOCK_D, TILE, FORMAT)
        top, total, summed = _meet(x, k, row >= 0, top, total, summed, factor, PRECISION)
    rows = entry_list + token.to(tl.int64) * entry_row
    for tile in tl.range(max(begin - window_tiles, 0), end - window_tiles, num_stages=STAGES):
        index = tile * TILE + place
        row = tl.load(rows + index, mask=index < n_entries, other=-1)
        k = _rows(e_codes, e_tail, e_factors, row, ec_row, et_row, ef_row, dtype, D, R, BLOCK_D, TILE, FORMAT)
        top, total, summed = _meet(x, k, row >= 0, top, total, summed, factor, PRECISION)
    if SPLITS > 1:
        # Parts are written as means, which are no larger than the rows; an empty one is not written.
        at = (token.to(tl.int64) * SPLITS + split) * H + head
        mean = summed * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        there = inside & (begin < end)
        tl.store(partial + at[:, None] * D + lane[None, :], mean.to(partial.dtype.element_ty), mask=there)
        none = total == 0
        tl.store(stats + at, tl.where(none, float("-inf"), top + tl.log2(tl.where(none, 1.0, total))), mask=in_head)
    else:
        sink = tl.load(sinks + head, mask=in_head, other=float("-inf")).to(tl.float32) * LOG2E
        best = higher_of(top, sink)
        safe = tl.where(best == float("-inf"), 0.0, best)
        fade = tl.exp2(top - safe)
        weight = total * fade + tl.exp2(sink - safe)
        o = summed * (row_scale * fade / tl.where(weight > 0, weight, 1.0))[:, None]
        c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
        o = turn(o, c, -s, BLOCK_H, BLOCK_D)
        to = out + (token.to(tl.int64) * H + head)[:, None] * D + lane[None, :]
        tl.store(to, o.to(dtype), mask=inside)


@pdl_jit
def combine_kernel(
    partial, stats, sinks, cos, sin, out, row_scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Add the parts of BLOCK_H heads of one query."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0)
    head, lane = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    in_head = head < H
    inside = in_head[:, None] & (lane < D)[None, :]
    sink = tl.load(sinks + head, mask=in_head, other=float("-inf")).to(tl.float32) * LOG2E
    best = sink
    for split in tl.static_range(SPLITS):
        at = (token.to(tl.int64) * SPLITS + split) * H + head
        best = higher_of(best, tl.load(stats + at, mask=in_head, other=float("-inf")))
    safe = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp2(sink - safe)
    summed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in tl.static_range(SPLITS):
        at = (token.to(tl.int64) * SPLITS + split) * H + head
        share = tl.exp2(tl.load(stats + at, mask=in_head, other=float("-inf")) - safe)
        there = inside & (share > 0)[:, None]
        part = tl.load(partial + at[:, None] * D + lane[None, :], mask=there, other=0.0).to(tl.float32)
        summed += share[:, None] * part
        weight += share
    c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
    o = turn(summed * (row_scale / tl.where(weight > 0, weight, 1.0))[:, None], c, -s, BLOCK_H, BLOCK_D)
    to = out + (token.to(tl.int64) * H + head)[:, None] * D + lane[None, :]
    tl.store(to, o.to(out.dtype.element_ty), mask=inside)


def config(chip: Chip, dim: int, heads: int, exact: bool, plain: bool) -> dict[str, int]:
    """`exact`: rows and queries of fp32. `plain`: rows are copied as they are, the next tile on its way meanwhile."""
    block_h = max(16, next_power_of_2(heads))
    if chip.vendor == "cpu":
        return {"BLOCK_H": min(block_h, 16), "TILE": 16, "STAGES": 1, "num_warps": 4}
    if not chip.has_wgmma:
        return {"BLOCK_H": 16, "TILE": 16, "STAGES": 1, "num_warps": 4}
    if exact:
        return {"BLOCK_H": 16, "TILE": 16, "STAGES": 1, "num_warps": 4}
    block_h = min(block_h, 64)
    return {"BLOCK_H": block_h, "TILE": 64, "STAGES": 2 if plain else 1, "num_warps": 8 if block_h == 64 else 4}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """64 heads of 512 on plain and scaled rows, and parts of a list; FP32 as `verify` runs it."""
    made = []
    for name, kind, row, plain in (
        ("bf16", "*bf16:16", ("*bf16:16",) * 3, True),
        ("fp8", "*bf16:16", ("*fp8e4nv:16",) * 3, False),
        ("scaled", "*bf16:16", ("*fp8e4nv:16", "*bf16:16", "*u8:16"), False),
        ("fp32", "*fp32:16", ("*fp32:16",) * 3, True),
    ):
        launch = config(chip, 512, 64, name == "fp32", plain)
        warps = launch.pop("num_warps")
        signature = dict.fromkeys(("q", "out"), kind) | {"partial": "*fp16:16"}
        signature |= dict.fromkeys(("stats", "sinks", "cos", "sin"), "*fp32:16")
        signature |= dict.fromkeys(("window_list", "window_seen", "entry_list", "entry_seen"), "*i32:16")
        for pool in ("w", "e"):
            signature |= dict(zip((f"{pool}_codes", f"{pool}_tail", f"{pool}_factors"), row, strict=True))
            signature |= dict.fromkeys((f"{pool}{part}_row" for part in "ctf"), "i32:16")
        signature |= dict.fromkeys(("window_row", "entry_row"), "i32:16")
        signature |= dict.fromkeys(("scale", "row_scale"), "fp32")
        precision = "tf32x3" if name == "fp32" and chip.has_tf32 else "ieee"
        constants = {"H": 64, "D": 512, "R": 64, "BLOCK_D": 512, "SPLITS": 2, "PRECISION": precision}
        constants |= {"FORMAT": {"fp8": 1, "scaled": 2}.get(name, 0)}
        # In fp32 it only proves itself: how fast it is matters to nobody.
        spills = {"bf16": 256, "fp8": 1200, "scaled": 1200, "fp32": 6400}[name]
        made.append(
            Specialization(f"csa attend {name}", attend_kernel, signature, constants | launch, warps, 3, spills)
        )
    signature = {"partial": "*fp16:16", "out": "*bf16:16", "row_scale": "fp32"}
    signature |= dict.fromkeys(("stats", "sinks", "cos", "sin"), "*fp32:16")
    constants = {"H": 64, "D": 512, "R": 64, "BLOCK_H": 8, "BLOCK_D": 512, "SPLITS": 2}
    return [*made, Specialization("csa combine", combine_kernel, signature, constants, 4, 3)]
