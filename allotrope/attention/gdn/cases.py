"""Small layers of the gated delta rule: value heads per key head 1, 2, 4, 8, decay per head and per channel, unequal
head sizes, lengths around the convolution's width and the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from allotrope.attention.check import Case, Inputs
from allotrope.attention.gdn.spec import GdnSpec

# Shorter than the convolution, around one chunk of 64, two chunks with a remainder; equal lengths share a sub-batch.
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 65, 150)

VARIANTS: dict[str, dict[str, Any]] = {
    "one_to_one": {"num_k_heads": 4, "num_v_heads": 4, "k_head_dim": 32, "v_head_dim": 32, "conv_width": 4},
    "one_to_two": {"num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 64, "v_head_dim": 32, "conv_width": 4},
    "one_to_four": {"num_k_heads": 1, "num_v_heads": 4, "k_head_dim": 16, "v_head_dim": 48, "conv_width": 2},
    "one_to_eight": {"num_k_heads": 1, "num_v_heads": 8, "k_head_dim": 24, "v_head_dim": 8, "conv_width": 6},
    "released_size": {"num_k_heads": 16, "num_v_heads": 32, "k_head_dim": 128, "v_head_dim": 128, "conv_width": 4},
}
BY_CHANNEL: dict[str, dict[str, Any]] = {
    "by_channel": {"num_k_heads": 4, "num_v_heads": 4, "k_head_dim": 32, "v_head_dim": 32, "conv_width": 4},
    "by_channel_one_to_two": {"num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 24, "v_head_dim": 40, "conv_width": 3},
    "by_channel_released_size": {
        "num_k_heads": 32, "num_v_heads": 32, "k_head_dim": 128, "v_head_dim": 128, "conv_width": 4
    },
}  # fmt: skip


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every variant, with inputs and cached convolution inputs of `dtype`; the recurrent state is fp32."""
    for name, numbers in (VARIANTS | BY_CHANNEL).items():
        lengths = (1, 3, 66) if name.endswith("released_size") else LENGTHS
        spec = GdnSpec(conv_dtype=dtype, channel_decay=name in BY_CHANNEL, **numbers)
        yield Case(name, spec, lengths, draw, dtype)


def draw(spec: GdnSpec, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Normal projections; decays from almost none to almost all; b and a are views of one [b | a] projection."""
    qkv = torch.randn(tokens, spec.conv_dim, generator=generator)
    ba = torch.randn(tokens, spec.num_v_heads + spec.decay_dim, generator=generator).to(dtype)
    b, a = ba.split((spec.num_v_heads, spec.decay_dim), dim=1)
    layer = {
        "conv_weight": torch.randn(spec.conv_dim, spec.conv_width, generator=generator) * spec.conv_width**-0.5,
        "conv_bias": torch.randn(spec.conv_dim, generator=generator) * 0.1,
        "A_log": torch.linspace(0.01, 16.0, spec.num_v_heads).log(),
        "dt_bias": torch.randn(spec.decay_dim, generator=generator),
    }
    return Inputs({"qkv": qkv.to(dtype), "b": b, "a": a}, {name: t.to(dtype) for name, t in layer.items()})
