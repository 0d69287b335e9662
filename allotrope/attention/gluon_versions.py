"""What Gluon calls by another name in some of the versions that we run on."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
