"""The recurrence from chunk to chunk: what depends on the state, and the state itself.

With S the state before a chunk, E = V - e^G K S and D = mix E (see `triton_pairs`):

    O = e^G Q S + scores D          S <- e^(G_last) S + (e^(G_last - G) K)^T D

A program owns BLOCK_V value channels of one value head of one request and walks its chunks. It holds S transposed, so
that S, E and D go from one product to the next in registers: only keys, queries and what `triton_pairs` made come from
memory, one chunk ahead.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import no_pdl_jit
from allotrope.kernels.tiles import next_power_of_2


# Not launched early: its few long programs would begin beside the last of the kernel before, several of them on one
# multiprocessor, and stay there. Prefills begin behind the decodes, so at any alignment: no kernel is compiled for one.
@no_pdl_jit(do_not_specialize_on_alignment=["query_start", "seq_lens", "slots"])
def scan_kernel(
    mixed, mix, scores, grown, rest, seen_keys, queries, keys, last, ssm, out, query_start, seq_lens, slots,
    first_chunk, ssm_slot, value_scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`first_chunk`: [B] int32, with CHANNEL the first row of each request in `last`. `grown`, `rest` are read without
    CHANNEL, `seen_keys`, `queries`, `keys` and `last` with it. `value_scale`: values and state are held divided by it.
    """
    part, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    slot = tl.load(slots + request).to(tl.int64)
    key, value, place = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, CHUNK)
    in_key, in_value = key < DK, value < DV
    width: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    if slot <= 0:
        for at in range(0, length, CHUNK):
            token = (begin + at + place).to(tl.int64)
            to = out + ((token * VALUE_HEADS + head) * DV)[None, :] + value[:, None]
            there = in_value[:, None] & (at + place < length)[None, :]
            tl.store(to, tl.zeros([BLOCK_V, CHUNK], out.dtype.element_ty), mask=there)
        return
    fresh = tl.load(seq_lens + request) == length
    cell = ssm + slot * ssm_slot + head * (DK * DV) + key[None, :] * DV + value[:, None]
    in_cell = in_key[None, :] & in_value[:, None]
    state = tl.load(cell, mask=in_cell & (fresh == 0), other=0.0).to(tl.float32) * (1.0 / value_scale)
    dtype = mixed.dtype.element_ty
    # From the chunk's first token: 32 bits are enough, and do not change from chunk to chunk.
    group = head // (VALUE_HEADS // KEY_HEADS)
    to_value = (place * width)[None, :] + (2 * KEY_HEADS * DK + head * DV + value)[:, None]
    to_key = (place * width)[:, None] + (group * DK + key)[None, :]
    to_scaled = (place * (VALUE_HEADS * DK))[:, None] + (head * DK + key)[None, :]
    to_pair = (place * (VALUE_HEADS * CHUNK))[:, None] + (head * CHUNK + place)[None, :]
    to_gate = place * VALUE_HEADS + head
    to_out = (place * (VALUE_HEADS * DV))[None, :] + (head * DV + value)[:, None]
    for at in tl.range(0, length, CHUNK, num_stages=STAGES):
        first = (begin + at).to(tl.int64)
        inside = place < length - at
        there = inside[:, None] & in_key[None, :]
        # [BLOCK_V, CHUNK]
        v = tl.load(mixed + first * width + to_value, mask=in_value[:, None] & inside[None, :], other=0.0)
        held = state.to(dtype)
        if CHANNEL:
            base = first * (VALUE_HEADS * DK)
            seen_k = tl.load(seen_keys + base + to_scaled, mask=there, other=0.0)
            q = tl.load(queries + base + to_scaled, mask=there, other=0.0)
            k = tl.load(keys + base + to_scaled, mask=there, other=0.0)
            from_k = tl.dot(held, tl.trans(seen_k), input_precision=PRECISION)
            from_q = tl.dot(held, tl.trans(q), input_precision=PRECISION)
        else:
            base = mixed + first * width
            q = tl.load(base + to_key, mask=there, other=0.0)
            k = tl.load(base + KEY_HEADS * DK + to_key, mask=there, other=0.0)
            scale = tl.load(grown + first * VALUE_HEADS + to_gate, mask=inside, other=0.0)
            from_k = tl.dot(held, tl.trans(k), input_precision=PRECISION) * scale[None, :]
            from_q = tl.dot(held, tl.trans(q), input_precision=PRECISION) * scale[None, :]
        left = (v.to(tl.float32) - from_k).to(dtype)
        base = first * (VALUE_HEADS * CHUNK)
        mixing = tl.load(mix + base + to_pair, mask=inside[:, None], other=0.0)
        delta = tl.dot(left, tl.trans(mixing), input_precision=PRECISION)
        score = tl.load(scores + base + to_pair, mask=inside[:, None], other=0.0)
        if CHANNEL:
            chunk = (tl.load(first_chunk + request) + at // CHUNK).to(tl.int64)
            final = tl.load(last + (chunk * VALUE_HEADS + head) * DK + key, mask=in_key, other=0.0)
            state = tl.dot(delta.to(dtype), k, state * final[None, :], input_precision=PRECISION)
        else:
            behind = tl.load(rest + first * VALUE_HEADS + to_gate, mask=inside, other=0.0)
            end = begin + min(at + CHUNK, length) - 1
            final = tl.load(grown + end.to(tl.int64) * VALUE_HEADS + head)
            state = tl.dot((delta * behind[None, :]).to(dtype), k, state * final, input_precision=PRECISION)
        o = tl.dot(delta.to(dtype), tl.trans(score), from_q, input_precision=PRECISION)
        to = out + first * (VALUE_HEADS * DV) + to_out
        tl.store(to, (o * value_scale).to(out.dtype.element_ty), mask=in_value[:, None] & inside[None, :])
    tl.store(cell, (state * value_scale).to(ssm.dtype.element_ty), mask=in_cell)


def config(chip: Chip, key_dim: int, value_dim: int, half: bool) -> dict[str, int]:
    """`half`: products of fp16. Narrow parts of the state: one long request has to fill the chip."""
    block_v = min(32, max(16, next_power_of_2(value_dim)))
    block_k = max(16, next_power_of_2(key_dim))
    stages = 3 if chip.has_wgmma and half and block_k <= 128 else 1
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": 4, "STAGES": stages}
