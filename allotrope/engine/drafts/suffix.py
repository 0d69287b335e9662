"""Suffix decoding: what followed the longest matches of the last tokens, in the sequence itself and in former outputs.

After Oliaro et al. 2024, arXiv 2411.04975. Owns the search and the choice of a draft. In place of suffix trees, whose
nodes cost hundreds of bytes a token, each corpus keeps chains of the positions whose last 2, 4 or 8 tokens have equal
hashes, latest first, as LZ77 compressors do. A search reads the latest `MAX_OCCURRENCES` of each chain, so its counts
are those of recent occurrences and its time does not grow with the text.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from allotrope.engine.drafts.lookup import MASK, multipliers, ngram_hashes

# Lengths of the n-grams that have chains, the longest first.
ANCHORS = (8, 4, 2)
# Positions of one chain that a search reads.
MAX_OCCURRENCES = 16
# Tokens of former outputs that are kept: 16 bytes each, and 4 for each slot of a table.
MAX_CACHED_TOKENS = 1 << 20
# Stands where no token is: before a text and behind it.
_NONE = -1
_FACTORS = multipliers(ANCHORS[0])
_MIN_SLOTS = 256


class Matches:
    """The ends of earlier occurrences of the last tokens, each with the length of its match, longest first."""

    def __init__(self, tokens: array[int], ends: list[tuple[int, int]]) -> None:
        self.tokens = tokens
        self.ends = sorted(ends, key=lambda end: -end[0])

    def best(self, k: int, *, factor: float, min_prob: float) -> tuple[float, list[int], int]:
        """The draft with the highest score, the score, and the end of the match that it continues (-1: no draft).

        For each length of a match: the tokens that followed most of its occurrences, at most `factor` times the length
        of them, while the product of their shares is at least `min_prob`. The score is the sum of these products: how
        many drafts are expected to be accepted. Of tokens that are as frequent, that of the longest match is drafted,
        then the latest.
        """
        best: tuple[float, list[int], int] = (0.0, [], -1)
        for i, (length, _) in enumerate(self.ends):
            if i + 1 < len(self.ends) and self.ends[i + 1][0] == length:
                continue
            count = min(k, int(length * factor))
            # No probability is above 1, and shorter matches have no more drafts.
            if best[0] >= count:
                break
            score, draft = self._follow([end for _, end in self.ends[: i + 1]], count, min_prob)
            if score > best[0]:
                best = (score, draft, self.ends[0][1])
        return best

    def _follow(self, ends: list[int], count: int, min_prob: float) -> tuple[float, list[int]]:
        tokens, size = self.tokens, len(self.tokens)
        draft = tokens[ends[0] + 1 : ends[0] + 1 + count].tolist()
        if len(draft) == count and _NONE not in draft:
            whole = array("i", draft)
            if all(tokens[end + 1 : end + 1 + count] == whole for end in ends):
                # All occurrences go on alike.
                return float(count), draft
        score, prob, draft = 0.0, 1.0, []
        for step in range(1, count + 1):
            # Occurrences at the end of a text say nothing of what follows.
            following = [tokens[end + step] if end + step < size else _NONE for end in ends]
            counted: dict[int, int] = {}
            for token in following:
                counted[token] = counted.get(token, 0) + 1
            # Occurrences at the end of a text say nothing of what follows.
            ended = counted.pop(_NONE, 0)
            if not counted:
                break
            token = max(counted, key=counted.__getitem__)
            times = counted[token]
            prob *= times / (len(ends) - ended)
            if prob < min_prob:
                break
            score += prob
            draft.append(token)
            if times < len(ends):
                ends = [end for end, next_token in zip(ends, following, strict=True) if next_token == token]
        return score, draft


class MatchIndex:
    """Chains of positions by the hash of the 2, 4 or 8 tokens that end there; `depth`: most tokens of a match + 1.

    `tokens` begins with `depth` tokens that are none, so that each position has `depth` tokens before it. A position
    enters its chains when a token is behind it.
    """

    def __init__(self, depth: int, tokens: array[int], slots: int) -> None:
        self.tokens = tokens
        self._depth = depth
        self._mask = slots - 1
        self._heads = [array("i", [_NONE]) * slots for _ in ANCHORS]
        self._earlier = [array("i", [_NONE]) * len(tokens) for _ in ANCHORS]

    def grow(self, token: int) -> None:
        """Append a token, of which no position follows yet."""
        self.tokens.append(token)
        for earlier in self._earlier:
            earlier.append(_NONE)

    def insert(self, end: int, length: int) -> None:
        """Chain `end`, where a text of `length` tokens ends so far."""
        total, j = 0, 0
        for which in range(len(ANCHORS) - 1, -1, -1):
            n = ANCHORS[which]
            if length < n:
                return
            while j < n:
                total += (self.tokens[end - j] + 1) * _FACTORS[j]
                j += 1
            slot = _slot(total & MASK) & self._mask
            self._earlier[which][end] = self._heads[which][slot]
            self._heads[which][slot] = end

    def insert_all(self, start: int, stop: int) -> None:
        """Chain all positions but the last of a text that lies at `start` to `stop`."""
        ids = np.frombuffer(self.tokens, np.int32)[start : max(stop - 1, start)].astype(np.uint64)
        for which, n in enumerate(ANCHORS):
            slots = _slots(ngram_hashes(ids, n, _FACTORS)) & np.uint64(self._mask)
            if not len(slots):
                continue
            order = np.argsort(slots, kind="stable")
            slots = slots[order]
            same = slots[1:] == slots[:-1]
            # Positions where the n-grams end.
            ends = (order + (start + n - 1)).astype(np.int32)
            heads = np.frombuffer(self._heads[which], np.int32)
            links = heads[slots]
            links[1:][same] = ends[:-1][same]
            np.frombuffer(self._earlier[which], np.int32)[ends] = links
            last = np.append(~same, True)
            heads[slots[last]] = ends[last]

    def find(self, tail: Sequence[int]) -> Matches:
        """Earlier occurrences of the end of `tail`, the last tokens of a sequence, at most depth - 1 of them."""
        width, size, from_bytes = self._depth - 1, len(tail), int.from_bytes
        wanted = int.from_bytes(array("i", [*[_NONE] * (width - size), *tail]).tobytes(), "little")
        lengths: dict[int, int] = {}
        with memoryview(self.tokens) as view, view.cast("B") as raw:
            for which, n in enumerate(ANCHORS):
                if size < n or len(lengths) >= MAX_OCCURRENCES:
                    continue
                total = 0
                for j in range(n):
                    total += (tail[size - 1 - j] + 1) * _FACTORS[j]
                end = self._heads[which][_slot(total & MASK) & self._mask]
                earlier = self._earlier[which]
                for _ in range(MAX_OCCURRENCES):
                    if end < 0:
                        break
                    if end not in lengths:
                        # The highest bytes are the last tokens: leading zeros of the difference are equal tokens.
                        past = 4 * (end + 1)
                        differing = (from_bytes(raw[past - 4 * width : past], "little") ^ wanted).bit_length()
                        length = width - (differing + 31) // 32
                        if length >= n:
                            lengths[end] = length if length < size else size
                    end = earlier[end]
        return Matches(self.tokens, [(length, end) for end, length in lengths.items()])


def _slot(value: int) -> int:
    # The high half of a product is the well mixed one.
    return value >> 32


def _slots(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return values >> np.uint64(32)


class SuffixDrafter:
    """Drafts by matches in the sequence itself and in former outputs.

    `max_tree_depth`: more than the tokens of any match; no tree bounds its drafts. `max_cached_requests`: former
    outputs that are kept; 0: none. `max_spec_factor`: drafts for each token of a match. `min_token_prob`: least
    probability of a draft.
    """

    def __init__(
        self, *, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float
    ) -> None:
        self._depth = max_tree_depth
        self._factor = max_spec_factor
        self._min_prob = min_token_prob
        self._sequences: dict[Hashable, _Text] = {}
        self._outputs = FormerOutputs(max_tree_depth, max_cached_requests) if max_cached_requests else None

    def start(self, key: Hashable, prompt_ids: Sequence[int]) -> None:
        self._sequences[key] = _Text(self._depth, prompt_ids)

    def propose(self, key: Hashable, new_ids: Sequence[int], k: int) -> list[int]:
        text = self._sequences[key]
        for token in new_ids:
            text.append(token)
        if k <= 0:
            return []
        tail = text.tail()
        score, draft, _ = self._best(text.index, tail, k)
        # No score is above k.
        if self._outputs is not None and score < k:
            other, elsewhere, end = self._best(self._outputs.index, tail, k)
            # The sequence itself is the better witness where both say as much.
            if other > score:
                self._outputs.use(end)
                return elsewhere
        return draft

    def _best(self, index: MatchIndex, tail: Sequence[int], k: int) -> tuple[float, list[int], int]:
        return index.find(tail).best(k, factor=self._factor, min_prob=self._min_prob)

    def end(self, key: Hashable) -> None:
        text = self._sequences.pop(key, None)
        if text is not None and self._outputs is not None:
            self._outputs.add(text.output())


class _Text:
    """A running sequence: prompt and output, and where their n-grams end."""

    def __init__(self, depth: int, prompt_ids: Sequence[int]) -> None:
        self._depth = depth
        self._prompt_length = len(prompt_ids)
        self.index = self._indexed(array("i", [_NONE]) * depth + array("i", prompt_ids))

    def append(self, token: int) -> None:
        index, depth = self.index, self._depth
        end = len(index.tokens) - 1
        if end >= depth:
            index.insert(end, end + 1 - depth)
        index.grow(token)
        if len(index.tokens) > 2 * self._slots:
            self.index = self._indexed(index.tokens)

    def tail(self) -> array[int]:
        tokens = self.index.tokens
        return tokens[max(len(tokens) - self._depth + 1, self._depth) :]

    def output(self) -> array[int]:
        return self.index.tokens[self._depth + self._prompt_length :]

    def _indexed(self, tokens: array[int]) -> MatchIndex:
        self._slots = max(_MIN_SLOTS, 1 << len(tokens).bit_length())
        index = MatchIndex(self._depth, tokens, self._slots)
        index.insert_all(self._depth, len(tokens))
        return index


class FormerOutputs:
    """The outputs of ended sequences, in a ring of tokens: the oldest leave first.

    An output that drafts were taken from since it came in is kept once more instead, as if it had just ended: least
    recently used outputs leave, to within one turn of the ring. `depth`, `max_outputs`, `max_tokens`: bounds.
    """

    def __init__(self, depth: int, max_outputs: int, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._depth = depth
        self._max_outputs = max_outputs
        self._size = max_tokens
        self.index = MatchIndex(depth, array("i", [_NONE]) * max_tokens, 1 << (max_tokens - 1).bit_length())
        # Where outputs begin and end in the ring, the oldest first.
        self._spans: deque[tuple[int, int]] = deque()
        self._used = bytearray(max_tokens)
        self._next = 0

    def __len__(self) -> int:
        return len(self._spans)

    def use(self, end: int) -> None:
        """Drafts were taken from the output that `end` is in."""
        self._used[end] = 1

    def add(self, ids: Sequence[int]) -> None:
        """Keep an output; one too long for the ring is cut to its end."""
        used = self._append(array("i", ids))
        # One at most is kept again, so that an end costs no more than two outputs.
        if used and self._max_outputs > 1:
            self._append(used[-1])

    def _append(self, ids: array[int]) -> list[array[int]]:
        """Write `ids` behind the last output. Returns the used outputs that had to leave for it."""
        ids = ids[-(self._size // 2 - self._depth - 1) :]
        # So short an output has no n-gram with a token behind it.
        if len(ids) <= ANCHORS[-1]:
            return []
        room = self._depth + len(ids) + 1
        dropped = []
        if self._next + room > self._size:
            # Outputs do not wrap: those between here and the ring's end are the oldest.
            while self._spans and self._spans[0][0] >= self._next:
                dropped.append(self._drop_oldest())
            self._next = 0
        start, stop = self._next, self._next + room
        while self._spans and (len(self._spans) >= self._max_outputs or start <= self._spans[0][0] < stop):
            dropped.append(self._drop_oldest())
        nothing = array("i", [_NONE])
        self.index.tokens[start:stop] = nothing * self._depth + ids + nothing
        self.index.insert_all(start + self._depth, stop - 1)
        self._spans.append((start, stop - 1))
        # The token behind an output is the first before the next one.
        self._next = stop - 1
        return [ids for ids in dropped if ids]

    def _drop_oldest(self) -> array[int]:
        """Forget the oldest output. Returns its tokens if it was used, else none."""
        start, stop = self._spans.popleft()
        used = 1 in self._used[start:stop]
        ids = self.index.tokens[start + self._depth : stop]
        self._used[start:stop] = bytes(stop - start)
        # Chains still lead here; no match is found where no token is.
        self.index.tokens[start:stop] = array("i", [_NONE]) * (stop - start)
        return ids if used else array("i")
