"""Reads the tokenizer of a Hugging Face directory.

`tokenizer.json` defines the whole tokenization. `tokenizer_config.json` and the files beside it add the special tokens
and the chat template. Transformers, whose import takes seconds, reads directories without `tokenizer.json`. Code in a
checkpoint is never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from allotrope.errors import ModelError
from allotrope.text.codec import Codec, FastCodec
from allotrope.text.tokenizer import Tokenizer


def load_directory_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in `directory`. Raises `ModelError` with the reasons if none can be read."""
    try:
        return _load(directory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"its JSON files are not of the form that tokenizers have: {error!r}"
        raise ModelError(f"cannot load a tokenizer from {directory}", [reason]) from error


def _load(directory: Path) -> Tokenizer:
    config = _read_json(directory, "tokenizer_config.json")
    special = _special_tokens(_read_json(directory, "special_tokens_map.json")) | _special_tokens(config)
    codec: Codec
    if (directory / "tokenizer.json").is_file():
        backend = _read_backend(directory / "tokenizer.json")
        _complete(backend, config, special, directory)
        codec = FastCodec(backend)
    else:
        from allotrope.text.transformers_tokenizer import load_with_transformers

        codec, transformers_special = load_with_transformers(directory)
        special = transformers_special | special
    return Tokenizer(
        codec,
        special_tokens=special,
        eos_ids=_eos_ids(directory),
        chat_templates=_chat_templates(directory, config),
    )


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises a plain Exception for every fault of a file.
        raise ModelError(f"cannot load a tokenizer from {file}", [str(error)]) from error


def _complete(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], directory: Path
) -> None:
    """Add to `backend` the settings of `config`: added tokens, special tokens, and the BOS token before a text."""
    wrong = []
    for key, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            backend.add_tokens([tokenizers.AddedToken(**entry)])
        token_id = backend.token_to_id(entry["content"])
        if token_id != int(key):
            wrong.append(
                f"added token {entry['content']!r} has id {key} in tokenizer_config.json, {token_id} in tokenizer.json"
            )
    if wrong:
        raise ModelError(f"cannot load a tokenizer from {directory}", wrong)
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for token in special.values():
        if token not in known and backend.token_to_id(token) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False)])
    bos = special.get("bos_token")
    bos_id = None if bos is None else backend.token_to_id(bos)
    if config.get("add_bos_token") is True and bos_id is not None and bos_id not in backend.encode("").ids:
        # In Transformers, the tokenizer class adds BOS for files that do not.
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name → token, of entries such as `eos_token`. An entry is a string or an object with a `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _eos_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        config = _read_json(directory, name)
        value = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if value is not None:
            return list(value) if isinstance(value, list) else [value]
    return []


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name → Jinja text. A template file overrides an entry of the tokenizer's config."""
    in_config = config.get("chat_template") or _read_json(directory, "chat_template.json").get("chat_template")
    if isinstance(in_config, str):
        templates = {"default": in_config}
    elif isinstance(in_config, list):
        templates = {entry["name"]: entry["template"] for entry in in_config}
    else:
        templates = dict(in_config or {})
    files = {"default": directory / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name`, or {} without such a file."""
    file = directory / name
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot load a tokenizer from {directory}", [f"{name}: {error}"]) from error
    if not isinstance(value, dict):
        raise ModelError(f"cannot load a tokenizer from {directory}", [f"{name} holds no JSON object"])
    return value
