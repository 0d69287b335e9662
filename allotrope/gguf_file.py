"""Reads the header of a GGUF file: its metadata, and the offset of each tensor. Owns the file format only.

A model may be split into several files. The first has the metadata, and each one some of the tensors.

It must not know the meaning of the metadata: `checkpoint` reads the hyperparameters from it, `text` the tokenizer. Both
import this module, so it depends on the standard library and numpy only. A header with a vocabulary of 50 000 tokens
takes some tens of milliseconds, because strings are sliced from one mapping.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allotrope.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

# Metadata keys of the tokens that end a reply: end of sequence, of turn, of message.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor. `shape`: slowest dimension first, as in torch. `kind`: ggml type number. `path`: the file that has
    it, at byte `offset`."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    path: str


class GgufFile:
    """The parsed header of a model. `metadata`: key → value. `tensors`: name → `GgufTensor`, in file order.

    `path`: the file, or any one of those that a model is split into. `sizes`: bytes of each file, by its path.
    `without`: arrays whose keys begin so are read and left empty. Raises `ModelError` if a file is not GGUF, has an
    unsupported version or byte order, is truncated, or is missing.
    """

    def __init__(self, path: str, *, without: str | None = None) -> None:
        self.path = path
        self.metadata, self.tensors, size = _read_header(path, without)
        self.sizes = {path: size}
        parts = self.metadata.get("split.count", 1)
        if parts > 1:
            self._add_parts(parts, without)

    def _add_parts(self, parts: int, without: str | None) -> None:
        """Read the other files of a split model."""
        name = _PART.fullmatch(Path(self.path).name)
        if name is None or int(name[3]) != parts:
            reason = f"split.count={parts}: it is one of several files, named as NAME-00001-of-{parts:05d}.gguf"
            raise ModelError(f"cannot read {self.path}", [reason])
        given, stated = int(name[2]), self.metadata.get("split.tensors.count")
        self.tensors = {}
        for number in range(1, parts + 1):
            path = str(Path(self.path).with_name(f"{name[1]}-{number:05d}-of-{parts:05d}.gguf"))
            metadata, tensors, self.sizes[path] = _read_header(path, without)
            if number == 1 != given:
                self.metadata = metadata
            if metadata.get("split.no") != number - 1 or metadata.get("split.count") != parts:
                found = f"split.no={metadata.get('split.no')} of {metadata.get('split.count')}"
                raise ModelError(f"cannot read {path}", [f"{found}; its name says {number - 1} of {parts}"])
            twice = sorted(self.tensors.keys() & tensors.keys())
            if twice:
                raise ModelError(f"cannot read {path}", [f"{twice[0]} is in an earlier part too"])
            self.tensors |= tensors
        if stated is not None and stated != len(self.tensors):
            reason = f"split.tensors.count={stated}, but its parts have {len(self.tensors)} tensors"
            raise ModelError(f"cannot read {self.path}", [reason])

    def raw(self, tensor: GgufTensor, size: int) -> np.ndarray:
        """uint8 [size]: the stored bytes of `tensor`, mapped read-only. They must end within its file."""
        mapped = np.memmap(tensor.path, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(size,))
        # The view is a plain array: slicing a memmap costs more than the arithmetic on a small slice.
        return mapped.view(np.ndarray)

    def end_ids(self) -> tuple[int, ...]:
        """Token ids that the metadata marks as ends of a reply, without repeats."""
        ids = (self.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
        return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _read_header(path: str, without: str | None) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    """Metadata, tensors and bytes of one file."""
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            return *_Reader(path, mapping).header(without), len(mapping)
    except (OSError, ValueError) as error:
        # An empty file cannot be mapped (ValueError).
        raise ModelError(f"cannot read {path}", [str(error)]) from error


class _Reader:
    """A cursor over the header bytes. Every read checks the length of the file."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self, without: str | None) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._data[:4] != _MAGIC:
            raise self._bad(f"it begins with {bytes(self._data[:4])!r}; a GGUF file begins with {_MAGIC!r}")
        self._at = 4
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise self._bad("it is a big-endian GGUF file; only little-endian ones are read")
        if version not in _VERSIONS:
            raise self._bad(f"GGUF version {version}; allowed: 2, 3")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), without is None or not key.startswith(without))
        relative = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment={alignment}; a power of two is needed")
        start = -(-self._at // alignment) * alignment
        tensors = {t.name: GgufTensor(t.name, t.shape, t.kind, start + t.offset, self._path) for t in relative}
        if len(tensors) != len(relative):
            raise self._bad("two tensors have the same name")
        return metadata, tensors

    def _tensor(self) -> GgufTensor:
        name = self._string()
        dims = self._scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._bad(f"tensor {name} has {dims} dimensions; allowed: 1 to {_MAX_DIMS}")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        return GgufTensor(name, shape, self._scalar("I"), self._scalar("Q"), self._path)

    def _value(self, kind: int, keeps_arrays: bool) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                dtype = np.dtype(_SCALARS[inner]).newbyteorder("<")
                raw = self._take(count * dtype.itemsize)
                return np.frombuffer(raw, dtype).tolist() if keeps_arrays else []
            if inner == _STRING:
                strings = self._strings(count)
                return list(strings) if keeps_arrays else list(deque(strings, maxlen=0))
            raise self._bad(f"metadata array of type {inner} at byte {self._at}; only numbers and strings are read")
        if kind not in _SCALARS:
            raise self._bad(f"metadata value of type {kind} at byte {self._at}; allowed: 0 to 12")
        return self._scalar(_SCALARS[kind])

    def _strings(self, count: int) -> Iterator[str]:
        # This is the hot loop of the header: a vocabulary and its merges have some hundred thousand strings.
        data, at, end = self._data, self._at, len(self._data)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            self._at = at
            if at + 8 > end:
                raise self._short(8)
            (length,) = length_at(data, at)
            at += 8 + length
            if at > end:
                raise self._short(8 + length)
            yield self._text(data[at - length : at])
        self._at = at

    def _string(self) -> str:
        return self._text(self._take(self._scalar("Q")))

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(f"the string {raw[:40]!r} is not UTF-8: the file is damaged") from error

    def _scalar(self, code: str) -> Any:
        form = struct.Struct("<" + code)
        return form.unpack(self._take(form.size))[0]

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise self._short(size)
        self._at += size
        return self._data[self._at - size : self._at]

    def _short(self, size: int) -> ModelError:
        return self._bad(
            f"the header needs {size} bytes at {self._at}, the file has {len(self._data)}: it is truncated or damaged; "
            f"copy or download it again"
        )

    def _bad(self, reason: str) -> ModelError:
        return ModelError(f"cannot read {self._path}", [reason])
