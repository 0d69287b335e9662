"""The weighted sum of experts' outputs, in one launch.

A program owns a few of one token's columns. Bytes moved: results and y. Nothing asks the device for a number, so that
it can be captured.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from allotrope.kernels.chip import Chip, chip_of
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2


@pdl_jit(do_not_specialize=["held"])
def combine_kernel(
    results,
    weights,
    inverse,
    shared,
    gate,
    bias,
    experts,
    out,
    hidden,
    result_stride,
    shared_stride,
    gate_stride,
    bias_stride,
    held,
    TOPK: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    HELD: tl.constexpr,
):
    """`weights`, `inverse`, `experts`: [T, TOPK], contiguous. `out`: [T, hidden], contiguous. UNROLL rows are read at
    once. HELD: choices of experts from `held` on count nothing.
    """
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < hidden
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, TOPK, UNROLL):
        for step in tl.static_range(UNROLL):
            pair = token * TOPK + first + step
            choice_mask = first + step < TOPK
            if HELD:
                choice_mask &= tl.load(experts + pair, mask=choice_mask, other=0) < held
            weight = tl.load(weights + pair, mask=choice_mask, other=0.0)
            row = tl.load(inverse + pair, mask=choice_mask, other=0).to(tl.int64) * result_stride
            acc += weight * tl.load(results + row + column, mask=column_mask & choice_mask, other=0.0).to(tl.float32)
            if BIAS:
                row = tl.load(experts + pair, mask=choice_mask, other=0).to(tl.int64) * bias_stride
                acc += weight * tl.load(bias + row + column, mask=column_mask & choice_mask, other=0.0).to(tl.float32)
    if SHARED:
        addend = tl.load(shared + token * shared_stride + column, mask=column_mask, other=0.0).to(tl.float32)
        if GATED:
            addend *= tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        acc += addend
    tl.store(out + token * hidden + column, acc.to(out.dtype.element_ty), mask=column_mask)


def config(chip: Chip, tokens: int, topk: int, hidden: int, element_size: int) -> dict[str, int]:
    """One 16-byte load a thread; where tokens are few, columns are shared out to as many programs as can be."""
    vector = chip.warp_size * 16 // element_size
    block = min(vector if tokens <= 64 else 4 * vector, max(128, next_power_of_2(hidden)))
    unroll = topk if topk <= 12 else 8
    return {"UNROLL": unroll, "BLOCK": block, "num_warps": max(1, block // vector), "num_stages": 1}


def combine(
    results: torch.Tensor,
    weights: torch.Tensor,
    inverse: torch.Tensor,
    experts: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    held: int | None = None,
) -> torch.Tensor:
    """As `reference.combine`; rows have any stride."""
    assert all(rows is None or rows.stride(1) == 1 for rows in (results, shared, bias))
    assert inverse.is_contiguous()
    (tokens, topk), hidden = weights.shape, results.shape[1]
    out = torch.empty((tokens, hidden), dtype=dtype, device=results.device)
    if not out.numel():
        return out
    launch = config(chip_of(results.device), tokens, topk, hidden, results.element_size())
    # Absent tensors are passed as another, and never read.
    combine_kernel[(tokens, cdiv(hidden, launch["BLOCK"]))](
        results,
        weights.contiguous(),
        inverse,
        results if shared is None else shared,
        results if gate is None else gate,
        results if bias is None else bias,
        experts.contiguous(),
        out,
        hidden,
        results.stride(0),
        0 if shared is None else shared.stride(0),
        0 if gate is None else gate.stride(0),
        0 if bias is None else bias.stride(0),
        0 if held is None else held,
        TOPK=topk,
        SHARED=shared is not None,
        GATED=shared is not None and gate is not None,
        BIAS=bias is not None,
        HELD=held is not None,
        **launch,
    )
    return out


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Sums with all that may join them."""
    made = []
    for name, kind, tokens, topk, flags in (
        ("combine decode bf16", "*bf16", 1, 8, (False, False, False, False)),
        ("combine prefill bf16", "*bf16", 8192, 10, (True, True, False, False)),
        ("combine bias fp16", "*fp16", 8192, 4, (False, False, True, False)),
        ("combine fp32", "*fp32", 8192, 32, (True, False, True, False)),
        ("combine experts of a rank", "*bf16", 1, 8, (True, False, True, True)),
    ):
        launch = config(chip, tokens, topk, 4096, 4 if kind == "*fp32" else 2)
        signature = dict.fromkeys(("results", "shared", "gate", "bias", "out"), f"{kind}:16")
        signature |= {"weights": "*fp32:16", "inverse": "*i32:16", "experts": "*i64:16"}
        signature |= dict.fromkeys(("hidden", "result_stride", "shared_stride", "bias_stride"), "i32:16")
        signature |= {"gate_stride": "i32", "held": "i32"}
        constants: dict[str, Any] = dict(zip(("SHARED", "GATED", "BIAS", "HELD"), flags, strict=True))
        constants |= {"TOPK": topk, "UNROLL": launch["UNROLL"], "BLOCK": launch["BLOCK"]}
        made.append(
            Specialization(name, combine_kernel, signature, constants, launch["num_warps"], launch["num_stages"])
        )
    return made
