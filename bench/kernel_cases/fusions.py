"""Kernels around attention: norms, activations, rotation and store, and the choice of the next token."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from kernel_cases.case import KernelCase, Timed, same

TOKENS = (8192, 64, 4)


def cases() -> list[KernelCase]:
    found = []
    for size in (2880, 4096, 7168):
        found += [_residual(tokens, size, "bf16") for tokens in TOKENS]
    found += [_gated(tokens, 32, 128, "bf16") for tokens in TOKENS]
    return [*found, _residual(5, 96, "fp32", tiny=True)]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _residual(tokens: int, size: int, kind: str, tiny: bool = False) -> KernelCase:
    dtype = DTYPES[kind]

    def make(device: torch.device) -> Any:
        x, residual = (_normal(device, dtype, tokens, size) for _ in range(2))
        return x, residual, 1 + _normal(device, torch.float32, size) / 8

    def ours(inputs: Any) -> Timed:
        from allotrope.layers.norm_triton import add_rms_norm

        return functools.partial(add_rms_norm, *inputs, 1e-6)

    def reference(inputs: Any) -> Any:
        x, residual, weight = inputs
        total = residual + x
        exact = total.float()
        return total, exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight

    return KernelCase(
        family="fusions",
        name=f"residual + norm T{tokens} {size} {kind}",
        make=make,
        ours=ours,
        check=same(reference, kind),
        bytes=4 * tokens * size * dtype.itemsize,
        peers={"torch": lambda inputs: lambda: F.rms_norm(inputs[0] + inputs[1], (size,), inputs[2].to(dtype), 1e-6)},
        tiny=tiny,
    )


def _gated(tokens: int, heads: int, dim: int, kind: str) -> KernelCase:
    dtype = DTYPES[kind]

    def make(device: torch.device) -> Any:
        x = _normal(device, dtype, tokens, heads, dim)
        z = _normal(device, dtype, tokens, 3 * heads, dim)[:, heads : 2 * heads]
        return x, z, 1 + _normal(device, torch.float32, dim) / 8

    def ours(inputs: Any) -> Timed:
        from allotrope.layers.norm_triton import rms_norm

        x, z, weight = inputs
        return lambda: rms_norm(x, weight, 1e-6, gate=z)

    def reference(inputs: Any) -> Any:
        x, z, weight = inputs
        exact = x.float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * weight
        return normed * F.silu(z.float())

    return KernelCase(
        family="fusions",
        name=f"gated norm T{tokens} {heads}x{dim} {kind}",
        make=make,
        ours=ours,
        check=same(reference, kind),
        bytes=3 * tokens * heads * dim * dtype.itemsize,
        peers={"fla": _fla_gated},
    )


def _fla_gated(inputs: Any) -> Timed:
    from fla.modules.fused_norm_gate import rms_norm_gated

    x, z, weight = inputs
    x, z = x.flatten(0, 1), z.flatten(0, 1)
    return lambda: rms_norm_gated(x, z, weight, None, eps=1e-6)
