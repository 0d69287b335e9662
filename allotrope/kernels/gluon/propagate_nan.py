"""`kernels/propagate_nan.py` for Gluon kernels."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_KEEPS_NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def at_least(x, low):
    """As `propagate_nan.at_least`."""
    return gl.maximum(x, low, propagate_nan=_KEEPS_NAN)


@gluon.jit
def highest(logits, axis: gl.constexpr):
    """As `propagate_nan.highest`."""
    return gl.max(logits, axis)


@gluon.jit
def higher_of(one, other):
    """As `propagate_nan.higher_of`."""
    return gl.maximum(one, other)


PASS_OVER_NAN = (highest, higher_of)
"""What may become an instruction that drops NaN."""
