"""The convolution of a prefill over requests of any length, and the inputs it keeps for the next step.

What it writes, [q | k | v] after SiLU with queries and keys of unit length, is read by the chunked form's products, so
it has their type: fp16 for half-precision inputs, whose three further bits keep the chunked form's error below that of
the rounded output. Queries and keys fit it by their length; values are divided by VALUE_SCALE, a power of two, which
leaves room for 2^20.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl

from allotrope.attention.gdn.spec import KERNEL_CHUNK
from allotrope.attention.gdn.triton_gates import silu
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import clamped
from allotrope.kernels.tiles import next_power_of_2

CHUNK = KERNEL_CHUNK
VALUE_SCALE = 16.0


@pdl_jit
def conv_kernel(
    qkv, weight, bias, conv, mixed, chunks, query_start, seq_lens, slots,
    qkv_row, weight_channel, weight_tap, conv_slot, conv_row, scale, eps, value_scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program owns one head (of queries, keys or values) of TOKENS tokens of a chunk.

    `mixed`: [T, conv_dim] output. `chunks`: [N, 2] int32, request and place of the chunk's first token in its step.
    """
    # Heads of the same tokens run side by side: their rows are one run of memory.
    gdc_wait()
    gdc_launch_dependents()
    head, part = tl.program_id(0), tl.program_id(1)
    chunk = part // (CHUNK // TOKENS)
    request, place = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    place += part % (CHUNK // TOKENS) * TOKENS
    slot = tl.load(slots + request).to(tl.int64)
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    if (slot <= 0) | (place >= length):
        return
    fresh = tl.load(seq_lens + request) == length
    is_key = head < 2 * KEY_HEADS
    dim = tl.where(is_key, DK, DV)
    base = tl.where(is_key, head * DK, 2 * KEY_HEADS * DK + (head - 2 * KEY_HEADS) * DV)
    lane, line = tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    channel, inside = base + lane, lane < dim
    row = qkv + (begin + place).to(tl.int64) * qkv_row
    kept = conv + slot * conv_slot
    y = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        # Of each token's inputs the one that is `back` tokens older.
        back = WIDTH - 1 - j
        here = ((line >= back - place) & (line < length - place))[:, None] & inside[None, :]
        x = tl.load(row + ((line - back) * qkv_row)[:, None] + channel[None, :], mask=here, other=0.0).to(tl.float32)
        if (back > 0) & (place < WIDTH):
            before = ((line < back - place) & (fresh == 0))[:, None] & inside[None, :]
            old = kept + ((place + line + j) * conv_row)[:, None] + channel[None, :]
            x += tl.load(old, mask=before, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * weight_channel + j * weight_tap, mask=inside, other=0.0)
        y += x * tap.to(tl.float32)[None, :]
    if BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = silu(y)
    if is_key:
        y = tl.where(inside[None, :], y, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None] * tl.where(head < KEY_HEADS, scale, 1.0)
    else:
        y = clamped(y, 65504.0) * value_scale
    width: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    to = mixed + (begin + place).to(tl.int64) * width + (line * width)[:, None] + channel[None, :]
    tl.store(to, y.to(mixed.dtype.element_ty), mask=(line < length - place)[:, None] & inside[None, :])


# Prefills begin behind the decodes, so at any alignment: it must not matter which kernel is compiled.
@pdl_jit(do_not_specialize_on_alignment=["query_start", "seq_lens", "slots"])
def keep_kernel(
    qkv, conv, query_start, seq_lens, slots, qkv_row, conv_slot, conv_row, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep the last WIDTH - 1 inputs of each request. A program owns BLOCK channels of one request.

    Kept row j comes from row j + length of what was kept, if that exists: never from one already overwritten.
    """
    gdc_wait()
    gdc_launch_dependents()
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        return
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    fresh = tl.load(seq_lens + request) == length
    kept = conv + slot * conv_slot + channel
    for j in tl.static_range(WIDTH - 1):
        source = length - (WIDTH - 1) + j
        if source >= 0:
            x = tl.load(qkv + (begin + source).to(tl.int64) * qkv_row + channel, mask=inside, other=0.0)
            x = x.to(conv.dtype.element_ty)
        else:
            x = tl.load(kept + (length + j) * conv_row, mask=inside & (fresh == 0), other=0.0)
        tl.debug_barrier()
        tl.store(kept + j * conv_row, x, mask=inside)


def config(chip: Chip, dim: int) -> dict[str, int]:
    """Of `conv_kernel`. `dim`: the larger of a key and a value head."""
    return {"BLOCK": max(16, next_power_of_2(dim)), "TOKENS": 16, "num_warps": 4, "num_stages": 1}
