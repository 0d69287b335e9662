"""A zero that the compiler does not know: addresses that follow from it are made in each step, for which a loop has
time, and not kept in registers, of which it has none left.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def unknown_zero(i):
    """`i`: int32, not negative, that changes from step to step."""
    return gl.inline_asm_elementwise("shr.u32 $0, $1, 31;", "=r,r", [i], dtype=gl.int32, is_pure=True, pack=1)
