"""The mbarriers of a ring of stages in shared memory: a producer warp group fills them, consumers read them."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Of each stage: the mbarrier `ready`, on which the producer arrives, ARRIVALS times, and `free`, on which all
    CONSUMERS do. They may be waited for after a fence and a barrier of all warps.
    """
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=ARRIVALS)
        mbarrier.init(free.index(i), count=CONSUMERS)
    return ready, free
