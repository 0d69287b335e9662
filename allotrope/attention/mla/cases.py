"""Small layers of latent attention: released sizes and others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from allotrope.attention.check import Case, Inputs
from allotrope.attention.mla.spec import MlaSpec

PAGE = 16
# Around one page, and long enough for several.
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 70)

# Heads, latent, rope, nope, values.
VARIANTS: dict[str, tuple[int, int, int, int, int]] = {
    "released": (4, 512, 64, 128, 128),
    "wide_values": (2, 512, 64, 192, 256),
    "small": (4, 32, 16, 32, 32),
    "uneven": (3, 48, 8, 24, 40),
    "one_head": (1, 64, 16, 16, 16),
}


def mla_spec(name: str, dtype: torch.dtype) -> MlaSpec:
    """The spec of one variant."""
    heads, latent, rope, nope, values = VARIANTS[name]
    return MlaSpec(
        num_heads=heads,
        latent_dim=latent,
        rope_dim=rope,
        nope_dim=nope,
        v_head_dim=values,
        scale=(nope + rope) ** -0.5,
        kv_dtype=dtype,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every variant, with inputs and cache entries of `dtype`."""
    for name in VARIANTS:
        yield Case(name, mla_spec(name, dtype), LENGTHS, draw, dtype, PAGE)


def draw(spec: MlaSpec, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Normal queries and latents; projections of unit gain, and logits that spread."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = {
        "q_nope": 2 * normal(tokens, spec.num_heads, spec.nope_dim),
        "q_pe": 2 * normal(tokens, spec.num_heads, spec.rope_dim),
        "c": normal(tokens, spec.latent_dim),
        "k_pe": normal(tokens, spec.rope_dim),
    }
    gain = spec.latent_dim**-0.5
    w_uk = gain * normal(spec.num_heads, spec.nope_dim, spec.latent_dim)
    w_uv = gain * normal(spec.num_heads, spec.v_head_dim, spec.latent_dim)
    return Inputs(rows, {"w_uk": w_uk, "w_uv": w_uv})
