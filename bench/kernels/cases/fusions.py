"""Kernels around attention: norms, activations, rotation and store, and the choice of the next token."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from allotrope.attention.check import Comparison, compare
from bench.kernels.cases.case import KernelCase, Timed, same

TOKENS = (8192, 64, 4)
EPS = 1e-6


def cases() -> list[KernelCase]:
    found = []
    for size in (2880, 4096, 7168):
        found += [_residual(tokens, size, "bf16") for tokens in TOKENS]
    for tokens in TOKENS:
        found += [_gated(tokens, 32, 128, "bf16")]
        found += [_activation(tokens, 14336, "silu", None), _activation(tokens, 2880, "silu", 7.0)]
        found += [_activation(tokens, 21504, "gelu_tanh", None)]
        found += [_rope_store(tokens, *shape) for shape in ROPE_SHAPES]
    for rows in (64, 4):
        found += [_choice(rows, 151936, name) for name in CHOICES]
    return [*found, _residual(5, 96, "fp32", tiny=True)]


# How a token is chosen: top-k, top-p, min-p, and the spread of the logits; None for the best token.
CHOICES: dict[str, tuple[int, float, float, float] | None] = {
    "best": None,
    "temperature": (0, 1.0, 0.0, 2.5),
    "top-k 50": (50, 1.0, 0.0, 2.5),
    "top-p 0.95": (0, 0.95, 0.0, 6.0),
    "top-p 0.95 of flat rows": (0, 0.95, 0.0, 1.0),
    "top-k 20 top-p 0.8 min-p 0.01": (20, 0.8, 0.01, 2.5),
}


# Query heads, key heads, head size, rotated, normed, type of the rows.
ROPE_SHAPES = (
    (64, 8, 128, 128, True, "bf16"),
    (64, 8, 64, 64, False, "bf16"),
    (16, 2, 256, 64, True, "bf16"),
    (32, 4, 512, 512, True, "bf16"),
    (64, 8, 128, 128, True, "fp8"),
)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def _normal(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _residual(tokens: int, size: int, kind: str, tiny: bool = False) -> KernelCase:
    dtype = DTYPES[kind]

    def make(device: torch.device) -> Any:
        x, residual = (_normal(device, dtype, tokens, size) for _ in range(2))
        return x, residual, size**0.5 * (1 + _normal(device, torch.float32, size) / 8)

    def ours(inputs: Any) -> Timed:
        from allotrope.ops.rms_norm.triton import add_rms_norm

        return functools.partial(add_rms_norm, *inputs, size * EPS)

    def reference(inputs: Any) -> Any:
        x, residual, factors = inputs
        total = residual + x
        exact = total.float()
        return total, exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + size * EPS) * factors

    return KernelCase(
        family="fusions",
        name=f"residual + norm T{tokens} {size} {kind}",
        make=make,
        ours=ours,
        check=same(reference, kind),
        bytes=4 * tokens * size * dtype.itemsize,
        peers={"torch": lambda inputs: lambda: F.rms_norm(inputs[0] + inputs[1], (size,), inputs[2].to(dtype), EPS)},
        tiny=tiny,
    )


def _gated(tokens: int, heads: int, dim: int, kind: str) -> KernelCase:
    dtype = DTYPES[kind]

    def make(device: torch.device) -> Any:
        x = _normal(device, dtype, tokens, heads, dim)
        z = _normal(device, dtype, tokens, 3 * heads, dim)[:, heads : 2 * heads]
        return x, z, dim**0.5 * (1 + _normal(device, torch.float32, dim) / 8)

    def ours(inputs: Any) -> Timed:
        from allotrope.ops.rms_norm.triton import rms_norm

        x, z, factors = inputs
        return lambda: rms_norm(x, factors, dim * EPS, gate=z)

    def reference(inputs: Any) -> Any:
        x, z, factors = inputs
        exact = x.float()
        return exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + dim * EPS) * factors * F.silu(z.float())

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
    return lambda: rms_norm_gated(x, z, weight, None, eps=EPS)


def _activation(tokens: int, width: int, activation: Any, limit: float | None) -> KernelCase:
    def make(device: torch.device) -> Any:
        return (torch.rand(tokens, 2 * width, device=device) * 8 - 4).to(torch.bfloat16)

    def ours(x: Any) -> Timed:
        from allotrope.ops.gated_activation import GatedActivation
        from allotrope.ops.gated_activation.triton import gated_activation

        slope, offset = (1.702, 1.0) if limit else (1.0, 0.0)
        how = GatedActivation(activation=activation, slope=slope, limit=limit, offset=offset)
        return lambda: gated_activation(x, how)

    def reference(x: Any) -> Any:
        gate, up = x.float().chunk(2, dim=-1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1.0
            return gate * torch.sigmoid(1.702 * gate) * up
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def plain(x: Any) -> Timed:
        def run() -> Any:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        return run

    return KernelCase(
        family="fusions",
        name=f"{activation}{' clamped' if limit else ''} T{tokens} {width} bf16",
        make=make,
        ours=ours,
        check=same(reference, "bf16"),
        bytes=3 * tokens * width * 2,
        peers={"torch": plain} if activation == "silu" and limit is None else {},
    )


@dataclass
class _RopeInputs:
    spec: Any
    given: tuple[Any, ...]
    rows: Any


def _rope_store(tokens: int, heads: int, groups: int, dim: int, rotated: int, normed: bool, rows: str) -> KernelCase:
    dtype = torch.float32 if rows == "fp32" else torch.bfloat16

    def make(device: torch.device) -> Any:
        from allotrope.ops.qk_norm_rope import HeadSpec, Rows
        from allotrope.ops.rope import RopeSpec, RopeTable

        spec = HeadSpec(heads=heads, kv_heads=groups, dim=dim, v_dim=dim, qk_norm=normed)
        projected = _normal(device, dtype, tokens, spec.width)
        rotation = RopeTable(RopeSpec(dim=rotated, theta=1e6), device).at(torch.arange(tokens, device=device), dtype)
        factors = [dim**0.5 * (1 + _normal(device, torch.float32, dim) / 8) if normed else None for _ in range(2)]
        pages = -(-tokens // 16) + 1
        k, v = (torch.zeros(pages, 16, groups, dim, dtype=DTYPES[rows], device=device) for _ in range(2))
        slots = torch.randperm(tokens, device=device) + 16
        return _RopeInputs(spec, (projected, rotation, *factors), Rows(k, v, slots, 0.5, 0.5))

    def ours(inputs: Any) -> Timed:
        from allotrope.ops.qk_norm_rope.triton import rope_store

        return lambda: rope_store(inputs.spec, *inputs.given, inputs.rows)

    def check(inputs: Any, timed: Timed) -> list[Comparison]:
        from allotrope.ops.qk_norm_rope.reference import rope_store

        projected, *others = inputs.given
        q, k, v = rope_store(inputs.spec, projected.float(), *others, None)
        found = [compare(timed()[0], q, "fp32" if rows == "fp32" else "bf16")]
        for pool, new in ((inputs.rows.k, k), (inputs.rows.v, v)):
            stored = pool.flatten(0, 1)[inputs.rows.slots]
            if rows == "fp8":
                new = (new.to(dtype).float() / 0.5).to(pool.dtype).float()
                # One step of FP8 where a rounding to bf16 before it ended on the other side of a tie.
                near = (stored.float() - new).abs() <= new.abs() / 8 + 2**-9
                stored, new = torch.where(near, new, stored.float()).bfloat16(), new
            found.append(compare(stored, new, "fp32" if rows == "fp32" else "bf16"))
        return found

    moved = tokens * (2 * heads + 2 * groups) * dim * dtype.itemsize
    moved += tokens * (2 * groups * dim * DTYPES[rows].itemsize + 2 * rotated * dtype.itemsize)
    return KernelCase(
        family="fusions",
        name=f"rope store T{tokens} {heads}/{groups}x{dim}{' normed' if normed else ''} rotates {rotated} rows {rows}",
        make=make,
        ours=ours,
        check=check,
        bytes=moved,
    )


def _choice(rows: int, vocab: int, name: str) -> KernelCase:
    """A token for each row. The check is that each is the one that sorting finds."""

    def make(device: torch.device) -> Any:
        from allotrope.ops.sampling.reference import RandomRows, SamplingStep

        chosen = CHOICES[name]
        logits = _normal(device, torch.float32, rows, vocab)
        every = torch.arange(rows, device=device)
        if chosen is None:
            return logits, SamplingStep(greedy=every)
        top_k, top_p, min_p, spread = chosen

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows, 1), value, dtype=dtype, device=device)

        random = RandomRows(
            rows=every,
            temperature=column(1.0, torch.float32),
            min_p=column(min_p, torch.float64) if min_p else None,
            top_p=column(top_p, torch.float64),
            top_k=column(top_k, torch.int64),
            uniform=torch.rand(rows, 1, dtype=torch.float64, device=device),
            top_ks=(top_k,) * rows,
        )
        whole = not top_k and top_p == 1.0
        step = SamplingStep(greedy=None, whole=random if whole else None, truncated=None if whole else random)
        return logits * spread, step

    def ours(inputs: Any) -> Timed:
        from allotrope.ops.sampling.triton import choose

        return functools.partial(choose, *inputs)

    def check(inputs: Any, timed: Timed) -> list[Comparison]:
        from allotrope.ops.sampling import reference as sampler

        same_token = (timed() == sampler._choose(*inputs)[0]).float()
        return [compare(same_token, torch.ones_like(same_token), "fp32")]

    def sorting(inputs: Any) -> Timed:
        from allotrope.ops.sampling import reference as sampler

        return lambda: sampler._choose(*inputs)

    return KernelCase(
        family="fusions",
        name=f"choice B{rows} of {vocab}: {name}",
        make=make,
        ours=ours,
        check=check,
        bytes=rows * vocab * 4,
        peers={"torch": sorting},
    )
