"""Maxima and minima in kernels, and which of them may pass over NaN.

A chip's plain maximum of NaN and 1 is 1: a clamp would make a sound number of a broken one. So a kernel bounds numbers
by `at_least`, `at_most` and `clamped`, which keep NaN. `highest`, `higher_of` and `largest_of` pass over NaN. They are
for maxima that the numbers themselves are then measured against: a softmax subtracts its row's maximum, a quantized
block is divided by its largest magnitude, and the NaN comes through by itself. `aot.py` holds every compiled kernel
to it: no other line may become an instruction that drops NaN.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at_least(x, low):
    """max(x, low), both float; NaN stays."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    """min(x, high), both float; NaN stays."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamped(x, bound):
    """x between -bound and bound, fp32; NaN stays."""
    return tl.clamp(x, -bound, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(logits, axis: tl.constexpr):
    """Row maxima that a softmax subtracts; NaN is passed over, and comes through in the row's sum."""
    return tl.max(logits, axis)


@triton.jit
def higher_of(one, other):
    """The higher of two maxima that a softmax subtracts; as `highest`."""
    return tl.maximum(one, other)


@triton.jit
def largest_of(x, axis: tl.constexpr):
    """Largest magnitudes that blocks are divided by; NaN is passed over, and comes through in its own quotient."""
    return tl.max(tl.abs(x), axis)


PASS_OVER_NAN = (highest, higher_of, largest_of)
"""What may become an instruction that drops NaN."""
