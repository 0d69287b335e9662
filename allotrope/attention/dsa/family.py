"""The family as one object: its plan and its backends, best first."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.dsa import reference
from allotrope.attention.dsa.cost import MATMUL_SHARE, cost, gathered
from allotrope.attention.dsa.inputs import ready_inputs
from allotrope.attention.dsa.naive import naive
from allotrope.attention.dsa.plan import build_plan
from allotrope.attention.dsa.spec import IndexerSpec
from allotrope.attention.family import Family, formatted_entries
from allotrope.attention.mla.family import triton_rejects as latent_rejects
from allotrope.kernels.backend import lazily, runs_anywhere
from allotrope.kernels.chip import Chip
from allotrope.kernels.tiles import next_power_of_2
from allotrope.kernels.triton_version import e4m3fn_reasons

MAX_TOPK = 4096
INDEX_KEYS = 128
"""Keys of one product of the indexer on chips other than Hopper."""


def triton_rejects(spec: Any, chip: Chip) -> list[str]:
    """Why the Triton kernels cannot run a layer."""
    reasons = latent_rejects(spec.mla, chip)
    if spec.topk > MAX_TOPK and spec.indexer is not None:
        reasons.append(f"topk={spec.topk} (needs at most {MAX_TOPK})")
    if spec.indexer is not None:
        if spec.indexer.key_format == "scaled":
            reasons += e4m3fn_reasons("indexer keys", torch.float8_e4m3fn, chip)
        for name, most in (("num_heads", 128), ("head_dim", 256)):
            if getattr(spec.indexer, name) > most:
                reasons.append(f"indexer {name}={getattr(spec.indexer, name)} (needs at most {most})")
        needed = _index_memory(spec.indexer)
        if chip.vendor == "nvidia" and not chip.has_wgmma and needed > chip.shared_memory:
            reasons.append(f"shared_memory={chip.shared_memory // 1024} KiB (the indexer needs {needed // 1024} KiB)")
    return reasons


def _index_memory(indexer: IndexerSpec) -> int:
    """Bytes of shared memory of a product: the keys, and the queries of all heads or of a tile, in two-byte numbers."""
    return 2 * next_power_of_2(indexer.head_dim) * (INDEX_KEYS + max(64, next_power_of_2(indexer.num_heads)))


DSA = Family(
    name="dsa",
    backends=(
        AttentionBackend(
            "triton",
            triton_rejects,
            lazily("allotrope.attention.dsa.triton", "run"),
            plan=lazily("allotrope.attention.dsa.triton", "build_plan"),
            in_graphs=True,
            store=lazily("allotrope.attention.dsa.triton", "store_only"),
        ),
        AttentionBackend("reference", runs_anywhere, reference.run, plan=build_plan, store=reference.store_only),
    ),
    naive=naive,
    ready_inputs=ready_inputs,
    cost=cost,
    matmul_share=MATMUL_SHARE,
    # The second output is the top-k indices, -1 for none.
    output_shapes=lambda spec: (((spec.mla.num_heads, spec.mla.v_head_dim), None), ((spec.topk,), torch.int64)),
    with_cache=lambda spec, cache: dataclasses.replace(spec, mla=formatted_entries(spec.mla, cache)),
    scale_names=("kv_scale",),
    block_scaled=lambda spec: spec.mla.row_format == "scaled",
    cache_kinds=frozenset({"latent"}),
    gathered=gathered,
)
"""Latent attention over the top-k tokens that an indexer selects."""
