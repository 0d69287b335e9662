"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

from typing import Any

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Family, formatted_entries
from allotrope.attention.mla import compiled, reference
from allotrope.attention.mla.cost import MATMUL_SHARE, cost
from allotrope.attention.mla.inputs import ready_inputs
from allotrope.attention.mla.naive import naive
from allotrope.attention.mla.plan import build_plan
from allotrope.kernels.backend import lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import e4m3fn_reasons, triton_reasons

# Channels of a latent that one program can hold for its heads.
MAX_LATENT_DIM = 512


def triton_rejects(spec: Any, chip: Chip) -> list[str]:
    """Why the Triton kernels cannot run a layer."""
    reasons = triton_reasons(chip) + e4m3fn_reasons("kv_dtype", spec.kv_dtype, chip)
    if spec.latent_dim > MAX_LATENT_DIM:
        reasons.append(f"latent_dim={spec.latent_dim} (needs at most {MAX_LATENT_DIM})")
    if spec.row_format == "scaled" and spec.latent_dim & (spec.latent_dim - 1):
        reasons.append(f"latent_dim={spec.latent_dim} in scaled rows (needs a power of two)")
    return reasons


MLA = Family(
    name="mla",
    backends=(
        AttentionBackend(
            "triton",
            triton_rejects,
            lazily("allotrope.attention.mla.triton", "run"),
            plan=lazily("allotrope.attention.mla.triton", "build_plan"),
            in_graphs=True,
            store=lazily("allotrope.attention.mla.triton", "store_only"),
        ),
        AttentionBackend(
            "compiled",
            compiled.rejects,
            compiled.run,
            plan=compiled.plan,
            fallbacks=compiled.fallbacks,
            store=compiled.store_only,
        ),
        AttentionBackend("reference", runs_anywhere, reference.run, plan=build_plan, store=reference.store_only),
    ),
    naive=naive,
    ready_inputs=ready_inputs,
    cost=cost,
    matmul_share=MATMUL_SHARE,
    output_shapes=lambda spec: (((spec.num_heads, spec.v_head_dim), None),),
    with_cache=formatted_entries,
    scale_names=("kv_scale",),
    block_scaled=lambda spec: spec.row_format == "scaled",
    cache_kinds=frozenset({"latent"}),
)
"""Attention over one latent per token that all heads share."""
