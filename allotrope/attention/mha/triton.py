"""Softmax attention by Triton and Gluon kernels.

One kernel norms, rotates and stores a step's heads. Requests with one new token run the decode kernel, the others the
prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex, VerifyTensors
from allotrope.attention.family import CacheViews
from allotrope.attention.mha import gluon_prefill, triton_decode, triton_prefill, triton_store
from allotrope.attention.mha.inputs import MhaInputs, normed_and_rotated
from allotrope.attention.mha.spec import MhaSpec
from allotrope.kernels.chip import Chip, chip_of
from allotrope.ops.qk_norm_rope import Rows
from allotrope.ops.qk_norm_rope.triton import rope_store


@dataclass(eq=False)
class TritonPlan:
    """`batch`: lengths; those of decodes are upper bounds. `paged`: slot mapping and page table. `window`: the sliding
    window of every layer that uses the plan. `verify`: which of the decodes are drafts of others; None without
    speculative decoding. `_tiles`: tokens of a tile -> tiles, built for the first layer that needs them."""

    batch: BatchLayout
    paged: PageIndex
    window: int | None
    verify: VerifyTensors | None = None
    _tiles: dict[int, triton_prefill.Tiles] = field(default_factory=dict, repr=False)

    def tiles(self, tokens: int) -> triton_prefill.Tiles:
        """The prompts in tiles of at most `tokens` tokens."""
        if tokens not in self._tiles:
            self._tiles[tokens] = triton_prefill.tiles(self.batch, self.window, tokens)
        return self._tiles[tokens]


def build_plan(spec: MhaSpec, batch: BatchLayout, index: Mapping[str, CacheIndex]) -> TritonPlan:
    """Plan one step for every layer that has `spec`'s window. `index` has the entry "kv"."""
    paged = index["kv"]
    assert isinstance(paged, PageIndex)
    return TritonPlan(batch, paged, spec.window, batch.verify_tensors)


def run(spec: MhaSpec, plan: TritonPlan, caches: CacheViews, inputs: MhaInputs) -> torch.Tensor:
    """As `reference.run`; one launch norms, rotates and stores, where each head is normed by itself."""
    k_scale, v_scale = inputs.k_scale, inputs.v_scale
    if not inputs.normed_by_head:
        q, k, v = normed_and_rotated(inputs)
        return store_and_attend(spec, plan, caches, q, k, v, inputs.sinks, k_scale=k_scale, v_scale=v_scale)
    q = _rotate_and_store(plan, caches, inputs)
    return store_and_attend(spec, plan, caches, q, None, None, inputs.sinks, k_scale=k_scale, v_scale=v_scale)


def store_only(spec: MhaSpec, plan: TritonPlan, caches: CacheViews, inputs: MhaInputs) -> None:
    """As `reference.store_only`."""
    if inputs.normed_by_head:
        _rotate_and_store(plan, caches, inputs)
        return
    _, k, v = normed_and_rotated(inputs)
    assert k is not None and v is not None, "the layer has no cache"
    triton_store.store(spec, plan.paged.slots, dict(caches["kv"]), k, v, inputs.k_scale, inputs.v_scale)


def _rotate_and_store(plan: TritonPlan, caches: CacheViews, inputs: MhaInputs) -> torch.Tensor:
    """Norm, rotate and store by one launch. Returns the queries [T, H, D]."""
    rows = None
    if inputs.heads.kv_heads:
        pools = caches["kv"]
        rows = Rows(pools["k"], pools.get("v"), plan.paged.slots, inputs.k_scale, inputs.v_scale)
    q_weight, k_weight = (None if norm is None else norm.weight for norm in (inputs.q_norm, inputs.k_norm))
    q, _, _ = rope_store(inputs.heads, inputs.projected, inputs.rotation, q_weight, k_weight, rows)
    return q


def store_and_attend(
    spec: MhaSpec,
    plan: TritonPlan,
    caches: CacheViews,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """As `reference.store_and_attend`; tokens of requests of length 0 become zeros."""
    batch, paged, pools = plan.batch, plan.paged, dict(caches["kv"])
    if k is not None and v is not None:
        triton_store.store(spec, paged.slots, pools, k, v, k_scale, v_scale)
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q.new_empty(q.shape[0], spec.num_heads, spec.value_dim)
    chip, decodes = chip_of(q.device), batch.num_decodes
    if decodes:
        triton_decode.decode(
            spec, triton_decode.config(chip, spec, q.dtype), q[:decodes], pools, paged.table, batch.tensors.seq_lens,
            max(batch.seq_lens[:decodes]), sinks, out, k_scale, v_scale, plan.verify,
        )  # fmt: skip
    if decodes < batch.num_requests:
        _prefill(spec, plan, chip, q, pools, sinks, out, k_scale, v_scale)
    return out


def _prefill(
    spec: MhaSpec,
    plan: TritonPlan,
    chip: Chip,
    q: torch.Tensor,
    pools: dict[str, torch.Tensor],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Run the prompts: by producer and consumer warpgroups where `gluon_prefill.config` has a launch for the chip and
    the layer (WGMMA, heads above 64), else by one program a tile, which every chip runs."""
    how = triton_prefill.config(chip, spec, q.dtype)
    gluon_how = gluon_prefill.config(chip, spec, q.dtype)
    block_m = how.block_m if gluon_how is None else gluon_how.block_m
    tiles = plan.tiles(block_m // triton_prefill.heads_per_tile(spec, block_m))
    args = (q, pools, plan.paged.table, sinks, out, k_scale, v_scale)
    if not triton_prefill.fits_scratch(spec, tiles, q.dtype):
        how = triton_prefill.without_gather(chip, spec, how)
        tiles = plan.tiles(how.block_m // triton_prefill.heads_per_tile(spec, how.block_m))
        triton_prefill.prefill(spec, how, tiles, *args)
    elif gluon_how is None:
        triton_prefill.prefill(spec, how, tiles, *args)
    else:
        gluon_prefill.prefill(spec, gluon_how, tiles, *args)
