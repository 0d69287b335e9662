"""Tensor descriptors (TMA): blocks of a matrix that are copied to shared memory in the layout that wgmma reads."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Of each type, Gluon's, and its name in a signature.
_TYPES = {
    torch.float16: (gl.float16, "fp16"),
    torch.bfloat16: (gl.bfloat16, "bf16"),
    torch.float8_e4m3fn: (gl.float8e4nv, "fp8e4nv"),
    torch.int16: (gl.int16, "i16"),
}


def descriptor(matrix: torch.Tensor, block: list[int]) -> Any:
    """Of `matrix`, in blocks of `block` rows and columns."""
    layout = _layout(matrix.dtype, block)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)


def descriptor_type(dtype: torch.dtype, block: list[int]) -> str:
    """What a descriptor is in the signature of a `Specialization`."""
    return f"tensordesc<{_TYPES[dtype][1]}[{block[0]},{block[1]}],{_layout(dtype, block)!r}>"


def _layout(dtype: torch.dtype, block: list[int]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, _TYPES[dtype][0])
