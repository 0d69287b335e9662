"""Functions of Gluon that some of the supported versions of Triton call by another name."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Triton 3.8 renamed both; Triton 3.9 keeps the old names for a message only.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
