"""What the softmaxes of all attention kernels share: they count in powers of two, for which chips have an instruction.

Must not know: which keys a row of logits stands for.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e): exp(x) is exp2(x LOG2E)."""

LOWEST = tl.constexpr(-1.0e30)
"""A row's maximum before its first logit. It is below any logit, yet finite: inf - inf would be no number."""


@triton.jit
def logits_to_base_2(logits, scale, softcap, SOFTCAP: tl.constexpr):
    """scale * logits, with SOFTCAP softcap * tanh(scale * logits / softcap); times LOG2E."""
    if SOFTCAP:
        x = logits * (scale / softcap)
        return (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))
    return logits * (scale * LOG2E)
