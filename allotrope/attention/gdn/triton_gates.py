"""Device functions of the gated delta rule: its gates, and one step of the convolution."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"
# Triton's compiler knows no (*tuple, item).
# ruff: noqa: RUF005
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
def dot(a, b, a_high, b_high):
    """Sum of products over key channels, which are given as a low and a high half.

    Of two products that are added the compiler may round either before the sum. So it is stated here, for all kernels
    to give a token the same bits; see `conv_token`.
    """
    return tl.sum(tl.fma(a, b, a_high * b_high), axis=0)


@triton.jit
def normalized(x, x_high, factor, eps):
    """Both halves of a head's key channels, with norm `factor`."""
    norm = tl.rsqrt(dot(x, x, x_high, x_high) + eps) * factor
    return x * norm, x_high * norm


@triton.jit
def load_rates(A_log, dt_bias, head, low, high, mask_low, mask_high, DK: tl.constexpr, CHANNEL: tl.constexpr):
    """e^A_log and dt_bias of a value head; dt_bias of the low and the high half of its key channels if CHANNEL."""
    A = tl.exp(tl.load(A_log + head).to(tl.float32))
    if CHANNEL:
        bias = dt_bias + head * DK
        dt = tl.load(bias + low, mask=mask_low, other=0.0).to(tl.float32)
        dt_high = tl.load(bias + high, mask=mask_high, other=0.0).to(tl.float32)
    else:
        dt = tl.load(dt_bias + head).to(tl.float32)
        dt_high = dt
    return A, dt, dt_high


@triton.jit
def load_a(a_ptr, a_rate, head, low, high, mask_low, mask_high, DK: tl.constexpr, CHANNEL: tl.constexpr):
    """A token's a of a value head: of the low and the high half of its key channels if CHANNEL."""
    if CHANNEL:
        a = tl.load(a_ptr + (head * DK + low) * a_rate, mask=mask_low, other=0.0)
        a_high = tl.load(a_ptr + (head * DK + high) * a_rate, mask=mask_high, other=0.0)
    else:
        a = tl.load(a_ptr + head * a_rate)
        a_high = a
    return a, a_high


@triton.jit
def decay_of(a, A, dt_bias):
    """e^g of a token. `a`: as `load_a` has it; `A`, `dt_bias`: as `load_rates`."""
    return tl.exp(-A * softplus(a.to(tl.float32) + dt_bias))


@triton.jit
def update(state, state_high, q, q_high, k, k_high, v, beta):
    """The recurrence of a token over both halves of the decayed state S: S^T q, d = beta (v - S^T k), S + k d^T."""
    q_state = dot(state, q[:, None], state_high, q_high[:, None])
    k_state = dot(state, k[:, None], state_high, k_high[:, None])
    delta = tl.fma(-beta, k_state, beta * v)
    state = tl.fma(k[:, None], delta[None, :], state)
    return q_state, delta, state, tl.fma(k_high[:, None], delta[None, :], state_high)


@triton.jit
def load_taps(weight, bias, channel, mask_c, weight_channel, weight_w, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """The convolution's weights of `channel`, oldest input first, then its bias."""
    taps = ()
    for j in tl.static_range(WIDTH):
        pointer = weight + channel * weight_channel + j * weight_w
        taps = taps + (tl.load(pointer, mask=mask_c, other=0.0).to(tl.float32),)
    if BIAS:
        taps = taps + (tl.load(bias + channel, mask=mask_c, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def load_window(conv_state, channel, mask_c, is_new, conv_row, WIDTH: tl.constexpr):
    """The convolution's inputs before a token, oldest first: zeros if `is_new`."""
    window = ()
    for j in tl.static_range(WIDTH - 1):
        old = tl.load(conv_state + j * conv_row + channel, mask=mask_c & (is_new == 0), other=0.0)
        window = window + (old,)
    return window


@triton.jit
def shifted(window, x, WIDTH: tl.constexpr):
    """`window` without its oldest input, and with `x`."""
    moved = ()
    for j in tl.static_range(1, WIDTH - 1):
        moved = moved + (window[j],)
    return moved + (x.to(window[0].dtype),)


@triton.jit
def store_window(conv_state, channel, mask_c, window, conv_row, WIDTH: tl.constexpr):
    """All readers of these channels must be done."""
    for j in tl.static_range(WIDTH - 1):
        tl.store(conv_state + j * conv_row + channel, window[j], mask=mask_c)


@triton.jit
def conv_token(window, x, taps, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """Convolution and SiLU of the token of input `x`.

    Which product is rounded before the sum is stated, and not left to the compiler: verify steps have the same bits.
    """
    y = tl.fma(x.to(tl.float32), taps[WIDTH - 1], window[0].to(tl.float32) * taps[0])
    for j in tl.static_range(1, WIDTH - 1):
        y = tl.fma(window[j].to(tl.float32), taps[j], y)
    if BIAS:
        y += taps[WIDTH]
    return silu(y)
