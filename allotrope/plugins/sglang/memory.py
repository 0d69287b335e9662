"""Our caches in two pools of SGLang's: one for entries of tokens, one for states. Imports nothing of SGLang.

SGLang counts tokens and states, and allocates so many elements for each. What they mean is our cache layouts' business:
a pool is cut into one plane for each field of each cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from allotrope.attention.cache_layout import (
    PLANE_ALIGNMENT,
    CacheLayout,
    StateSlots,
    page_bytes,
    page_views,
    pool_bytes,
    row_bytes,
    views,
)
from allotrope.layers.build import Build
from allotrope.layers.model_spec import ModelSpec
from allotrope.layers.parallel import Parallel
from allotrope.loading.kv_scales import attention_specs

# SGLang allocates keys and values of heads; a head of ours is so many elements of each.
HEAD_DIM = 32


@dataclass(frozen=True)
class CacheMemory:
    """The caches of a model, `layouts`, in the order of its layers."""

    layouts: tuple[CacheLayout, ...]

    @property
    def row_stride(self) -> int:
        """Tokens that a page must be a multiple of."""
        return math.lcm(*(getattr(layout, "stride", 1) for layout in self.layouts))

    @property
    def state_bytes(self) -> int:
        """Of all states of one sequence, 0 without any."""
        return sum(_aligned(row_bytes(layout)) for layout in self.layouts if isinstance(layout, StateSlots))

    def heads(self, itemsize: int) -> int:
        """Heads of `HEAD_DIM` elements of `itemsize` bytes, in keys and in values, that hold the entries of a token."""
        sizes = [0, 0]
        for layout, half in zip(self.layouts, self._halves, strict=True):
            sizes[half] += self._weight(layout)
        # One more covers the padding between planes.
        return -(-max(sizes) // (HEAD_DIM * itemsize * self.row_stride)) + 1

    def cut(
        self, page_size: int, halves: Sequence[torch.Tensor], states: torch.Tensor | None
    ) -> list[dict[str, torch.Tensor]]:
        """The views of each cache.

        `halves`: SGLang's keys and its values, [slots, ...] with one slot a token. `states`: [S, ...], of all states,
        None where there are none. Raises ValueError where they are too small.
        """
        pages = len(halves[0]) // page_size
        raw = [half.view(-1).view(torch.uint8) for half in halves]
        found, starts, state = [], [0, 0], 0
        for layout, half in zip(self.layouts, self._halves, strict=True):
            if isinstance(layout, StateSlots):
                assert states is not None
                slots = states.flatten(1).view(torch.uint8)[:, state : state + row_bytes(layout)]
                found.append(page_views(layout, slots))
                state += _aligned(row_bytes(layout))
                continue
            end = starts[half] + pool_bytes(layout, page_size, pages)
            if end > len(raw[half]):
                raise ValueError(f"a pool of {len(raw[half])} bytes does not hold {end}")
            found.append(views(layout, page_size, pages, raw[half][starts[half] : end]))
            starts[half] = _aligned(end)
        return found

    @cached_property
    def _halves(self) -> tuple[int, ...]:
        """Of each cache, whether SGLang's keys (0) or its values (1) hold it: what has fewer bytes so far."""
        sizes, halves = [0, 0], []
        for layout in self.layouts:
            halves.append(int(sizes[1] < sizes[0]))
            sizes[halves[-1]] += self._weight(layout)
        return tuple(halves)

    def _weight(self, layout: CacheLayout) -> int:
        """Bytes of `row_stride` tokens; states have a pool of their own."""
        return 0 if isinstance(layout, StateSlots) else page_bytes(layout, self.row_stride)


def planned_layouts(spec: ModelSpec, source: str) -> tuple[CacheLayout, ...]:
    """Of the caches of a model that is not yet built, with entries in fp32."""
    build = Build(torch.float32, torch.float32, torch.device("meta"), Parallel(0, 1))
    return tuple(layout for one in attention_specs(spec, build, source) for layout in one.caches().values())


def _aligned(size: int) -> int:
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
