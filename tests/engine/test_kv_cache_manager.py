"""The KV cache manager looks at a sequence's pages when a length is reached: never later than if it always did."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allotrope.attention.cache_layout import CacheLayout, Field, PagedRows, StateSlots, WindowRows
from allotrope.cache.groups import group_caches
from allotrope.cache.memory import GroupPlan, MemoryPlan
from allotrope.engine.kv_cache_manager import KVCacheManager
from allotrope.engine.sampling_batch import RowSampling
from allotrope.engine.sequence import Sequence
from allotrope.request import Request, SamplingParams

FIELD = (Field("x", (2,), torch.float32),)
MIXES: dict[str, list[CacheLayout]] = {
    "paged": [PagedRows(FIELD)],
    "windows": [WindowRows(FIELD, window=6), WindowRows(FIELD, window=9)],
    "state": [StateSlots(FIELD)],
    "all": [PagedRows(FIELD), PagedRows(FIELD, stride=8), WindowRows(FIELD, window=6), StateSlots(FIELD)],
}
PAGE_SIZE, PAGES, MOST_DRAFTS, INTERVAL = 4, 24, 3, 8
PARAMS = SamplingParams(temperature=0)


class AlwaysLooks(KVCacheManager):
    """Takes no sequence's word that there is nothing to do."""

    def reserve(self, seq: Sequence, tokens: int, spare: int = 0, ahead: int = 0) -> bool:
        seq.reserved = 0
        return super().reserve(seq, tokens, spare, ahead)

    def trim(self, seq: Sequence) -> None:
        seq.reserved = sys.maxsize
        super().trim(seq)

    def commit(self, seq: Sequence, tokens: int, unread_drafts: int = 0) -> None:
        seq.due = 0
        super().commit(seq, tokens, unread_drafts)

    def accept(self, seq: Sequence, drafts: int) -> None:
        seq.due = 0
        super().accept(seq, drafts)


class Side:
    """A manager, its sequences and the copies of states that it asked for."""

    def __init__(self, kind: type[KVCacheManager], mix: str, *, reuse: bool) -> None:
        groups = group_caches([{f"c{i}": layout} for i, layout in enumerate(MIXES[mix])], PAGE_SIZE)
        plans = tuple(GroupPlan(group, PAGES, 0) for group in groups)
        self.copies: list[tuple[int, int, int]] = []
        self.manager = kind(MemoryPlan(plans, 0, 0), lambda *copy: self.copies.append(copy), reuse=reuse)
        self.running: dict[int, Sequence] = {}
        # States of outputs that are kept within the lengths of this test.
        self.manager._decode_interval = INTERVAL

    def start(self, name: int, ids: list[int]) -> bool:
        request = Request(request_id=str(name), prompt_ids=tuple(ids), params=PARAMS, eos_ids=())
        sampling = RowSampling(params=PARAMS, eos_ids=(), seed=0, prompt_ids=request.prompt_ids, output_ids=[])
        seq = Sequence(request, 0, sampling, self.manager.prefix.chain(), 1000)
        if not self.manager.allocate(seq):
            return False
        self.running[name] = seq
        return True

    def step(self, name: int, tokens: int, drafts: int, accepted: int) -> bool:
        """A chunk of a prompt, or a token and drafts behind it. A sequence that finds no page is freed."""
        seq = self.running[name]
        decodes = len(seq.ids) - seq.computed <= 1
        chunk = min(tokens, len(seq.ids) - seq.computed)
        if seq.checkpoint_positions:
            chunk = min(chunk, seq.checkpoint_positions[0] - seq.computed)
        chunk, drafts = (1, drafts) if decodes or seq.replay else (chunk, 0)
        if not self.manager.reserve(seq, chunk + drafts):
            self.end(name)
            return False
        samples = seq.computed + chunk == len(seq.ids)
        drafts = drafts if samples else 0
        seq.replay = 0
        self.manager.commit(seq, chunk, drafts)
        accepted = min(accepted, drafts)
        if samples:
            new = [50 + (len(seq.ids) + i) % 7 for i in range(accepted + 1)]
            seq.ids += new
            seq.sampling.output_ids += new
        self.manager.accept(seq, accepted)
        seq.replay = accepted
        self.manager.trim(seq)
        return True

    def end(self, name: int) -> None:
        self.manager.free(self.running.pop(name))

    def seen(self) -> dict[str, Any]:
        names = ("computed", "pages", "slots", "num_cached_blocks", "checkpoint_positions", "decode_checkpoint")
        of_seqs = {
            key: [[*map(list, seq.pages)] if name == "pages" else getattr(seq, name) for name in names]
            for key, seq in self.running.items()
        }
        return {"sequences": of_seqs, "used": [pool.used for pool in self.manager.pools], "copies": self.copies}


@pytest.mark.parametrize("reuse", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pages_and_states_are_those_of_a_manager_that_always_looks(mix: str, reuse: bool, data: st.DataObject) -> None:
    sides = [Side(kind, mix, reuse=reuse) for kind in (KVCacheManager, AlwaysLooks)]
    for number in range(data.draw(st.integers(1, 60))):
        running = sorted(sides[0].running)
        act = data.draw(st.sampled_from(["start", *["step"] * 6 * bool(running), *["end"] * bool(running)]))
        if act == "start":
            # Prompts that share beginnings.
            length, turn = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 20))
            ids = [i if i < turn else 100 + i for i in range(length)]
            said = {side.start(number, ids) for side in sides}
        else:
            name = data.draw(st.sampled_from(running))
            if act == "step":
                given_ = [
                    data.draw(st.integers(low, high)) for low, high in ((1, 12), (0, MOST_DRAFTS), (0, MOST_DRAFTS))
                ]
                said = {side.step(name, *given_) for side in sides}
            else:
                said = {side.end(name) for side in sides}
        assert len(said) == 1
        assert sides[0].seen() == sides[1].seen()
