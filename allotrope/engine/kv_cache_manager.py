"""The KV cache manager: gives pages and state slots to sequences, frees them, and caches full pages for reuse.

Owns the bookkeeping of every cache group. Must not know in which order sequences run.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator

from allotrope.cache.groups import CacheGroup
from allotrope.cache.memory import MemoryPlan
from allotrope.cache.pages import PageIndex, PagePool
from allotrope.cache.prefix import Match, PrefixCache
from allotrope.cache.shared_pool import SharedPool
from allotrope.engine.sequence import Sequence, TentativeCheckpoint

# A decoding sequence copies its state once in so many tokens. For Qwen3-Next 150 MB are moved, 2.3 MB a token,
# where a step reads 2 GB and more.
_DECODE_CHECKPOINT_TOKENS = 64

CopyPage = Callable[[int, int, int], None]


class KVCacheManager:
    """`copy_page(group, source, target)` copies a state slot on the device(s)."""

    def __init__(self, plan: MemoryPlan, copy_page: CopyPage, *, reuse: bool) -> None:
        self.groups = [entry.group for entry in plan.groups]
        self._shared = None if plan.shared is None else SharedPool(plan.shared.layout, plan.shared.units)
        sharing = {} if self._shared is None else {pool.pages.group: pool for pool in self._shared.pools}
        self.pools: list[PageIndex] = [sharing.get(i) or PagePool(entry.pages) for i, entry in enumerate(plan.groups)]
        # Sequences with pages.
        self._num_sequences = 0
        self.prefix = PrefixCache(self.groups, self.pools)
        self.reuse = reuse
        self._copy_page = copy_page
        self._state_groups = [i for i, group in enumerate(self.groups) if group.kind == "state"]
        self._paged = [(i, group) for i, group in enumerate(self.groups) if group.kind != "state"]
        self._min_page_size = min((group.page_size for _, group in self._paged), default=0)
        run_length = self.prefix.run_length
        self._decode_interval = -(-_DECODE_CHECKPOINT_TOKENS // run_length) * run_length
        # By slot of the first group with states: the accepted drafts that the checkpoint in it lacks.
        self._replays: dict[int, int] = {}

    def fits_alone(self, tokens: int, chunk: int) -> bool:
        """Whether one sequence of `tokens` tokens could run with nothing beside it."""
        live = [group.live_pages(tokens, chunk) for group in self.groups]
        if self._shared is not None and not self._shared.holds([live[pool.pages.group] for pool in self._shared.pools]):
            return False
        own = ((n, pool) for n, pool in zip(live, self.pools, strict=True) if isinstance(pool, PagePool))
        return all(count <= pool.total for count, pool in own)

    def allocate(self, seq: Sequence) -> bool:
        """Give `seq` the pages that the prefix cache has, and a state slot where the model has state.

        Returns False, with nothing allocated, if there is no slot. Further pages come with `reserve`.
        """
        if any(group.kind == "state" and not pool.available for group, pool in self._pairs()):
            return False
        self._num_sequences += 1
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
        seq.reserved, seq.due = self._reserved(seq), 0
        return True

    def _match(self, seq: Sequence) -> Match:
        if self.reuse and not seq.wants_prompt_logprobs:
            return self.prefix.match(seq.ids, seq.chain)
        return Match(0, ((),) * len(self.groups), (0,) * len(self.groups))

    def _allocate_slot(self, seq: Sequence, index: int, state: int) -> None:
        """A slot of its own for `seq`, with a copy of the checkpoint `state` if there is one."""
        pool = self.pools[index]
        if state:
            # The reference keeps `allocate` from evicting the checkpoint itself.
            pool.incref(state)
        if pool.available:
            seq.slots[index] = pool.allocate()
            if state:
                self._copy_page(index, state, seq.slots[index])
                pool.decref(state)
            return
        # The checkpoint has the last slot: the sequence takes it over.
        pool.evict(state)
        seq.slots[index] = state

    def _pairs(self) -> Iterator[tuple[CacheGroup, PageIndex]]:
        return zip(self.groups, self.pools, strict=True)

    def _plan_checkpoints(self, seq: Sequence, checkpoint_position: int) -> None:
        """Keep a state where another prompt diverged from a cached one, and where this prompt's last full page ends."""
        if self._state_groups and self.reuse:
            run_length = self.prefix.run_length
            ends = {checkpoint_position, (seq.prompt_len - 1) // run_length * run_length}
            seq.checkpoint_positions = sorted(end for end in ends if end > seq.computed)

    def reserve(self, seq: Sequence, tokens: int, spare: int = 0, ahead: int = 0) -> bool:
        """Make room for `tokens` more tokens, leaving `spare` pages in each group, and those of `ahead` tokens behind
        these.

        Returns False, with nothing allocated, where a group has fewer.
        """
        end = seq.computed + seq.unread_drafts + tokens
        if end <= seq.reserved:
            return True
        missing = [
            0 if group.kind == "state" else group.pages_for(end) - len(pages)
            for group, pages in zip(self.groups, seq.pages, strict=True)
        ]
        left = [spare] * len(missing)
        if ahead:
            for index, group in self._paged:
                # Windows give up as many pages as they take.
                if group.kind == "paged":
                    left[index] += group.pages_for(end + ahead) - group.pages_for(end)
        needs = zip(missing, left, self.pools, strict=True)
        if any(count > 0 and count + more > pool.available for count, more, pool in needs):
            return False
        if self._shared is not None and any(count > 0 for count in missing):
            groups = [pool.pages.group for pool in self._shared.pools]
            wanted = [max(0, missing[group]) + left[group] for group in groups]
            if not self._shared.promise(wanted, alone=self._num_sequences == 1):
                return False
        for count, pool, pages in zip(missing, self.pools, seq.pages, strict=True):
            for _ in range(count):
                pages.append(pool.allocate(pages[-1] if pages else 0))
        seq.reserved = self._reserved(seq)
        return True

    def _reserved(self, seq: Sequence) -> int:
        return min((len(seq.pages[i]) * group.page_size for i, group in self._paged), default=sys.maxsize)

    def trim(self, seq: Sequence) -> None:
        """Give back the pages of `seq` behind the tokens that are stored, or may be."""
        tokens = seq.computed + seq.unread_drafts
        # Pages of all groups are whole numbers of the smallest ones.
        if seq.reserved < tokens + self._min_page_size:
            return
        for index, group in self._paged:
            pages, pool = seq.pages[index], self.pools[index]
            for _ in range(len(pages) - group.pages_for(tokens)):
                pool.decref(pages.pop())
        seq.reserved = self._reserved(seq)

    def commit(self, seq: Sequence, tokens: int, unread_drafts: int = 0) -> None:
        """Account for `tokens` more stored tokens: cache full pages for reuse, free out-of-window pages.

        `unread_drafts`: drafts behind these, of which `accept` tells how many count.
        """
        seq.computed += tokens
        seq.unread_drafts = unread_drafts
        if seq.computed + unread_drafts < seq.due:
            return
        if self.reuse:
            self._cache_blocks(seq)
            self._checkpoint(seq)
        self._free_out_of_window(seq)
        seq.due = self._due(seq)

    def accept(self, seq: Sequence, drafts: int) -> None:
        """Account for accepted drafts of the last `commit`. Does nothing for a sequence that was freed since."""
        if not seq.unread_drafts:
            return
        seq.computed += drafts
        seq.unread_drafts = 0
        if seq.tentative is None and seq.computed < seq.due:
            return
        if self.reuse:
            self._cache_blocks(seq)
            self._resolve_tentative(seq)
        self._free_out_of_window(seq)
        seq.due = self._due(seq)

    def _due(self, seq: Sequence) -> int:
        """The next length at which a page is full or out of the window, or a state checkpoint is kept."""
        due = sys.maxsize
        for index, group in self._paged:
            if self.reuse:
                due = min(due, (seq.num_cached_blocks[index] + 1) * group.page_size)
            if group.window is not None:
                due = min(due, group.window - 1 + (group.out_of_window_pages(seq.computed) + 1) * group.page_size)
        if self.reuse and self._state_groups:
            planned = seq.checkpoint_positions
            interval = self._decode_interval
            due = min(due, planned[0] if planned else (seq.computed // interval + 1) * interval)
        return due

    def _free_out_of_window(self, seq: Sequence) -> None:
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
        """Keep the state at a planned position of the prompt, and at the last multiple of the interval in the output.

        The state lacks the accepted drafts of the step, whose inputs are kept with it: the next sequence that starts
        from it replays as many of them as the position needs.
        """
        if seq.checkpoint_positions:
            if seq.computed == seq.checkpoint_positions[0]:
                self._keep_state(seq, seq.checkpoint_positions.pop(0), 0)
            return
        position = (seq.computed + seq.unread_drafts) // self._decode_interval * self._decode_interval
        replay = position - (seq.computed - seq.replay)
        if position < seq.prompt_len or replay < 0:
            return
        if position <= seq.computed:
            self._keep_decode_state(seq, TentativeCheckpoint(position, replay, ()))
        elif (copies := self._copy_state(seq)) is not None:
            seq.tentative = TentativeCheckpoint(position, replay, copies)

    def _resolve_tentative(self, seq: Sequence) -> None:
        """Keep the tentative checkpoint of `seq` if its position was reached, else give its slots back."""
        checkpoint, seq.tentative = seq.tentative, None
        if checkpoint is None:
            return
        if checkpoint.position <= seq.computed:
            self._keep_decode_state(seq, checkpoint)
        else:
            self._release(checkpoint.copies)

    def _keep_decode_state(self, seq: Sequence, checkpoint: TentativeCheckpoint) -> None:
        former, seq.decode_checkpoint = seq.decode_checkpoint, None
        if former is not None:
            self._drop_state(former)
        seq.decode_checkpoint = self._keep_state(seq, checkpoint.position, checkpoint.replay, checkpoint.copies)

    def _keep_state(
        self, seq: Sequence, position: int, replay: int, copies: tuple[tuple[int, int], ...] = ()
    ) -> bytes | None:
        """Keep the state of `seq` in slots of its own, or in `copies` that were made before. Returns its key; None if
        it is kept already, or there is no slot."""
        key = seq.chain.key(seq.ids, position)
        pools = [self.pools[index] for index in self._state_groups]
        kept = not pools or all(pool.find(key) is not None for pool in pools)
        if kept:
            self._release(copies)
            return None
        # The copies of a key lack the same drafts in all groups.
        self._drop_state(key)
        found = copies or self._copy_state(seq)
        if found is None:
            return None
        for index, copy in found:
            self.pools[index].cache_block(copy, key)
            self.pools[index].decref(copy)
            if index == self._state_groups[0]:
                self._replays[copy] = replay
        return key

    def _copy_state(self, seq: Sequence) -> tuple[tuple[int, int], ...] | None:
        """Copies of the states of `seq`: group and slot of each; None where there is no slot."""
        if not all(self.pools[index].available for index in self._state_groups) or not self._state_groups:
            return None
        copies = tuple((index, self.pools[index].allocate()) for index in self._state_groups)
        for index, copy in copies:
            self._copy_page(index, seq.slots[index], copy)
        return copies

    def _release(self, copies: tuple[tuple[int, int], ...]) -> None:
        for index, copy in copies:
            self.pools[index].decref(copy)

    def _drop_state(self, key: bytes) -> None:
        """Evict the state checkpoint with a key, where there is one."""
        for index in self._state_groups:
            page = self.pools[index].find(key)
            if page is not None:
                self.pools[index].evict(page)

    def free(self, seq: Sequence, *, evict: bool = False) -> None:
        """Free the pages and slots of `seq`. `evict`: no later request reuses a page of its prefix."""
        self._num_sequences -= 1
        if evict:
            # By key: its page tables no longer have out-of-window pages, and never state checkpoints.
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
        if seq.tentative is not None:
            self._release(seq.tentative.copies)
        seq.checkpoint_positions, seq.decode_checkpoint, seq.tentative = [], None, None
        seq.computed = seq.replay = seq.unread_drafts = seq.reserved = seq.due = 0
        seq.drafts = seq.draft_indices = ()

    def evict_all(self) -> None:
        """Evict every cached page."""
        for pool in self.pools:
            pool.evict_all()
