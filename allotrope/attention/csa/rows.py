"""The formats of a window or compressed entry: plain, or block-scaled FP8 with a scale for every 64 values.

Owns: the bytes of an entry. Must not know: which entries a query reads.

    plain     field kv [D] of the cache's type; FP8 holds x / kv_scale, saturated
    scaled    field row, bytes: D - R values e4m3 | R bf16      field factors, bytes: one exponent for each 64 values
              scale = 2^(byte - 127) = 2^ceil(log2(max(max|block|, 1e-4) / 448))

Scaled entries of the released sizes (512, of which 64 are rotated) are 576 + 8 bytes, DeepSeek's 584; the last scale is
unused, and 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from allotrope.attention.cache_layout import Field
from allotrope.attention.mla.rows import power_of_two, to_fp8

if TYPE_CHECKING:
    from allotrope.attention.csa.spec import CsaSpec

FP8 = torch.float8_e4m3fn
BLOCK = 64
"""Channels of a scaled entry that share a scale."""
ROW_FORMATS = ("plain", "scaled")


def row_fields(row_format: str, dim: int, rope: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
    """Fields of an entry of size `dim`."""
    if row_format == "plain":
        return (Field("kv", (dim,), kv_dtype),)
    # A multiple of eight scales keeps their rows aligned.
    scales = -(-(dim - rope) // BLOCK // 8) * 8
    return Field("row", (dim + rope,), torch.uint8), Field("factors", (scales,), torch.uint8)


def encode(spec: CsaSpec, x: torch.Tensor, kv_scale: float) -> dict[str, torch.Tensor]:
    """New entries in their stored format. `x`: [n, D]. Returns field name -> [n, width], of the field's type."""
    if spec.row_format == "plain":
        if spec.kv_dtype != FP8:
            return {"kv": x.to(spec.kv_dtype)}
        return {"kv": to_fp8(x.float() / kv_scale)}
    plain = spec.head_dim - spec.rope.dim
    blocks = x[:, :plain].float().unflatten(-1, (-1, BLOCK))
    scale = power_of_two(blocks)
    quantized = to_fp8(blocks / scale).flatten(1)
    tail = x[:, plain:].to(torch.bfloat16).contiguous()
    (_, field) = row_fields(spec.row_format, spec.head_dim, spec.rope.dim, spec.kv_dtype)
    exponents = torch.zeros(len(x), field.shape[0], dtype=torch.uint8, device=x.device)
    exponents[:, : scale.shape[1]] = (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)
    return {"row": torch.cat((quantized.view(torch.uint8), tail.view(torch.uint8)), dim=-1), "factors": exponents}


def decode(spec: CsaSpec, pools: Mapping[str, torch.Tensor], rows: torch.Tensor, kv_scale: float) -> torch.Tensor:
    """Dequantized entries at `rows`. `pools`: field name -> [P, S, n]. `rows`: [b, L]. Returns [b, L, D] fp32."""
    if spec.row_format == "plain":
        x = _take(pools["kv"], rows).float()
        return x.mul_(kv_scale) if spec.kv_dtype == FP8 else x
    plain = spec.head_dim - spec.rope.dim
    stored, exponents = _take(pools["row"], rows), _take(pools["factors"], rows)
    scale = (exponents[..., : plain // BLOCK].to(torch.int32) << 23).view(torch.float32)
    quantized = stored[..., :plain].contiguous().view(FP8).float().unflatten(-1, (-1, BLOCK))
    tail = stored[..., plain:].contiguous().view(torch.bfloat16).float()
    return torch.cat(((quantized * scale[..., None]).flatten(-2), tail), dim=-1)


def put(pool: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` [n, w] at `rows` [n] of a pool [P, S, w] of the same type."""
    if pool.dtype == FP8:
        pool, values = pool.view(torch.uint8), values.view(torch.uint8)
    pool.flatten(0, 1).index_copy_(0, rows, values)


def _take(pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    bits = pool.view(torch.uint8) if pool.dtype == FP8 else pool
    return bits.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape).view(pool.dtype)
