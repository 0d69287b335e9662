"""Write new keys and values to the paged KV cache, quantized where it is FP8.

Owns: the kernel that writes the KV cache. Must not know: the kernels that read it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.chip import Chip
from allotrope.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_jit
from allotrope.kernels.propagate_nan import clamped
from allotrope.kernels.registry import Specialization, specializations
from allotrope.kernels.tiles import cdiv, next_power_of_2

# The largest finite value of float8_e4m3fn.
_FP8_MAX = tl.constexpr(448.0)
_BLOCK_T = 8


@triton.jit
def _quantize(x, scale, FP8: tl.constexpr):
    """x / scale, clamped to the range of FP8, for an FP8 KV cache; x for others."""
    if FP8:
        x = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 0.0, tl.float32) + scale)
        x = clamped(x, _FP8_MAX)
    return x


@pdl_jit
def store_kernel(
    k, v, slot_mapping, k_pool, v_pool, k_scale, v_scale, tokens,
    k_t, k_h, v_t, v_h, kp_p, kp_s, kp_g, vp_p, vp_s, vp_g,
    PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr, FP8: tl.constexpr, VALUES_ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Write k and v of BLOCK_T tokens of one KV head to their slots; a token with slot -1 is skipped."""
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    kv_head = tl.program_id(1)
    slot = tl.load(slot_mapping + token, mask=token < tokens, other=-1).to(tl.int64)
    mask_t = slot >= 0
    page, page_offset = slot // PAGE, slot % PAGE
    token = token.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_t[:, None] & (offs_d < D)[None, :]
    x = tl.load(k + token[:, None] * k_t + kv_head * k_h + offs_d[None, :], mask=mask, other=0.0)
    kv_offset = page * kp_p + page_offset * kp_s + kv_head * kp_g
    x = _quantize(x, k_scale, FP8).to(k_pool.dtype.element_ty)
    tl.store(k_pool + kv_offset[:, None] + offs_d[None, :], x, mask=mask)
    if not VALUES_ARE_KEYS:
        offs_d = tl.arange(0, BLOCK_DV)
        mask = mask_t[:, None] & (offs_d < DV)[None, :]
        x = tl.load(v + token[:, None] * v_t + kv_head * v_h + offs_d[None, :], mask=mask, other=0.0)
        kv_offset = page * vp_p + page_offset * vp_s + kv_head * vp_g
        x = _quantize(x, v_scale, FP8).to(v_pool.dtype.element_ty)
        tl.store(v_pool + kv_offset[:, None] + offs_d[None, :], x, mask=mask)


def store(
    spec: MhaSpec,
    slot_mapping: torch.Tensor,
    pools: dict[str, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """As `reference.store`. `slot_mapping`: [T]. `pools`: "k" [P, S, G, D], "v" [P, S, G, Dv]."""
    k_pool = pools["k"]
    v_pool = k_pool if spec.values_are_keys else pools["v"]
    v = k if spec.values_are_keys else v
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    tokens = k.shape[0]
    store_kernel[(cdiv(tokens, _BLOCK_T), spec.num_kv_heads)](
        k, v, slot_mapping, k_pool, v_pool, k_scale, v_scale, tokens,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_pool.stride()[:3], *v_pool.stride()[:3],
        PAGE=k_pool.shape[1], D=spec.head_dim, DV=spec.value_dim,
        BLOCK_D=next_power_of_2(spec.head_dim), BLOCK_DV=next_power_of_2(spec.value_dim),
        BLOCK_T=_BLOCK_T, FP8=k_pool.dtype.itemsize == 1, VALUES_ARE_KEYS=spec.values_are_keys, num_warps=4,
    )  # fmt: skip


@specializations
def released(chip: Chip) -> list[Specialization]:
    """Head dim 128, in a KV cache of bf16 and of FP8."""
    strides = dict.fromkeys(("k_t", "k_h", "v_t", "v_h", "kp_p", "kp_s", "kp_g", "vp_p", "vp_s", "vp_g"), "i32:16")
    found = []
    for pool in ("bf16", "fp8e4nv"):
        signature = {
            "k": "*bf16:16",
            "v": "*bf16:16",
            "slot_mapping": "*i64",
            "k_pool": f"*{pool}:16",
            "v_pool": f"*{pool}:16",
        }
        signature |= {"k_scale": "fp32", "v_scale": "fp32", "tokens": "i32"} | strides
        constants = {"PAGE": 64, "D": 128, "DV": 128, "BLOCK_D": 128, "BLOCK_DV": 128, "BLOCK_T": _BLOCK_T}
        constants |= {"FP8": pool != "bf16", "VALUES_ARE_KEYS": False}
        found.append(Specialization(f"mha store {pool}", store_kernel, signature, constants, 4, 1))
    return found
