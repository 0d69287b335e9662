"""Keeps answers and their conversations, for clients that go on from them. It is bounded, and apart for each key.

Everything is kept as JSON bytes, so that the bytes are counted as they are. Must not know HTTP.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Json = dict[str, Any]


@dataclass(frozen=True)
class _Kept:
    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """The answers that were used last, of all clients together.

    `max_entries`, `max_bytes`: the least recently used answers are dropped beyond them. 0 keeps none.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes of what is kept."""
        return self._size

    def put(self, key: bytes, response: Json, messages: Sequence[Json]) -> bool:
        """Keep `response` and the conversation up to its end, for clients of `key`. Returns whether there is room."""
        kept = _Kept(msgspec.json.encode(response), msgspec.json.encode(messages))
        if not self._max_entries or kept.size > self._max_bytes:
            return False
        self.delete(key, response["id"])
        self._kept[_place(key, response["id"])] = kept
        self._size += kept.size
        while len(self._kept) > self._max_entries or self._size > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._size -= dropped.size
        return True

    def response(self, key: bytes, response_id: str) -> Json | None:
        """The response object, if it is kept for clients of `key`."""
        kept = self._find(key, response_id)
        return None if kept is None else msgspec.json.decode(kept.response)

    def messages(self, key: bytes, response_id: str) -> list[Json] | None:
        """The conversation up to the end of that answer."""
        kept = self._find(key, response_id)
        return None if kept is None else msgspec.json.decode(kept.messages)

    def delete(self, key: bytes, response_id: str) -> bool:
        """Drop an answer. Returns whether it was kept."""
        kept = self._kept.pop(_place(key, response_id), None)
        self._size -= 0 if kept is None else kept.size
        return kept is not None

    def _find(self, key: bytes, response_id: str) -> _Kept | None:
        place = _place(key, response_id)
        kept = self._kept.get(place)
        if kept is not None:
            self._kept.move_to_end(place)
        return kept


def _place(key: bytes, response_id: str) -> tuple[bytes, str]:
    # Keys themselves are not kept.
    return hashlib.sha256(key).digest(), response_id
