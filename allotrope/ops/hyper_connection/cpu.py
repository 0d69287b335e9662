"""Hyper-connections on a CPU: the mixing weights in one C function (`cpu.c`), the products in PyTorch."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from allotrope.kernels.c.function import CFunction, c_reasons
from allotrope.kernels.chip import Chip
from allotrope.ops.hyper_connection.reference import mixes, weighted_sum
from allotrope.ops.hyper_connection.spec import HyperConnectionSpec

SOURCE = Path(__file__).with_name("cpu.c")


def rejects(spec: HyperConnectionSpec, chip: Chip) -> list[str]:
    return c_reasons(SOURCE, torch.float32, chip)


@functools.cache
def _mixing_weights() -> CFunction:
    return CFunction(SOURCE, "mixing_weights", torch.float32, "pppppplllf")


def mixing_weights(
    spec: HyperConnectionSpec, m: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [T, N], post [T, N] and C [T, N, N] of `m` [T, (2 + N) N], all fp32. `base`, `scale`: as in the reference."""
    assert m.dtype == base.dtype == scale.dtype == torch.float32
    m, tokens, n = m.contiguous(), len(m), spec.streams
    pre, post = m.new_empty(2, tokens, n).unbind()
    comb = m.new_empty(tokens, n, n)
    _mixing_weights()(pre, post, comb, m, base, scale, tokens, n, spec.iterations, spec.eps)
    return pre, post, comb


def hc_pre(
    spec: HyperConnectionSpec, streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference.hc_pre`."""
    pre, post, comb = mixing_weights(spec, mixes(streams, fn, spec.norm_eps), base, scale)
    return weighted_sum(pre, streams), post.to(streams.dtype), comb.to(streams.dtype)
