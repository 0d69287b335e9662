"""Everything a layer of compressed sparse attention writes, and its rotated queries, in one launch.

For every token: its queries and its window row, rotated; its compressor states, with the biased score; and the entry
that it closes, if it closes one: pooled from the tokens of this step, which come from the step's own tensors, and from
the saved states of earlier ones, then normed, rotated at the first token it owns, and stored. So no program waits for
another's store.

A program owns one token and one of window row, entry, index key, some heads. Rows are addressed in 64 bits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.attention.csa.rows import BLOCK
from allotrope.attention.mla.rows import FP8_MAX
from allotrope.attention.mla.triton_store import pow2_scale
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import clamped, higher_of, highest, largest_of
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import next_power_of_2

_LARGEST = tl.constexpr(FP8_MAX)
_GROUP = tl.constexpr(BLOCK)
# How rows are stored.
PLAIN = tl.constexpr(0)
PER_TENSOR = tl.constexpr(1)
SCALED = tl.constexpr(2)


@triton.jit
def turn(x, cos, sin, lead: tl.constexpr, width: tl.constexpr):
    """Rotate interleaved pairs. `x`: [lead, width]. `cos`, `sin`: [width / 2] of each pair, sin of its second half."""
    a, b = tl.split(tl.reshape(x, [lead, width // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [lead, width])


@triton.jit
def pair_angles(cos, sin, token, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """cos and sin of the pairs of a row of D, of which the last R turn: [BLOCK_D / 2] each. Tables: [T, R]."""
    second = 2 * tl.arange(0, BLOCK_D // 2) + 1 - (D - R)
    turned = (second > 0) & (second < R)
    at = token.to(tl.int64) * R + second
    return tl.load(cos + at, mask=turned, other=1.0), tl.load(sin + at, mask=turned, other=0.0)


@triton.jit
def _store_row(
    x, codes, tail, factors, slot, code_page, code_row, tail_page, tail_row, factor_page, factor_row, inverse,
    ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """`x`: [BLOCK_D] fp32. `codes`, `tail`, `factors`: the pool as its parts' types. ROWS: of a page."""
    page, row = slot // ROWS, slot % ROWS
    lane = tl.arange(0, BLOCK_D)
    if FORMAT == SCALED:
        plain: tl.constexpr = D - R
        x = tl.where(lane < D, x, 0.0)
        groups = tl.reshape(x, [BLOCK_D // _GROUP, _GROUP])
        group = tl.arange(0, BLOCK_D // _GROUP)
        factor = pow2_scale(largest_of(groups, 1))
        exponent = factor.to(tl.int32, bitcast=True) >> 23
        code = tl.reshape(groups / factor[:, None], [BLOCK_D])
        code = clamped(code, _LARGEST)
        tl.store(codes + page * code_page + row * code_row + lane, code.to(tl.float8e4nv), mask=lane < plain)
        to = tail + page * tail_page + row * tail_row + plain // 2 + (lane - plain)
        tl.store(to, x.to(tl.bfloat16), mask=(lane >= plain) & (lane < D))
        to = factors + page * factor_page + row * factor_row
        tl.store(to + group, exponent.to(tl.uint8), mask=group < plain // _GROUP)
        spare = plain // _GROUP + tl.arange(0, 8)
        tl.store(to + spare, tl.zeros([8], tl.uint8), mask=spare < (plain // _GROUP + 7) // 8 * 8)
    else:
        if FORMAT == PER_TENSOR:
            x = clamped(x * inverse, _LARGEST)
        tl.store(codes + page * code_page + row * code_row + lane, x.to(codes.dtype.element_ty), mask=lane < D)


@triton.jit
def _window_row(
    kv, slots, cos, sin, codes, tail, factors, token, kv_row, code_page, code_row, tail_page, tail_row, factor_page,
    factor_row, inverse,
    ROWS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        lane = tl.arange(0, BLOCK_D)
        x = tl.load(kv + token.to(tl.int64) * kv_row + lane, mask=lane < D, other=0.0)
        c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
        y = tl.reshape(turn(tl.reshape(x.to(tl.float32), [1, BLOCK_D]), c, s, 1, BLOCK_D), [BLOCK_D])
        # Rounded to the input's type first, as the reference does.
        _store_row(
            y.to(x.dtype).to(tl.float32), codes, tail, factors, slot, code_page, code_row, tail_page, tail_row,
            factor_page, factor_row, inverse, ROWS, D, R, BLOCK_D, FORMAT,
        )  # fmt: skip


@triton.jit
def _compress(
    kv_score, bias, norm, states, state_slots, state_table, entry_slots, positions, requests, query_start, cos, sin,
    codes, tail, factors, token, input_row, state_page, state_row, table_row, eps, code_page, code_row, tail_page,
    tail_row, factor_page, factor_row, inverse,
    STATE_ROWS: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr, STREAMS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Save one token's states, and make the entry that it closes."""
    lane = tl.arange(0, BLOCK_D)
    inside = lane < D
    width: tl.constexpr = STREAMS * D
    position = tl.load(positions + token).to(tl.int32)
    row = kv_score + token.to(tl.int64) * input_row
    slot = tl.load(state_slots + token).to(tl.int64)
    if slot >= 0:
        to = states + slot // STATE_ROWS * state_page + slot % STATE_ROWS * state_row
        for stream in tl.static_range(STREAMS):
            at = stream * D + lane
            tl.store(to + at, tl.load(row + at, mask=inside).to(tl.float32), mask=inside)
            score = tl.load(row + width + at, mask=inside).to(tl.float32)
            score += tl.load(bias + position % RATIO * width + at, mask=inside).to(tl.float32)
            tl.store(to + width + at, score, mask=inside)
    entry = tl.load(entry_slots + token).to(tl.int64)
    if (entry >= 0) & (position % RATIO == RATIO - 1):
        request = tl.load(requests + token)
        # The request's first position of this step.
        first = position - (token - tl.load(query_start + request))
        top = tl.full([BLOCK_D], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_D], tl.float32)
        pooled = tl.zeros([BLOCK_D], tl.float32)
        size: tl.constexpr = STREAMS * RATIO
        for begin in range(0, size, MEMBERS):
            member = begin + tl.arange(0, MEMBERS)
            at = position - (size - 1) + member
            counts = (member < size) & (at >= 0)
            column = (member // RATIO * D)[:, None] + lane[None, :]
            new = (counts & (at >= first))[:, None] & inside[None, :]
            old = (counts & (at < first))[:, None] & inside[None, :]
            source = (token + at - position).to(tl.int64) * input_row
            here = kv_score + source[:, None] + column
            page = tl.load(
                state_table + request * table_row + at // STATE_ROWS, mask=counts & (at < first), other=0
            ).to(tl.int64)  # fmt: skip
            saved = states + (page * state_page + at % STATE_ROWS * state_row)[:, None] + column
            kv = tl.load(here, mask=new, other=0.0).to(tl.float32) + tl.load(saved, mask=old, other=0.0)
            score = tl.load(here + width, mask=new, other=0.0).to(tl.float32)
            score += tl.load(bias + (at % RATIO * width)[:, None] + column, mask=new, other=0.0).to(tl.float32)
            score += tl.load(saved + width, mask=old, other=0.0)
            score = tl.where(counts[:, None], score, float("-inf"))
            best = higher_of(top, highest(score, 0))
            safe = tl.where(best == float("-inf"), 0.0, best)
            share = tl.exp(score - safe[None, :])
            fade = tl.exp(top - safe)
            total = total * fade + tl.sum(share, axis=0)
            pooled = pooled * fade + tl.sum(share * kv, axis=0)
            top = best
        x = tl.where(inside, pooled / total, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        x *= tl.load(norm + lane, mask=inside, other=0.0).to(tl.float32)
        c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
        y = tl.reshape(turn(tl.reshape(x, [1, BLOCK_D]), c, s, 1, BLOCK_D), [BLOCK_D])
        _store_row(
            y, codes, tail, factors, entry // RATIO, code_page, code_row, tail_page, tail_row, factor_page, factor_row,
            inverse, ROWS, D, R, BLOCK_D, FORMAT,
        )  # fmt: skip


@triton.jit
def _queries(
    q, turned, cos, sin, token, block, q_token, q_head,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one query. `turned`: [T, H, D]."""
    head, lane = block * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    inside = (head < H)[:, None] & (lane < D)[None, :]
    row = q + token.to(tl.int64) * q_token
    x = tl.load(row + head[:, None] * q_head + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    c, s = pair_angles(cos, sin, token, D, R, BLOCK_D)
    to = turned + (token.to(tl.int64) * H + head)[:, None] * D + lane[None, :]
    tl.store(to, turn(x, c, s, HEADS, BLOCK_D).to(turned.dtype.element_ty), mask=inside)


@pdl_jit
def store_kernel(
    q, turned, q_token, q_head,
    positions, requests, query_start, cos, sin, first_cos, first_sin, inverse, eps,
    kv, kv_row, window_slots, w_codes, w_tail, w_factors, wc_page, wc_row, wt_page, wt_row, wf_page, wf_row,
    kv_score, input_row, bias, norm, states, state_slots, state_table, state_page, state_row, table_row,
    entry_slots, e_codes, e_tail, e_factors, ec_page, ec_row, et_page, et_row, ef_page, ef_row,
    i_kv_score, i_input_row, i_bias, i_norm, i_states, i_state_slots, i_state_table, i_state_page, i_state_row,
    i_table_row, i_slots, i_keys, i_page, i_row,
    W_ROWS: tl.constexpr, STATE_ROWS: tl.constexpr, E_ROWS: tl.constexpr, I_STATE_ROWS: tl.constexpr,
    I_ROWS: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, RATIO: tl.constexpr, STREAMS: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr,
    BLOCK_D: tl.constexpr, INDEX_D: tl.constexpr, BLOCK_I: tl.constexpr, FORMAT: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Of the token `program_id(0)`: 0 the window row, 1 the entry, 2 the index key, then its queries by HEADS. `cos`,
    `sin`: [T, R] at the token, `first_*` at the first token of its entry. `w_`, `e_`: window and entry pools as
    `_store_row` has them."""
    gdc_wait()
    gdc_launch_dependents()
    token, what = tl.program_id(0), tl.program_id(1)
    if what == 0:
        _window_row(
            kv, window_slots, cos, sin, w_codes, w_tail, w_factors, token, kv_row, wc_page, wc_row, wt_page, wt_row,
            wf_page, wf_row, inverse, W_ROWS, D, R, BLOCK_D, FORMAT,
        )  # fmt: skip
    if what >= 3:
        _queries(q, turned, cos, sin, token, what - 3, q_token, q_head, H, D, R, BLOCK_D, HEADS)
    if RATIO > 0:  # noqa: SIM102 (not compiled otherwise)
        if what == 1:
            _compress(
                kv_score, bias, norm, states, state_slots, state_table, entry_slots, positions, requests, query_start,
                first_cos, first_sin, e_codes, e_tail, e_factors, token, input_row, state_page, state_row, table_row,
                eps, ec_page, ec_row, et_page, et_row, ef_page, ef_row, inverse, STATE_ROWS, E_ROWS, RATIO, STREAMS,
                D, R, BLOCK_D, FORMAT, MEMBERS,
            )  # fmt: skip
    if INDEX_D > 0:  # noqa: SIM102
        if what == 2:
            _compress(
                i_kv_score, i_bias, i_norm, i_states, i_state_slots, i_state_table, i_slots, positions, requests,
                query_start, first_cos, first_sin, i_keys, i_keys, i_keys, token, i_input_row, i_state_page,
                i_state_row, i_table_row, eps, i_page, i_row, i_page, i_row, i_page, i_row, 1.0, I_STATE_ROWS, I_ROWS,
                RATIO, STREAMS, INDEX_D, R, BLOCK_I, PLAIN, MEMBERS,
            )  # fmt: skip


def config(chip: Chip, dim: int, pooled: int) -> dict[str, int]:
    """`pooled`: tokens of an entry."""
    members = min(max(2, next_power_of_2(pooled)), 8)
    if pooled > 16 and chip.has_wgmma:
        return {"MEMBERS": 16, "HEADS": 8, "num_warps": 8, "num_stages": 1}
    return {"MEMBERS": members, "HEADS": 4, "num_warps": 4 if dim > 128 else 2, "num_stages": 1}


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Released sizes: entries of 4 tokens with an indexer, of 128 without, plain and scaled."""
    made = []
    for name, row, ratio, streams in (
        ("4 bf16", ("*bf16:16",) * 3, 4, 2),
        ("4 scaled", ("*fp8e4nv:16", "*bf16:16", "*u8:16"), 4, 2),
        ("128 bf16", ("*bf16:16",) * 3, 128, 1),
    ):
        launch = config(chip, 512, ratio * streams)
        signature = dict.fromkeys(("positions", "requests", "window_slots", "entry_slots", "i_slots"), "*i64:16")
        signature |= dict.fromkeys(("state_slots", "state_table", "i_state_slots", "i_state_table"), "*i64:16")
        signature |= dict.fromkeys(("cos", "sin", "first_cos", "first_sin", "bias", "norm", "i_bias"), "*fp32:16")
        signature |= dict.fromkeys(("kv_score", "states", "i_kv_score", "i_states", "i_norm"), "*fp32:16")
        signature |= {
            "query_start": "*i32:16",
            "kv": "*bf16:16",
            "i_keys": "*bf16:16",
            "inverse": "fp32",
            "eps": "fp32",
        }
        signature |= dict.fromkeys(("kv_row", "input_row", "state_page", "state_row", "i_input_row"), "i32:16")
        signature |= dict.fromkeys(("i_state_page", "i_state_row", "i_page", "i_row"), "i32:16")
        signature |= dict.fromkeys(("table_row", "i_table_row"), "i32") | dict.fromkeys(("q", "turned"), "*bf16:16")
        signature |= dict.fromkeys(("q_token", "q_head"), "i32:16")
        for pool in ("w", "e"):
            signature |= dict(zip((f"{pool}_codes", f"{pool}_tail", f"{pool}_factors"), row, strict=True))
            signature |= dict.fromkeys((f"{pool}{part}_{at}" for part in "ctf" for at in ("page", "row")), "i32:16")
        constants = {"W_ROWS": 64, "STATE_ROWS": 8, "E_ROWS": 256 // ratio, "I_STATE_ROWS": 8, "I_ROWS": 64}
        constants |= {"RATIO": ratio, "STREAMS": streams, "D": 512, "R": 64, "BLOCK_D": 512, "BLOCK_I": 128}
        constants |= {"INDEX_D": 128 if ratio == 4 else 0, "FORMAT": 2 if "scaled" in name else 0}
        constants |= {"MEMBERS": launch["MEMBERS"], "HEADS": launch["HEADS"], "H": 64}
        made.append(Specialization(f"csa store {name}", store_kernel, signature, constants, launch["num_warps"], 1))
    return made
