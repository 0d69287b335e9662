"""The KV cache manager: gives pages and state slots to sequences, frees them, and caches full pages for reuse.

Owns the bookkeeping of every cache group. Must not know in which order sequences run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from allotrope.cache.groups import CacheGroup
from allotrope.cache.memory import MemoryPlan
from allotrope.cache.pages import PagePool
from allotrope.cache.prefix import Match, PrefixCache
from allotrope.engine.sequence import Sequence

# A decoding sequence copies its state once in so many tokens. For Qwen3-Next 150 MB are moved, 2.3 MB a token,
# where a step reads 2 GB and more.
_DECODE_CHECKPOINT_TOKENS = 64

CopyPage = Callable[[int, int, int], None]


class KVCacheManager:
    """`copy_page(group, source, target)` copies a state slot on the device(s)."""

    def __init__(self, plan: MemoryPlan, copy_page: CopyPage, *, reuse: bool) -> None:
        self.groups = [entry.group for entry in plan.groups]
        self.pools = [PagePool(entry.pages) for entry in plan.groups]
        self.prefix = PrefixCache(self.groups, self.pools)
        self.reuse = reuse
        self._copy_page = copy_page
        self._state_groups = [i for i, group in enumerate(self.groups) if group.kind == "state"]
        unit = self.prefix.unit
        self._decode_interval = -(-_DECODE_CHECKPOINT_TOKENS // unit) * unit
        # By slot of the first group with states: the accepted drafts that the checkpoint in it lacks.
        self._replays: dict[int, int] = {}

    def fits_alone(self, tokens: int, chunk: int) -> bool:
        """Whether one sequence of `tokens` tokens could run with nothing beside it."""
        return all(group.live_pages(tokens, chunk) <= pool.total for group, pool in self._pairs())

    def allocate(self, seq: Sequence) -> bool:
        """Give `seq` the pages that the prefix cache has, and a state slot where the model has state.

        Returns False, with nothing allocated, if there is no slot. Further pages come with `reserve`.
        """
        if any(group.kind == "state" and not pool.available for group, pool in self._pairs()):
            return False
        match = self._match(seq)
        seq.computed, seq.pages = match.tokens, [array("q", pages) for pages in match.pages]
        seq.num_cached_blocks = [len(pages) for pages in seq.pages]
        seq.slots = [0] * len(self.groups)
        for index, (group, pool) in enumerate(self._pairs()):
            for page in seq.pages[index]:
                if page >= 0:
                    pool.incref(page)
            if group.kind == "state":
                self._allocate_slot(seq, index, match.states[index])
        if self._state_groups:
            seq.replay = self._replays.get(match.states[self._state_groups[0]], 0)
        if not seq.started:
            seq.cached_tokens, seq.cache_lost = match.tokens, match.lost
        self._plan_checkpoints(seq, match.checkpoint_position)
        return True

    def _match(self, seq: Sequence) -> Match:
        if self.reuse and not seq.wants_prompt_logprobs:
            return self.prefix.match(seq.ids, seq.chain)
        return Match(0, ((),) * len(self.groups), (0,) * len(self.groups))

    def _allocate_slot(self, seq: Sequence, index: int, state: int) -> None:
        """A slot of its own for `seq`, with a copy of the checkpoint `state` if there is one."""
        pool = self.pools[index]
        if state:
            # With a reference, so that making room for the slot cannot evict the very checkpoint.
            pool.incref(state)
        if pool.available:
            seq.slots[index] = pool.allocate()
            if state:
                self._copy_page(index, state, seq.slots[index])
                pool.decref(state)
            return
        # The checkpoint is the last slot there is: it becomes the sequence's own.
        pool.evict(state)
        seq.slots[index] = state

    def _pairs(self) -> Iterator[tuple[CacheGroup, PagePool]]:
        return zip(self.groups, self.pools, strict=True)

    def _plan_checkpoints(self, seq: Sequence, checkpoint_position: int) -> None:
        """Keep a state where another prompt diverged from a cached one, and where this prompt's last full page ends."""
        if self._state_groups and self.reuse:
            unit = self.prefix.unit
            ends = {checkpoint_position, (seq.prompt_len - 1) // unit * unit}
            seq.checkpoint_positions = sorted(end for end in ends if end > seq.computed)

    def reserve(self, seq: Sequence, tokens: int, spare: int = 0) -> bool:
        """Make room for `tokens` more tokens, leaving `spare` pages in each group.

        Returns False, with nothing allocated, where a group has fewer.
        """
        missing = [
            0 if group.kind == "state" else group.pages_for(seq.computed + tokens) - len(pages)
            for group, pages in zip(self.groups, seq.pages, strict=True)
        ]
        if any(count > 0 and count + spare > pool.available for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for index, count in enumerate(missing):
            seq.pages[index].extend(self.pools[index].allocate() for _ in range(count))
        return True

    def trim(self, seq: Sequence) -> None:
        """Give back the pages of `seq` behind its stored tokens."""
        for (group, pool), pages in zip(self._pairs(), seq.pages, strict=True):
            if group.kind != "state":
                while len(pages) > group.pages_for(seq.computed):
                    pool.decref(pages.pop())

    def commit(self, seq: Sequence, tokens: int) -> None:
        """Account for `tokens` more stored tokens: cache full pages for reuse, free out-of-window pages."""
        seq.computed += tokens
        if self.reuse:
            self._cache_blocks(seq)
            self._checkpoint(seq)
        for (group, pool), pages in zip(self._pairs(), seq.pages, strict=True):
            for j in range(group.out_of_window_pages(seq.computed) - 1, -1, -1):
                if pages[j] < 0:
                    break
                pool.decref(pages[j])
                pages[j] = -1

    def _cache_blocks(self, seq: Sequence) -> None:
        for index, (group, pool) in enumerate(self._pairs()):
            pages = seq.pages[index]
            if group.kind == "state":
                continue
            full = seq.computed // group.page_size
            for j in range(seq.num_cached_blocks[index], full):
                if pages[j] >= 0 and self.prefix.is_useful(index, j):
                    pool.cache_block(pages[j], seq.chain.key(seq.ids, (j + 1) * group.page_size))
            seq.num_cached_blocks[index] = full

    def _checkpoint(self, seq: Sequence) -> None:
        """Keep the state at a planned position of the prompt, and the last one of the output that lies on the interval.

        The state lacks the accepted drafts of the step, whose inputs are beside it: its next reader replays as many of
        them as the position needs.
        """
        if seq.checkpoint_positions:
            if seq.computed == seq.checkpoint_positions[0]:
                self._keep_state(seq, seq.checkpoint_positions.pop(0), 0)
            return
        position = seq.computed // self._decode_interval * self._decode_interval
        replay = position - (seq.computed - seq.replay)
        if position >= seq.prompt_len and replay >= 0:
            former, seq.decode_checkpoint = seq.decode_checkpoint, None
            if former is not None:
                self._drop_state(former)
            seq.decode_checkpoint = self._keep_state(seq, position, replay)

    def _keep_state(self, seq: Sequence, position: int, replay: int) -> bytes | None:
        """Copy the state of `seq` into a slot of its own. Returns its key; None where it is kept already, or there is
        no slot."""
        key = seq.chain.key(seq.ids, position)
        pools = [self.pools[index] for index in self._state_groups]
        if not pools or all(pool.find(key) is not None for pool in pools) or not all(pool.available for pool in pools):
            return None
        # The copies of a key lack the same drafts in all groups.
        self._drop_state(key)
        for index, pool in zip(self._state_groups, pools, strict=True):
            copy = pool.allocate()
            self._copy_page(index, seq.slots[index], copy)
            pool.cache_block(copy, key)
            pool.decref(copy)
            if index == self._state_groups[0]:
                self._replays[copy] = replay
        return key

    def _drop_state(self, key: bytes) -> None:
        """Evict the state checkpoint with a key, where there is one."""
        for index in self._state_groups:
            page = self.pools[index].find(key)
            if page is not None:
                self.pools[index].evict(page)

    def free(self, seq: Sequence, *, evict: bool = False) -> None:
        """Free the pages and slots of `seq`. `evict`: no later request reuses a page of its prefix."""
        if evict:
            # Its tables lack out-of-window pages and state checkpoints.
            for pool in self.pools:
                for page in filter(None, map(pool.find, seq.chain.keys)):
                    pool.evict(page)
        for pool, pages, slot in zip(self.pools, seq.pages, seq.slots, strict=True):
            # The last pages of a sequence are the least likely to be reused: they are evicted first.
            for j in range(len(pages) - 1, -1, -1):
                if pages[j] >= 0:
                    pool.decref(pages[j])
            if slot:
                pool.decref(slot)
        seq.pages = [array("q") for _ in self.groups]
        seq.slots = [0] * len(self.groups)
        seq.num_cached_blocks = [0] * len(self.groups)
        seq.checkpoint_positions, seq.decode_checkpoint = [], None
        seq.computed = seq.replay = 0
        seq.drafts = seq.draft_indices = ()

    def evict_all(self) -> None:
        """Evict every cached page."""
        for pool in self.pools:
            pool.evict_all()
