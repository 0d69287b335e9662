"""Caches of our layers as vLLM's cache manager sees them, and what it tells about them each step.

Every cache of a layer is one attention layer of vLLM's static forward context. Its spec names bytes and lifetimes only;
what the bytes mean is our own cache layout's business.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImplBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

from allotrope.attention.batch import BatchLayout, CacheIndex
from allotrope.attention.cache_layout import CacheLayout, StateSlots, WindowRows, page_views, row_bytes
from allotrope.plugins.steps import Order, rows_index
from allotrope.plugins.vllm import log
from allotrope.plugins.vllm.pools import Pool
from allotrope.plugins.vllm.translate import describe, page_of, page_tokens, states_index, stride


@functools.cache
def _announce(layouts: tuple[CacheLayout, ...], block_size: int) -> None:
    """Say once what the one page size costs."""
    log.info("allotrope: %s", describe(layouts, block_size))


class HostedCache(AttentionLayerBase):
    """One cache of one layer, or several with one lifetime.

    `name`: in the static forward context, with exactly one integer. `layouts`: of all pools of the model, which share
    one page size or one block table. `in_graphs`: whether all layers of the model can be captured. `views`: as a
    family reads each member of the pool, empty until vLLM has allocated it. `readers`: by name, the layers that find
    each other's step here. `model`: which the first of them is part of.
    """

    def __init__(self, name: str, pool: Pool, layouts: tuple[CacheLayout, ...], in_graphs: bool) -> None:
        self.name, self.pool, self.layouts, self.in_graphs = name, pool, layouts, in_graphs
        self.layout = pool.layout
        self.views: tuple[dict[str, torch.Tensor], ...] = ()
        self.readers: dict[str, Any] = {}
        self.model: Any = None
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        if isinstance(self.layout, StateSlots):
            return StateBackend
        # With several tokens to a row somewhere, a page that is long for one cache is far too long for another.
        return RowsBackend if any(stride(layout) > 1 for layout in self.layouts) else LongPagesBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Full attention for rows that are kept, a sliding window only for rows that have one, else a state.

        vLLM asks when a model has its weights. Raises ModelError where they did not come through the model.
        """
        if self.model is not None:
            self.model.check_loaded()
        config = vllm_config.cache_config
        _announce(self.layouts, config.block_size)
        page = page_of(self.layout, self.layouts, config.block_size)
        size = row_bytes(self.layout)
        if isinstance(self.layout, StateSlots):
            return MambaSpec(
                block_size=config.mamba_block_size,
                shapes=((size,),),
                dtypes=(torch.uint8,),
                page_size_padded=page,
                mamba_type=MambaAttentionBackendEnum.CUSTOM,
                mamba_cache_mode=config.mamba_cache_mode,
            )
        rows: dict[str, Any] = {
            "block_size": page_tokens(self.layout, page),
            "num_kv_heads": 1,
            "head_size": size,
            "head_size_v": 0,
            "dtype": torch.uint8,
        }
        if isinstance(self.layout, WindowRows):
            return SlidingWindowSpec(sliding_window=self.layout.window, **rows)
        return _kept_rows(stride(self.layout), rows)

    @property
    def kv_cache(self) -> torch.Tensor | list[torch.Tensor]:
        """As vLLM reads it: rows as they were bound; of states a list of what to copy, here all of it."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, bound: torch.Tensor | list[torch.Tensor]) -> None:
        """`bound`: [P, 1, rows, bytes], or of states int8 [P, 1, 1, bytes] or a list of one [P, bytes], with pages of
        any stride; or nothing, where vLLM takes the memory back."""
        tensor = bound if isinstance(bound, torch.Tensor) else next(iter(bound), torch.tensor([]))
        self._kv_cache, self.views = bound, ()
        if tensor.numel():
            pages = tensor.view(torch.uint8).flatten(1)
            fields = page_views(self.layout, pages)
            self.views = tuple(self.pool.views_of(number, fields) for number in range(len(self.pool.members)))
            self._kv_cache = [pages] if isinstance(self.layout, StateSlots) else tensor


@dataclass(frozen=True)
class CacheMember:
    """One cache of one layer: the member `number` of the pool `cache`."""

    cache: HostedCache
    number: int

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """As the family reads it; empty until vLLM has allocated it."""
        views = self.cache.views
        return views[self.number] if views else {}


def _kept_rows(tokens: int, rows: dict[str, Any]) -> KVCacheSpec:
    """Full attention with `tokens` to a row, which in 0.25 only the spec of latent rows can say."""
    if tokens == 1:
        return FullAttentionSpec(**rows)
    if "tokens_per_state" in FullAttentionSpec.__dataclass_fields__:
        return FullAttentionSpec(tokens_per_state=tokens, **rows)
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(compress_ratio=tokens, **rows)


@dataclass
class HostedStep:
    """What vLLM says of one group of caches in a step, and `plans`: of the layers that read them, by layer name."""

    common: CommonAttentionMetadata
    spec: KVCacheSpec
    plans: dict[str, Any] = field(default_factory=dict)

    def index(self, batch: BatchLayout, order: Order) -> CacheIndex:
        """Where the rows (or states) of the step's requests lie."""
        table = self.common.block_table_tensor
        if not isinstance(self.spec, MambaSpec):
            return rows_index(batch, order, table, self.common.slot_mapping, self.spec.block_size)
        each = None if self.spec.mamba_cache_mode == "none" else self.spec.block_size
        return states_index(batch, order, table, each)


class StepBuilder(AttentionMetadataBuilder[HostedStep]):
    """Hands on what vLLM says; a family's plan is made when all caches of its layers are known, once for all layers."""

    # A help only: requests are ordered again where vLLM's order differs from ours.
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Decodes, where every layer's plan is made by device operations alone; else nothing."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        ours = [layer.in_graphs for layer in layers if isinstance(layer, HostedCache)]
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if all(ours) else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> HostedStep:
        return HostedStep(common_attn_metadata, self.kv_cache_spec)


class RowsBackend(AttentionBackend):
    """Rows of any family."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "ALLOTROPE"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return AttentionImplBase

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """A layer's pages lie back to back, so that a row has one number in its pool."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The same where backends have no layouts to name (0.25)."""
        return (num_blocks, num_kv_heads, block_size, head_size)


class LongPagesBackend(RowsBackend):
    """Rows of models whose pages may be long: kernels find the page of all keys that they read together at once."""

    @staticmethod
    def get_name() -> str:
        return "ALLOTROPE_LONG_PAGES"

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where the user asks for no other (of vLLM's platforms with a GPU)."""
        return max(default_block_size, 64)


class StateBackend(RowsBackend):
    """States of any family."""

    @staticmethod
    def get_name() -> str:
        return "ALLOTROPE_STATE"

    @classmethod
    def is_ssm(cls) -> bool:
        return True
