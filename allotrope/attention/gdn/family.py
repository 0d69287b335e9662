"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import dataclasses
import functools

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Family
from allotrope.attention.gdn import chunked, compiled, reference
from allotrope.attention.gdn.cost import MATMUL_SHARE, cost
from allotrope.attention.gdn.inputs import ready_inputs
from allotrope.attention.gdn.naive import naive
from allotrope.attention.gdn.plan import build_plan
from allotrope.attention.gdn.spec import GdnSpec
from allotrope.kernels.backend import lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import triton_reasons

# A program's chunk of 64 keys and queries and its tile of the state have to fit into shared memory.
MAX_HEAD_DIM = 256


def _triton_rejects(spec: GdnSpec, chip: Chip) -> list[str]:
    reasons = triton_reasons(chip)
    if spec.k_head_dim > MAX_HEAD_DIM:
        reasons.append(f"k_head_dim={spec.k_head_dim} (allowed: at most {MAX_HEAD_DIM})")
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for name, dtype in (("conv_dtype", spec.conv_dtype), ("state_dtype", spec.state_dtype)):
        if dtype not in kinds:
            reasons.append(f"{name}={dtype} (allowed: {', '.join(map(str, kinds))})")
    return reasons


GDN = Family(
    name="gdn",
    backends=(
        AttentionBackend(
            "triton",
            _triton_rejects,
            lazily("allotrope.attention.gdn.triton", "run"),
            plan=lazily("allotrope.attention.gdn.triton", "build_plan"),
            in_graphs=True,
        ),
        AttentionBackend("compiled", compiled.rejects, compiled.run, plan=compiled.plan),
        AttentionBackend(
            "chunked", runs_anywhere, functools.partial(reference.run, core=chunked.advance), plan=build_plan
        ),
        AttentionBackend("reference", runs_anywhere, reference.run, plan=build_plan),
    ),
    naive=naive,
    ready_inputs=ready_inputs,
    cost=cost,
    matmul_share=MATMUL_SHARE,
    output_shapes=lambda spec: (((spec.num_v_heads, spec.v_head_dim), None),),
    with_cache=lambda spec, cache: dataclasses.replace(
        spec, state_dtype=cache.state_dtype, max_drafts=cache.max_drafts
    ),
    cache_kinds=frozenset({"state"}),
)
"""Gated delta rule with a short convolution."""
