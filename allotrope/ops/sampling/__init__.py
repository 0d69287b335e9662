"""Choosing the next token of each row from logits: temperature, top-k, top-p, min-p and the draw.

Owns the arithmetic of penalties, masks, truncation and drawing, in tensors.
"""

from __future__ import annotations

from allotrope.kernels.backend import Backend, Op, lazily, runs_anywhere
from allotrope.kernels.triton_version import needs_triton
from allotrope.ops.sampling import reference

SAMPLING = Op(
    "sampling",
    "token = argmax(z), or a draw from softmax(z / temperature) after top-k, top-p and min-p",
    (
        Backend("triton", needs_triton, lazily("allotrope.ops.sampling.triton", "choose")),
        Backend("reference", runs_anywhere, reference.choose),
    ),
)
