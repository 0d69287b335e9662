"""Products of rows with the weights of their experts, where the rows of each expert lie side by side.

y_i = W_e x_i^T for row i of expert e. How many rows each expert has is known to the device alone: the grid has a tile
of rows for every tile there could be, and a program finds its expert from the ends of all. Memory traffic: the weights
of chosen experts once per tile of their rows, rows once per tile of outputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.attention.ahead import Variant

# Rows from which tiles of many rows pay.
_MANY = 512


@triton.jit
def grouped_kernel(
    rows,
    weights,
    ends,
    out,
    experts,
    outputs,
    inputs,
    row_stride,
    expert_stride,
    weight_stride,
    out_stride,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`ends`: [experts] int32. A program owns ROWS rows of one expert by COLUMNS outputs."""
    tile = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    end_of = tl.load(ends + each, mask=each < experts, other=0)
    start_of = tl.load(ends + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles_of = tl.where(each < experts, (end_of - start_of + ROWS - 1) // ROWS, 0)
    behind = tl.cumsum(tiles_of, 0)
    expert = tl.sum((behind <= tile).to(tl.int32), 0)
    if expert < experts:
        mine = each == expert
        first = tl.sum(tl.where(mine, start_of + (tile - (behind - tiles_of)) * ROWS, 0), 0)
        end = tl.sum(tl.where(mine, end_of, 0), 0)
        row = first + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        x = rows + row.to(tl.int64)[:, None] * row_stride + depth[None, :]
        w = (
            weights
            + expert.to(tl.int64) * expert_stride
            + column.to(tl.int64)[None, :] * weight_stride
            + depth[:, None]
        )
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, inputs, DEPTH):
            left = inputs - k
            a = tl.load(x + k, mask=(row < end)[:, None] & (depth < left)[None, :], other=0.0)
            b = tl.load(w + k, mask=(column < outputs)[None, :] & (depth < left)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
        place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(row < end)[:, None] & (column < outputs)[None, :])


def config(arch: str, rows: int, element_size: int) -> dict[str, int]:
    """Launch parameters by the number of rows that there may be; `arch`: of `ahead`, or "interpreter"."""
    depth = 128 // element_size
    if arch == "interpreter":
        return {"ROWS": 16, "COLUMNS": 32, "DEPTH": 32, "num_warps": 4, "num_stages": 1}
    stages = 2 if arch.startswith("gfx") else 4
    if rows < _MANY or element_size == 4:
        return {"ROWS": 16, "COLUMNS": 64, "DEPTH": depth, "num_warps": 4, "num_stages": stages}
    return {"ROWS": 64, "COLUMNS": 128, "DEPTH": depth, "num_warps": 4, "num_stages": stages}


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`rows`: [n, inputs], expert after expert. `weights`: [E, outputs, inputs], one type. `ends`: [E] int32, where
    each expert's rows end; the last is n. Returns [n, outputs]. Asks the device nothing.
    """
    count, inputs = rows.shape
    experts, outputs, _ = weights.shape
    out = rows.new_empty(count, outputs)
    if not count:
        return out
    launch = config(_arch(rows), count, rows.element_size())
    tiles = count // launch["ROWS"] + min(experts, count)
    grouped_kernel[(tiles, triton.cdiv(outputs, launch["COLUMNS"]))](
        rows,
        weights,
        ends,
        out,
        experts,
        outputs,
        inputs,
        rows.stride(0),
        weights.stride(0),
        weights.stride(1),
        out.stride(0),
        EXPERTS=triton.next_power_of_2(experts),
        **launch,
    )
    return out


def _arch(x: torch.Tensor) -> str:
    """The AMD parts are launched alike."""
    if x.device.type == "cpu":
        return "interpreter"
    return "gfx942" if torch.version.hip else "sm_90"


def variants(arch: str) -> list[Variant]:
    """Decode and prefill of 128 experts in bf16, and fp32."""
    made = []
    for name, rows, kind, size in (
        ("experts decode bf16", 64, "*bf16", 2),
        ("experts prefill bf16", 8192, "*bf16", 2),
        ("experts fp32", 64, "*fp32", 4),
    ):
        launch = config(arch, rows, size)
        signature = dict.fromkeys(("rows", "weights", "out"), f"{kind}:16") | {"ends": "*i32:16"}
        signature |= dict.fromkeys(("experts", "outputs", "inputs"), "i32:16")
        signature |= dict.fromkeys(("row_stride", "expert_stride", "weight_stride", "out_stride"), "i32:16")
        constants = {"EXPERTS": 128} | {key: launch[key] for key in ("ROWS", "COLUMNS", "DEPTH")}
        made.append(Variant(name, grouped_kernel, signature, constants, launch["num_warps"], launch["num_stages"]))
    return made
