"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.csa import reference
from allotrope.attention.csa.cost import MATMUL_SHARE, cost, gathered
from allotrope.attention.csa.inputs import ready_inputs
from allotrope.attention.csa.naive import naive
from allotrope.attention.csa.plan import build_plan
from allotrope.attention.csa.rows import BLOCK, FP8
from allotrope.attention.csa.spec import CsaSpec
from allotrope.attention.family import Family, formatted_entries
from allotrope.kernels.backend import lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import e4m3fn_reasons, triton_reasons


def _triton_rejects(spec: CsaSpec, chip: Chip) -> list[str]:
    reasons = triton_reasons(chip) + e4m3fn_reasons("kv_dtype", spec.kv_dtype, chip)
    if not spec.rope.interleaved:
        reasons.append("rope.interleaved=False (needs True: pairs of neighbours)")
    dims = {"head_dim": spec.head_dim, "rope.dim": spec.rope.dim}
    if spec.indexer is not None:
        dims["indexer.head_dim"] = spec.indexer.head_dim
    reasons += [f"{name}={dim} (needs an even number)" for name, dim in dims.items() if dim % 2]
    if spec.row_format == "scaled" and spec.rope.dim > BLOCK:
        reasons.append(f"rope.dim={spec.rope.dim} of scaled rows (allowed: at most {BLOCK})")
    kinds = (torch.float32, torch.bfloat16, torch.float16, FP8)
    if spec.kv_dtype not in kinds:
        reasons.append(f"kv_dtype={spec.kv_dtype} (allowed: {', '.join(map(str, kinds))})")
    return reasons


CSA = Family(
    name="csa",
    backends=(
        AttentionBackend(
            "triton",
            _triton_rejects,
            lazily("allotrope.attention.csa.triton", "run"),
            plan=lazily("allotrope.attention.csa.triton", "build_plan"),
            in_graphs=True,
        ),
        AttentionBackend("reference", runs_anywhere, reference.run, plan=build_plan),
    ),
    naive=naive,
    ready_inputs=ready_inputs,
    cost=cost,
    matmul_share=MATMUL_SHARE,
    output_shapes=lambda spec: (((spec.num_heads, spec.head_dim), None),),
    with_cache=formatted_entries,
    scale_names=("kv_scale",),
    block_scaled=lambda spec: spec.row_format == "scaled",
    cache_kinds=frozenset({"compressed"}),
    gathered=gathered,
)
"""Compressed sparse attention."""
