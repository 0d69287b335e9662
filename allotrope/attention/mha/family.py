"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import functools

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.family import Family, plain_entries
from allotrope.attention.mha import compiled, cpu, reference
from allotrope.attention.mha.cost import MATMUL_SHARE, cost
from allotrope.attention.mha.inputs import ready_inputs
from allotrope.attention.mha.naive import naive
from allotrope.attention.mha.plan import build_plan
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.backend import lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.triton_version import e4m3fn_reasons, triton_reasons

_TRITON = "allotrope.attention.mha.triton"
_TRITON_ROWS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def _triton_rejects(spec: MhaSpec, chip: Chip) -> list[str]:
    reasons = triton_reasons(chip)
    if spec.kv_dtype not in _TRITON_ROWS:
        reasons.append(f"kv_dtype={spec.kv_dtype} (needs one of {', '.join(str(dtype) for dtype in _TRITON_ROWS)})")
    reasons += e4m3fn_reasons("kv_dtype", spec.kv_dtype, chip)
    return reasons


MHA = Family(
    name="mha",
    backends=(
        AttentionBackend(
            "triton",
            _triton_rejects,
            lazily(_TRITON, "run"),
            plan=lazily(_TRITON, "build_plan"),
            in_graphs=True,
            store=lazily(_TRITON, "store_only"),
        ),
        AttentionBackend(
            "compiled",
            compiled.rejects,
            compiled.run,
            plan=compiled.plan,
            fallbacks=compiled.fallbacks,
            store=compiled.store_only,
            recorded=compiled.recorded,
        ),
        AttentionBackend(
            "cpu",
            cpu.rejects,
            functools.partial(reference.run, core=cpu.attend),
            plan=build_plan,
            store=reference.store_only,
        ),
        AttentionBackend("reference", runs_anywhere, reference.run, plan=build_plan, store=reference.store_only),
    ),
    naive=naive,
    ready_inputs=ready_inputs,
    cost=cost,
    matmul_share=MATMUL_SHARE,
    output_shapes=lambda spec: (((spec.num_heads, spec.value_dim), None),),
    with_cache=plain_entries,
    scale_names=("k_scale", "v_scale"),
)
"""Softmax attention over keys and values."""
