"""Logits as the sampler reads them, in one launch: y = cap tanh(x / cap), in fp32.

A program owns a block of numbers. Bytes moved: x and y.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv


@pdl_jit
def softcap_kernel(x, out, size, cap, BLOCK: tl.constexpr):
    """`x`, `out`: `size` numbers."""
    gdc_wait()
    gdc_launch_dependents()
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < size
    u = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) / cap
    # Near 0 the quotient loses digits; the series does not.
    large = 1.0 - 2.0 / (tl.exp2(u * 2.8853900817779268) + 1.0)
    square = u * u
    small = u * (1.0 + square * (-0.33333333333333333 + square * (0.13333333333333333 - square * 0.05396825396825397)))
    tl.store(out + offset, cap * tl.where(square < 0.01, small, large), mask=mask)


def config(chip: Chip) -> dict[str, int]:
    """Two 16-byte loads a thread."""
    return {"BLOCK": 2048, "num_warps": 4 if chip.vendor == "amd" else 8, "num_stages": 1}


def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """As `reference.softcap`."""
    logits = logits.contiguous()
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel():
        launch = config(chip_of(logits.device))
        softcap_kernel[(cdiv(out.numel(), launch["BLOCK"]),)](logits, out, out.numel(), cap, **launch)
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Of bf16."""
    launch = config(chip)
    signature = {"x": "*bf16:16", "out": "*fp32:16", "size": "i32:16", "cap": "fp32"}
    return [
        Specialization("capped logits", softcap_kernel, signature, {"BLOCK": launch["BLOCK"]}, launch["num_warps"], 1)
    ]
