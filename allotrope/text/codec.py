"""Converts between text and ids: the `Codec` protocol, and its implementation with the `tokenizers` library.

The usual decoders (byte-level, and sentencepiece with byte fallback) map each token to bytes, and the text is the UTF-8
of all bytes. With that map, incremental decoding is exact and costs the same for every token. For other decoders,
`FastCodec` decodes windows of ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tokenizers

from allotrope.text.detokenizer import BytesDetokenizer, Detokenizer, Windows

_SPACE_MARK = "▁"


class Codec(Protocol):
    """Converts text to ids and back. `size`: the largest id plus one. `special_ids`: ids of special tokens."""

    size: int
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def id_of(self, token: str) -> int | None: ...

    def detokenizer(self, *, skip_special_tokens: bool, continues_text: bool) -> Detokenizer: ...


class FastCodec:
    """Codec of a `tokenizers.Tokenizer`. Unknown ids decode to "", because models score padding ids too."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Some files still have the truncation and padding of training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.size = max([*tokenizer.get_vocab(with_added_tokens=True).values(), *added, -1]) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._piece_bytes, self._strips_space = _byte_map(tokenizer.decoder)
        self._bytes: list[bytes | None] = [None] * self.size
        self._windows = Windows(lambda ids: self._decode_whole(ids, False), self.size)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # encode_batch releases the GIL, so that a long text does not block other threads.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens, continues_text=False)
        if isinstance(detokenizer, BytesDetokenizer):
            return detokenizer.push(ids) + detokenizer.flush()
        return self._decode_whole(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        cached = self._bytes[token_id]
        if cached is None:
            cached = self._bytes[token_id] = self._look_up(token_id)
        return cached

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def detokenizer(self, *, skip_special_tokens: bool, continues_text: bool) -> Detokenizer:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._piece_bytes is None:
            return self._windows.detokenizer(skipped, continues_text=continues_text)
        return BytesDetokenizer(self.token_bytes, skipped, strip_space=self._strips_space and not continues_text)

    def _look_up(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._piece_bytes is None:
            return self._decode_whole([token_id], False).encode()
        return self._piece_bytes(piece)

    def _decode_whole(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [i for i in ids if 0 <= i < self.size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)


def byte_alphabet() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies: a printable byte is itself, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_ALPHABET = byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        # An added token is plain text.
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(_SPACE_MARK, " ").encode()


def _byte_map(decoder: Any) -> tuple[Callable[[str], bytes] | None, bool]:
    """The token-to-bytes map of `decoder`, and whether it strips a text's first space. (None, False) without a map."""
    if decoder is None:
        return None, False
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes, False
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None, False
    if steps[0].get("pattern") != {"String": _SPACE_MARK} or steps[0].get("content") != " ":
        return None, False
    if kinds[3:] and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
        return None, False
    return _sentencepiece_bytes, bool(kinds[3:])
