"""In a step that can be captured a host hands over its own tables: kernels answer as they do with ours, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from allotrope.attention.backend import AttentionBackend
from allotrope.attention.batch import BatchLayout, CacheIndex, PageIndex, SlotIndex
from allotrope.attention.check import cases
from allotrope.attention.replay import Replay, in_order
from allotrope.kernels.backend import lazily

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = (
    ("mha", "grouped_4"),
    ("mha", "window_and_sinks"),
    ("mla", "small"),
    ("dsa", "picking"),
    ("gdn", "one_to_two"),
    ("csa", "window_only"),
    ("csa", "chosen"),
    ("csa", "all_overlapping"),
)
LENGTHS = (9, 34, 70)
BOUND = 96


def triton(family: str) -> AttentionBackend:
    plan, run = (lazily(f"allotrope.attention.{family}.triton", name) for name in ("build_plan", "run"))
    return AttentionBackend("triton", lambda spec, chip: [], run, plan=plan, in_graphs=True)


class Captured(Replay):
    """Decodes as a captured step has them: the host's lengths are bounds."""

    def plan(self, batch: BatchLayout, index: dict[str, CacheIndex]) -> object:
        if batch.num_decodes == batch.num_requests:
            count = batch.num_requests
            batch = BatchLayout((1,) * count, (BOUND,) * count, batch.device, batch.tensors)
            index = {name: self.given(entry) for name, entry in index.items()}
        return super().plan(batch, index)

    def given(self, entry: CacheIndex) -> CacheIndex:
        return entry


class Handed(Captured):
    """The same with a host's tables: int32, parts of larger ones, another's page where there is none."""

    def given(self, entry: CacheIndex) -> CacheIndex:
        if isinstance(entry, SlotIndex):
            return SlotIndex(entry.slots.int())
        rows, width = entry.table.shape
        wide = torch.ones(rows, 3 * BOUND, dtype=torch.int32, device=self.device)
        wide[:, :width] = torch.where(entry.table < 0, 0, entry.table)
        return PageIndex(entry.page_size, wide[:, : 2 * BOUND], entry.slots)


def played(kind: type[Replay], family: str, name: str) -> Replay:
    case = dataclasses.replace(cases(family)[name], lengths=LENGTHS)
    replay = kind(case, triton(family), DEVICE)
    replay.play([in_order((i, n - 3) for i, n in enumerate(LENGTHS)), *[[(i, 1) for i in range(3)]] * 3])
    return replay


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_hosts_tables_are_read_as_ours(family: str, name: str) -> None:
    want, found = played(Captured, family, name), played(Handed, family, name)
    assert _bits(found.outputs) == _bits(want.outputs)
    for cache, fields in want.pools.items():
        for field, pool in fields.items():
            assert torch.equal(_raw(found.pools[cache][field]), _raw(pool)), (cache, field)


def _bits(outputs: Sequence[Sequence[torch.Tensor]]) -> list[bytes]:
    return [_raw(torch.cat(list(parts))).cpu().numpy().tobytes() for parts in outputs]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
