"""The causal convolution of the prompts, and the update of the conv state.

The output is [q | k | v] after SiLU, with L2-normalized queries and keys. It has the type of the chunked form's matrix
products: fp16 for 16-bit inputs, since its three additional bits over bf16 keep the error of the chunked form below the
rounding of the output. Normalized queries and keys fit into fp16. Values are divided by VALUE_SCALE, a power of two,
which leaves room up to 2^20.
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
    qkv, weight, bias, conv, conv_out, chunks, query_start, seq_lens, slots,
    qkv_row, weight_channel, weight_w, conv_slot, conv_row, scale, eps, value_scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program owns one head (of queries, keys or values) of TOKENS tokens of a chunk.

    `conv_out`: [T, conv_dim] output. `chunks`: [N, 2] int32, request and the index of the chunk's first token among the
    request's new ones.
    """
    # Heads of the same tokens are neighbouring programs: their inputs are contiguous.
    gdc_wait()
    gdc_launch_dependents()
    head, token_block = tl.program_id(0), tl.program_id(1)
    chunk = token_block // (CHUNK // TOKENS)
    request, start = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    start += token_block % (CHUNK // TOKENS) * TOKENS
    slot = tl.load(slots + request).to(tl.int64)
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    if (slot <= 0) | (start >= length):
        return
    is_new = tl.load(seq_lens + request) == length
    is_key = head < 2 * KEY_HEADS
    dim = tl.where(is_key, DK, DV)
    base = tl.where(is_key, head * DK, 2 * KEY_HEADS * DK + (head - 2 * KEY_HEADS) * DV)
    offs_c, offs_t = tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    channel, mask_c = base + offs_c, offs_c < dim
    x_ptr = qkv + (begin + start).to(tl.int64) * qkv_row
    state_ptr = conv + slot * conv_slot
    y = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        # Add the input `lag` tokens before each token.
        lag = WIDTH - 1 - j
        mask_x = ((offs_t >= lag - start) & (offs_t < length - start))[:, None] & mask_c[None, :]
        x = tl.load(x_ptr + ((offs_t - lag) * qkv_row)[:, None] + channel[None, :], mask=mask_x, other=0.0).to(
            tl.float32
        )
        if (lag > 0) & (start < WIDTH):
            mask_state = ((offs_t < lag - start) & (is_new == 0))[:, None] & mask_c[None, :]
            state_ptrs = state_ptr + ((start + offs_t + j) * conv_row)[:, None] + channel[None, :]
            x += tl.load(state_ptrs, mask=mask_state, other=0.0).to(tl.float32)
        w = tl.load(weight + channel * weight_channel + j * weight_w, mask=mask_c, other=0.0)
        y += x * w.to(tl.float32)[None, :]
    if BIAS:
        y += tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    y = silu(y)
    if is_key:
        y = tl.where(mask_c[None, :], y, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + eps)[:, None] * tl.where(head < KEY_HEADS, scale, 1.0)
    else:
        y = clamped(y, 65504.0) * value_scale
    conv_dim: tl.constexpr = 2 * KEY_HEADS * DK + VALUE_HEADS * DV
    out_ptrs = conv_out + (begin + start).to(tl.int64) * conv_dim + (offs_t * conv_dim)[:, None] + channel[None, :]
    tl.store(out_ptrs, y.to(conv_out.dtype.element_ty), mask=(offs_t < length - start)[:, None] & mask_c[None, :])


# Prompts begin behind the decodes, at any alignment: one kernel has to serve all of them.
@pdl_jit(do_not_specialize_on_alignment=["query_start", "seq_lens", "slots"])
def update_conv_state_kernel(
    qkv, conv, query_start, seq_lens, slots, qkv_row, conv_slot, conv_row, channels,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the last WIDTH - 1 inputs of each request as its conv state. A program owns BLOCK channels of one request.

    Row j of the new state is row j + length of the old one if that exists, so that no row is read after it is
    overwritten.
    """
    gdc_wait()
    gdc_launch_dependents()
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_c = channel < channels
    slot = tl.load(slots + request).to(tl.int64)
    if slot <= 0:
        return
    begin = tl.load(query_start + request)
    length = tl.load(query_start + request + 1) - begin
    is_new = tl.load(seq_lens + request) == length
    state_ptrs = conv + slot * conv_slot + channel
    for j in tl.static_range(WIDTH - 1):
        source = length - (WIDTH - 1) + j
        if source >= 0:
            x = tl.load(qkv + (begin + source).to(tl.int64) * qkv_row + channel, mask=mask_c, other=0.0)
            x = x.to(conv.dtype.element_ty)
        else:
            x = tl.load(state_ptrs + (length + j) * conv_row, mask=mask_c & (is_new == 0), other=0.0)
        tl.debug_barrier()
        tl.store(state_ptrs + j * conv_row, x, mask=mask_c)


def config(chip: Chip, dim: int) -> dict[str, int]:
    """Launch parameters of `conv_kernel`. `dim`: the larger of the two head dims."""
    return {"BLOCK": max(16, next_power_of_2(dim)), "TOKENS": 16, "num_warps": 4, "num_stages": 1}
