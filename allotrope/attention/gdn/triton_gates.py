"""Device functions of the gated delta rule: its gates, and one step of the convolution."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from allotrope.kernels.propagate_nan import at_least


@triton.jit
def softplus(x):
    """log(1 + e^x) to the last bits: log(1 + z) is 2 atanh(z / (2 + z)), a short series for z = e^-|x| <= 1."""
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)
    t = s * s
    tail = t * (1 / 9 + t * (1 / 11 + t * (1 / 13)))
    return at_least(x, 0.0) + 2.0 * s * (1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + tail))))


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def decayed(
    state, a_ptr, a_rate, A_log, dt_bias, head, offs_k, mask_k, DK: tl.constexpr, CHANNEL: tl.constexpr
):  # fmt: skip
    """e^g S of one token. `state`: [BLOCK_K, BLOCK_V] of value head `head`. `a_ptr`: the token's a."""
    A = tl.exp(tl.load(A_log + head).to(tl.float32))
    if CHANNEL:
        channel = head * DK + offs_k
        dt = tl.load(a_ptr + channel * a_rate, mask=mask_k, other=0.0).to(tl.float32)
        dt += tl.load(dt_bias + channel, mask=mask_k, other=0.0).to(tl.float32)
        state *= tl.exp(-A * softplus(dt))[:, None]
    else:
        dt = tl.load(a_ptr + head * a_rate).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        state *= tl.exp(-A * softplus(dt))
    return state


@triton.jit
def conv_step(
    x_ptr, conv_state, weight, bias, channel, mask_c, is_new, state_row, weight_channel, weight_w,
    WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of one token. `x_ptr`: its inputs. `conv_state`: the previous inputs; zeros if `is_new`.

    Which product is rounded before the sum is stated, and not left to the compiler: verify steps have the same bits.
    """
    w_ptrs = weight + channel * weight_channel
    x = tl.load(x_ptr + channel, mask=mask_c, other=0.0).to(tl.float32)
    last = tl.load(w_ptrs + (WIDTH - 1) * weight_w, mask=mask_c, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH - 1):
        state = tl.load(conv_state + j * state_row + channel, mask=mask_c & (is_new == 0), other=0.0).to(tl.float32)
        tap = tl.load(w_ptrs + j * weight_w, mask=mask_c, other=0.0).to(tl.float32)
        if j == 0:
            y = tl.fma(x, last, state * tap)
        else:
            y = tl.fma(state, tap, y)
    if BIAS:
        y += tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32)
    return silu(y)


@triton.jit
def update_conv_state(x_ptr, conv_state, channel, mask_c, is_new, state_row, WIDTH: tl.constexpr):
    """Drop the oldest input of the conv state and append the token's. All readers of these channels must be done."""
    for j in tl.static_range(WIDTH - 2):
        state = tl.load(conv_state + (j + 1) * state_row + channel, mask=mask_c & (is_new == 0), other=0.0)
        tl.debug_barrier()
        tl.store(conv_state + j * state_row + channel, state, mask=mask_c)
    x = tl.load(x_ptr + channel, mask=mask_c, other=0.0)
    tl.debug_barrier()
    tl.store(conv_state + (WIDTH - 2) * state_row + channel, x.to(conv_state.dtype.element_ty), mask=mask_c)
