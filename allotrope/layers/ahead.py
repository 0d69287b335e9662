"""Every module with Triton kernels, those of attention included: what is compiled for each chip without one."""

from __future__ import annotations

from allotrope.attention import ahead

MODULES: tuple[str, ...] = (
    *ahead.MODULES,
    "allotrope.layers.grouping_triton",
    "allotrope.layers.hyper_connection_triton",
    "allotrope.layers.head_triton",
    "allotrope.layers.mlp_triton",
    "allotrope.layers.norm_triton",
    "allotrope.layers.quant.gluon_experts",
    "allotrope.layers.quant.gluon_fp4",
    "allotrope.layers.quant.triton_product",
    "allotrope.layers.quant.triton_quantize",
    "allotrope.layers.quant.triton_tiles",
    "allotrope.layers.ranking_triton",
    "allotrope.layers.routing_triton",
    "allotrope.layers.sampler_triton",
    "allotrope.layers.turn_triton",
)
"""Modules with a function `variants(arch) -> list[Variant]`, for `ahead.variants`."""
