"""Pieces that the kernels of the gated delta rule share: its gates, and one output of the convolution."""

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
def newest(
    row, kept, weight, bias, channel, inside, fresh, kept_row, weight_channel, weight_tap,
    WIDTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Convolution and SiLU of one token. `row`: its inputs. `kept`: the last WIDTH - 1 inputs, zeros if `fresh`."""
    taps = weight + channel * weight_channel
    x = tl.load(row + channel, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(taps + (WIDTH - 1) * weight_tap, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH - 1):
        old = tl.load(kept + j * kept_row + channel, mask=inside & (fresh == 0), other=0.0).to(tl.float32)
        y += old * tl.load(taps + j * weight_tap, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return silu(y)


@triton.jit
def keep_newest(row, kept, channel, inside, fresh, kept_row, WIDTH: tl.constexpr):
    """Drop the oldest of the kept inputs and append the token's. Every reader of these channels must be done."""
    for j in tl.static_range(WIDTH - 2):
        old = tl.load(kept + (j + 1) * kept_row + channel, mask=inside & (fresh == 0), other=0.0)
        tl.debug_barrier()
        tl.store(kept + j * kept_row + channel, old, mask=inside)
    x = tl.load(row + channel, mask=inside, other=0.0)
    tl.debug_barrier()
    tl.store(kept + (WIDTH - 2) * kept_row + channel, x.to(kept.dtype.element_ty), mask=inside)
