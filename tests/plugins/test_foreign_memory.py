"""Every backend that runs here gives the same in memory that a host lays out: rows with their fields side by side, and
states in pages that are longer than they are."""

from __future__ import annotations

import pytest
import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.cache_layout import StateSlots, page_bytes, page_views, row_bytes
from allotrope.attention.check import Case, cases, compare
from allotrope.attention.registry import FAMILIES
from allotrope.attention.replay import Replay, at_random
from allotrope.kernels.chip import CPU as CPU_CHIP

CPU = torch.device("cpu")
HERE = [
    (family.name, backend, name)
    for family in FAMILIES.values()
    for backend in family.backends
    for name, case in cases(family.name).items()
    if not backend.rejects(case.spec, CPU_CHIP)
]


class Hosted(Replay):
    """A replay whose pools are views of whole pages."""

    def __init__(self, case: Case, backend: AttentionBackend) -> None:
        super().__init__(case, backend)
        for name, layout in self.layouts.items():
            pages = len(next(iter(self.pools[name].values())))
            size = page_bytes(layout, self.page_sizes[name])
            if isinstance(layout, StateSlots):
                size = -(-row_bytes(layout) // 64) * 64 + 64
            memory = torch.full((pages, size), 0xFF, dtype=torch.uint8)
            memory[0] = 0
            self.pools[name] = page_views(layout, memory)


@pytest.mark.parametrize(("family", "backend", "name"), HERE, ids=[f"{f}-{b.name}-{n}" for f, b, n in HERE])
def test_same_in_a_hosts_pages(family: str, backend: AttentionBackend, name: str) -> None:
    case = cases(family)[name]
    steps = at_random(case.lengths, seed=1)
    hosted = Hosted(case, backend)
    got, want = hosted.play(steps), Replay(case, backend).play(steps)
    found = compare(got, want, "fp32")
    assert found, str(found)
    assert not any(pool[0].any() for pools in hosted.pools.values() for pool in pools.values())
