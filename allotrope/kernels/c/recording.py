"""Recording the C calls of a computation, and replaying them without Python.

A small model's decode step is some hundred calls of C, each of which takes less time than Python needs to make it.
Inside `record` the computation runs as ever, and each `CFunction` notes its arguments. Tensors that are made meanwhile
lie in an `Arena`, which keeps their addresses; those of `inputs` may lie elsewhere in each replay.

Owns: what may be recorded. Memory is read and written by C functions alone; any other operation of PyTorch but views
ends the recording with a reason, and the computation goes on. Must not know: what is computed.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allotrope.kernels.c import function
from allotrope.kernels.c.compiler import CannotCompile, load

SOURCE = Path(__file__).with_name("replay.c")
# Bytes at which tensors of an arena begin, and of which its chunks are multiples.
_ALIGNMENT, _CHUNK = 64, 1 << 20
_VIEWS = frozenset(
    "view _unsafe_view _reshape_alias as_strided slice select split split_with_sizes unbind unsqueeze squeeze t "
    "transpose permute expand detach alias".split()
)
_ALLOCATIONS = frozenset("empty new_empty empty_like empty_strided new_empty_strided".split())
# Made of others, but of no views alone. PyTorch imports its symbolic shapes to take them apart.
_PRODUCTS = frozenset(("linear", "matmul"))


class _Block(np.ndarray[Any, Any]):
    """Memory of one tensor; unlike a plain array it can be referred to weakly."""


class Arena:
    """Memory of tensors that live while a computation is recorded, and again in each of its replays. Recordings that
    never run at the same time share one. Memory of a tensor that is gone is used again, as it is in each replay."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray[Any, Any]] = []
        # (chunk, first byte, bytes) of free memory.
        self._free: list[tuple[int, int, int]] = []
        self._used: dict[int, tuple[weakref.ref[_Block], tuple[int, int, int]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def empty(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor."""
        wanted = max(1, torch.Size(size).numel() * dtype.itemsize)
        wanted = -(-wanted // _ALIGNMENT) * _ALIGNMENT
        fitting = [place for place in self._free if place[2] >= wanted]
        if fitting:
            place = min(fitting, key=lambda one: one[2])
            self._free.remove(place)
        else:
            place = self._new_chunk(wanted)
        chunk, first, count = place
        if count > wanted:
            self._free.append((chunk, first + wanted, count - wanted))
        block = self._chunks[chunk][first : first + wanted].view(_Block)
        key = id(block)
        self._used[key] = weakref.ref(block, lambda _: self._release(key)), (chunk, first, wanted)
        # The tensor's storage holds the block for as long as any view of it lives.
        flat = torch.from_numpy(block)[: torch.Size(size).numel() * dtype.itemsize]
        return flat.view(dtype).view(*size)

    def _new_chunk(self, wanted: int) -> tuple[int, int, int]:
        size = -(-(wanted + _ALIGNMENT) // _CHUNK) * _CHUNK
        memory = np.empty(size, np.uint8)
        self._chunks.append(memory[-memory.ctypes.data % _ALIGNMENT :][: size - _ALIGNMENT])
        return len(self._chunks) - 1, 0, size - _ALIGNMENT

    def _release(self, key: int) -> None:
        """Give memory back, joined with what is free beside it."""
        _, (chunk, first, count) = self._used.pop(key)
        for place in list(self._free):
            if place[0] == chunk and place[1] + place[2] == first:
                self._free.remove(place)
                first, count = place[1], count + place[2]
            elif place[0] == chunk and place[1] == first + count:
                self._free.remove(place)
                count += place[2]
        self._free.append((chunk, first, count))


class Recording:
    """Recorded calls. `out`: the result that every replay writes."""

    def __init__(
        self,
        calls: np.ndarray[Any, Any],
        words: np.ndarray[Any, Any],
        moved: Sequence[tuple[int, int, int]],
        out: torch.Tensor,
    ) -> None:
        """`moved`: (index in `words`, which input, bytes behind its beginning) of addresses inside inputs."""
        self.out = out
        self._calls, self._words = calls, words
        indices = np.array(moved, dtype=np.int64).reshape(-1, 3)
        self._at, self._input, self._offset = (np.ascontiguousarray(column) for column in indices.T)
        self._run = _replay()
        self._fixed = self._calls.ctypes.data, len(self._calls), self._words.ctypes.data

    def replay(self, inputs: Iterable[torch.Tensor]) -> torch.Tensor:
        """Run the calls with other inputs, which are like those that were recorded, and return `out`."""
        addresses = np.array([one.data_ptr() for one in inputs], dtype=np.int64)
        self._words[self._at] = addresses[self._input] + self._offset
        self._run(*self._fixed)
        return self.out


class Recorder(TorchDispatchMode):
    """What `record` gives. `reason`: why it cannot be replayed; empty if it can."""

    def __init__(self, arena: Arena, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason = ""
        self._arena = arena
        self._ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in inputs]
        self._calls: list[tuple[int, int, int]] = []
        self._words: list[int] = []
        self._moved: list[tuple[int, int, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled by PyTorch; to be left out of that would import its compiler, 130 MB.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in _VIEWS | _ALLOCATIONS | _PRODUCTS:
            # An operation that is made of others: a reshape may be a view or a copy.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if name in _ALLOCATIONS and isinstance(out, torch.Tensor) and out.is_contiguous():
            return self._arena.empty(out.shape, out.dtype)
        if name not in _VIEWS:
            self.reason = self.reason or f"it runs {name} of PyTorch"
        return out

    def recording(self, out: torch.Tensor) -> Recording:
        """What was recorded. `out`: the result, which lies in the arena."""
        assert not self.reason, self.reason
        return Recording(np.array(self._calls), np.array(self._words), self._moved, out)

    def note(self, call: function.CFunction, arguments: Sequence[Any]) -> None:
        """A call of C. Its floats come last, or it cannot be recorded."""
        letters = call.signature
        integers = len(letters.rstrip("f"))
        floats = len(letters) - integers
        if set(letters[:integers]) - set("pl") or integers > _replay_limit("integers") or floats > 3 or not integers:
            self.reason = self.reason or f"{call.name} has arguments {letters}"
            return
        self._calls.append((call.address, integers, floats))
        for letter, value in zip(letters, arguments, strict=True):
            if letter == "f":
                self._words.append(int(np.float32(value).view(np.int32)))
                continue
            word = 0 if value is None else int(value)
            if letter == "p":
                for which, (first, end) in enumerate(self._ranges):
                    if first <= word < end:
                        self._moved.append((len(self._words), which, word - first))
                        break
            self._words.append(word)


@contextmanager
def record(arena: Arena, inputs: Iterable[torch.Tensor]) -> Iterator[Recorder]:
    """Record what runs meanwhile. `inputs`: tensors whose place is another one in each replay."""
    recorder = Recorder(arena, inputs)
    function.listener = recorder.note
    try:
        with recorder:
            yield recorder
    finally:
        function.listener = None


@functools.cache
def _replay() -> Any:
    run = load(SOURCE, torch.float32).replay
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p], None
    return run


@functools.cache
def _replay_limit(of: str) -> int:
    limit = getattr(load(SOURCE, torch.float32), f"max_{of}")
    limit.restype = ctypes.c_long
    return int(limit())


def reasons() -> list[str]:
    """Why this machine cannot replay what is recorded."""
    try:
        _replay()
    except CannotCompile as reason:
        return [str(reason)]
    return []
