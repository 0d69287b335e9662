"""The bytes of the caches: one allocation per cache of a layer, or of a shared pool, and the views of families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from allotrope.attention.cache_layout import plane_views, pool_bytes, views
from allotrope.cache.memory import MemoryPlan
from allotrope.cache.units import UnitPages


class Arena:
    """All pools of a memory plan on one device, zeroed (page 0 must stay so).

    `layers`: per layer, cache name -> field name -> view; a layer that owns no cache has the views of the one it
    shares. `shares`: layer -> layer whose caches it reads.
    """

    def __init__(self, plan: MemoryPlan, layers: int, shares: Mapping[int, int], device: torch.device) -> None:
        self.bytes = 0
        self.layers: list[dict[str, dict[str, torch.Tensor]]] = [{} for _ in range(layers)]
        self._by_group: list[list[torch.Tensor]] = []
        sharing: dict[int, UnitPages] = {}
        units = 0
        if plan.shared is not None:
            units = plan.shared.units
            sharing = {one.group: one for one in plan.shared.layout.groups}
            # [M, U c]: chunk m of all units.
            chunks = _zeros(plan.shared.bytes, device).view(plan.shared.layout.chunks, -1)
            self.bytes += plan.shared.bytes
        for index, entry in enumerate(plan.groups):
            fields: list[torch.Tensor] = []
            for member in entry.group.members:
                if index in sharing:
                    pages = units * sharing[index].count
                    planes = sharing[index].planes(chunks, len(fields), len(member.layout.fields))
                    named = plane_views(member.layout, entry.group.page_size, pages, planes)
                else:
                    size = pool_bytes(member.layout, entry.group.page_size, entry.pages)
                    named = views(member.layout, entry.group.page_size, entry.pages, _zeros(size, device))
                    self.bytes += size
                self.layers[member.layer][member.name] = named
                fields.extend(named.values())
            self._by_group.append(fields)
        for layer, owner in shares.items():
            self.layers[layer] = self.layers[owner]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every view of every pool."""
        for fields in self._by_group:
            yield from fields

    def copy_pages(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy pages (or state slots) in all pools of their groups, in order. `copies`: (group, source, target)."""
        for group, source, target in copies:
            fields = self._by_group[group]
            if not fields:
                # The group's layers are on other ranks.
                continue
            torch._foreach_copy_([field[target] for field in fields], [field[source] for field in fields])


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """Zeroed bytes. On a CPU the kernel hands out zero pages only as they are touched, so start-up stays quick."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)
