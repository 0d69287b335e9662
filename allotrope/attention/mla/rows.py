"""The formats of a latent cache entry: plain, or block-scaled FP8 with a scale for every 128 values.

Owns: the bytes of an entry. Must not know: which entries a query reads.

    plain     fields c [C] and k_pe [R] of `kv_dtype`; FP8 holds x / kv_scale, saturated
    scaled    one field of bytes: C values e4m3 | C / 128 fp32 scales | R bf16; scale: least power of two >= max / 448

Scaled entries of the released sizes (512, 64) are the 656 bytes that FlashMLA reads. The format allows any scale; with
powers of two, values times scale are exact in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FP8_MAX = 448.0
"""Largest number of e4m3."""
BLOCK = 128
"""Channels of a scaled entry that share a scale."""
ROW_FORMATS = ("plain", "scaled")


def scaled_bytes(latent: int, rope: int) -> int:
    """Bytes of a scaled entry."""
    return latent + 4 * (latent // BLOCK) + 2 * rope


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """`x` in e4m3; values beyond its range saturate."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least power of two f with |x| <= 448 f for all x of the last dimension. `x`: [..., n]. Returns [..., 1]."""
    mantissa, exponent = torch.frexp(x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4))
    # 448 is 7/8 * 2^9, and frexp's mantissa is in [1/2, 1).
    return torch.ldexp(torch.ones_like(mantissa), exponent - 9 + (mantissa > 0.875).to(exponent.dtype))


def encode(
    row_format: str, kv_dtype: torch.dtype, c: torch.Tensor, k_pe: torch.Tensor, kv_scale: float
) -> dict[str, torch.Tensor]:
    """New entries in their stored format. `c`: [T, C]. `k_pe`: [T, R]. Returns field name -> [T, n]."""
    if row_format == "scaled":
        blocks = c.float().unflatten(-1, (-1, BLOCK))
        scale = power_of_two(blocks)
        quantized = to_fp8(blocks / scale).flatten(-2).view(torch.uint8)
        tail = k_pe.to(torch.bfloat16).contiguous().view(torch.uint8)
        return {"row": torch.cat((quantized, scale.flatten(-2).view(torch.uint8), tail), dim=-1)}
    if kv_dtype == torch.float8_e4m3fn:
        return {name: to_fp8(x.float() / kv_scale) for name, x in (("c", c), ("k_pe", k_pe))}
    return {"c": c.to(kv_dtype), "k_pe": k_pe.to(kv_dtype)}


def decode(
    row_format: str, latent: int, pools: Mapping[str, torch.Tensor], rows: torch.Tensor, kv_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized entries at `rows` of the pool. `pools`: field name -> [P, S, n]. `rows`: [b, L].

    Returns c [b, L, C] and k_pe [b, L, R], fp32.
    """
    if row_format == "scaled":
        stored = take(pools["row"], rows)
        end = latent + 4 * (latent // BLOCK)
        scale = stored[..., latent:end].contiguous().view(torch.float32)
        quantized = stored[..., :latent].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK))
        return (quantized * scale[..., None]).flatten(-2), stored[..., end:].contiguous().view(torch.bfloat16).float()
    c, k_pe = (take(pools[name], rows).float() for name in ("c", "k_pe"))
    if pools["c"].dtype == torch.float8_e4m3fn:
        return c.mul_(kv_scale), k_pe.mul_(kv_scale)
    return c, k_pe


def take(pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[b, L, n] entries at `rows` [b, L] of a pool [P, S, n], of its type."""
    bits = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
    return bits.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape).view(pool.dtype)


def put(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write entries `rows` [t, n] at `slots` [t] of a pool [P, S, n] of the same type."""
    if pool.dtype == torch.float8_e4m3fn:
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool.flatten(0, 1).index_copy_(0, slots, rows)
