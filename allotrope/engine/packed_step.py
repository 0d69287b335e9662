"""A step as one array of integers: packed once, on rank 0, and read by every rank.

Owns the layout of that array. Must not know what the integers mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.int64]


@dataclass(frozen=True)
class PackedStep:
    """Arrays for the host, then arrays for the device, which gets all of its own in one copy.

    `words`: [n] int64 on the host: how many arrays there are of either kind, the length of each, the arrays. Each array
    of the device begins at a multiple of 16 bytes: kernels are compiled for aligned pointers.
    """

    words: torch.Tensor
    _host: Words = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_host", self.words.numpy())

    @staticmethod
    def of(host: Sequence[NDArray[Any]], device: Sequence[NDArray[Any]], *, pinned: bool) -> PackedStep:
        """Pack flat arrays of int64 or int32. `pinned`: the words are sent to a GPU."""
        own, sent = [_as_words(array) for array in host], [_as_words(array) for array in device]
        lengths = [len(array) for array in (*own, *sent)]
        header = np.array([len(own), len(sent), *lengths], dtype=np.int64)
        starts = [_even(len(header) + sum(lengths[: len(own)]))]
        starts += [starts[0] + end for end in itertools.accumulate(map(_even, lengths[len(own) :]))]
        words = torch.empty(starts[-1], dtype=torch.int64, pin_memory=pinned)
        target = words.numpy()
        np.concatenate((header, *own), out=target[: len(header) + sum(lengths[: len(own)])])
        for start, array in zip(starts, sent, strict=False):
            target[start : start + len(array)] = array
        return PackedStep(words)

    @staticmethod
    def join(parts: Sequence[PackedStep], *, pinned: bool) -> PackedStep:
        """One of several data-parallel ranks: each takes its own with `part`. `pinned`: as in `of`."""
        ends = [*itertools.accumulate((_even(len(one.words)) for one in parts), initial=_even(len(parts) + 1))]
        words = torch.empty(ends[-1], dtype=torch.int64, pin_memory=pinned)
        target = words.numpy()
        target[: len(ends)] = ends
        for start, one in zip(ends, parts, strict=False):
            target[start : start + len(one.words)] = one.words.numpy()
        return PackedStep(words)

    def part(self, index: int) -> PackedStep:
        """Part `index` of a joined step."""
        start, end = self._host[index : index + 2].tolist()
        return PackedStep(self.words[start:end])

    @property
    def host(self) -> list[Words]:
        """The arrays for the host."""
        count, _ = self._counts
        start = 2 + sum(self._counts)
        ends = itertools.accumulate(self._lengths[:count], initial=start)
        return [self._host[begin:end] for begin, end in itertools.pairwise(ends)]

    def send(self, device: torch.device) -> Iterator[torch.Tensor]:
        """The arrays for `device` in the order in which they were packed, as int64."""
        count, _ = self._counts
        lengths = self._lengths
        start = _even(2 + len(lengths) + sum(lengths[:count]))
        arrived, start = self.words[start:].to(device, non_blocking=True), 0
        for length in lengths[count:]:
            yield arrived[start : start + length]
            start += _even(length)

    @property
    def _counts(self) -> tuple[int, int]:
        return int(self._host[0]), int(self._host[1])

    @property
    def _lengths(self) -> list[int]:
        lengths: list[int] = self._host[2 : 2 + sum(self._counts)].tolist()
        return lengths


def _even(length: int) -> int:
    return length + length % 2


def _as_words(array: NDArray[Any]) -> Words:
    """`array` as int64; one of int32 with its bits, and 0 behind where it is of odd length."""
    if array.dtype == np.int64:
        return array
    assert array.dtype == np.int32, array.dtype
    padded = np.zeros(_even(len(array)), dtype=np.int32)
    padded[: len(array)] = array
    return padded.view(np.int64)
