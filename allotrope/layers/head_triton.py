"""Logits as the sampler reads them, in one launch: y = cap tanh(x / cap), in fp32.

A program owns a run of numbers. Bytes moved: x and y.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.attention.ahead import Variant
from allotrope.attention.early import await_turn, early_jit
from allotrope.attention.tile_sizes import cdiv


@early_jit
def cap_kernel(x, out, size, cap, BLOCK: tl.constexpr):
    """`x`, `out`: `size` numbers."""
    await_turn()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    u = tl.load(x + place, mask=there, other=0.0).to(tl.float32) / cap
    # Near 0 the quotient would lose what is small; a series does not.
    far = 1.0 - 2.0 / (tl.exp2(u * 2.8853900817779268) + 1.0)
    square = u * u
    near = u * (1.0 + square * (-0.33333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397)))
    tl.store(out + place, cap * tl.where(square < 0.01, near, far), mask=there)


def config(arch: str) -> dict[str, int]:
    """Two 16-byte loads a thread."""
    return {"BLOCK": 2048, "num_warps": 4 if arch.startswith("gfx") else 8, "num_stages": 1}


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap) in fp32, in the same shape."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        launch = config("gfx942" if torch.version.hip else "sm_90")
        cap_kernel[(cdiv(out.numel(), launch["BLOCK"]),)](logits, out, out.numel(), cap, **launch)
    return out


def variants(arch: str) -> list[Variant]:
    """Of bf16."""
    launch = config(arch)
    signature = {"x": "*bf16:16", "out": "*fp32:16", "size": "i32:16", "cap": "fp32"}
    return [Variant("capped logits", cap_kernel, signature, {"BLOCK": launch["BLOCK"]}, launch["num_warps"], 1)]
