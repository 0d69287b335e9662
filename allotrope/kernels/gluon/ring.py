"""The barriers of a ring of slots in shared memory, which one group of warps fills and others read."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Of each slot: the barrier that says it is filled, and the one that says all READERS have done with it. They may
    be waited for after a fence and a barrier of all warps.
    """
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=READERS)
    return ready, free
