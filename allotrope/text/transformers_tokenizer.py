"""Reads tokenizers without a `tokenizer.json` by Transformers. No other module of `text` imports Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allotrope.errors import ModelError
from allotrope.text.codec import Codec, FastCodec
from allotrope.text.detokenizer import Detokenizer, Windows


def load_with_transformers(directory: Path) -> tuple[Codec, dict[str, str]]:
    """The tokenizer that Transformers reads from `directory`, and its special tokens by name.

    Raises `ModelError` if Transformers cannot read it, or if the tokenizer is code in the checkpoint.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # Every error of Transformers means that this directory has no usable tokenizer.
        raise ModelError(
            f"cannot load a tokenizer from {directory}",
            [
                "there is no tokenizer.json",
                f"transformers cannot read another one: {type(error).__name__}: {str(error).strip()[:500]}",
                "give --tokenizer a directory that has a tokenizer.json",
            ],
        ) from error
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (FastCodec(backend) if backend is not None else SlowCodec(tokenizer)), special


class SlowCodec:
    """Codec of a tokenizer that is Python code in Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = len(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self._windows = Windows(lambda ids: self.decode(ids, skip_special_tokens=False), self.size)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        known = [i for i in ids if 0 <= i < self.size and not (skip_special_tokens and i in self.special_ids)]
        return str(self._tokenizer.decode(known, clean_up_tokenization_spaces=False))

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id], skip_special_tokens=False).encode()

    def id_of(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        unknown = token_id is None or (token_id == self._tokenizer.unk_token_id and token != self._tokenizer.unk_token)
        return None if unknown else int(token_id)

    def detokenizer(self, *, skip_special_tokens: bool, continues_text: bool) -> Detokenizer:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return self._windows.detokenizer(skipped, continues_text=continues_text)
