"""Small tokenizers of the kinds that models have, written as files and loaded as a model's would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from allotrope.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The capital of France is Paris. The capital of Italy is Rome.",
    "def add(a, b):\n    return a + b  # 12 and 345\n",
    "naïve café, 日本語の文章, emoji 😀😃 and 👩‍👩‍👧",
    "stop the stopwatch, then stop.",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCEPIECE_WORDS = ["▁t", "▁th", "▁the", "he", "in", "an", "▁a", "▁an", "and", "▁c", "at", "▁cat", "st", "sto", "op"]
SENTENCEPIECE_CHARACTERS = list("▁abcdefghinopstr.,!TCé日")


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE tokenizer, a chat template, and ids that end a reply."""
    directory = tmp_path_factory.mktemp("byte_level")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens(["<think>"])
    backend.enable_truncation(8)
    backend.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<|endoftext|>",
            "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
            "chat_template": TEMPLATE,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    write_json(directory / "generation_config.json", {"eos_token_id": [0]})
    return directory


@pytest.fixture(scope="session")
def byte_level(byte_level_directory: Path) -> Tokenizer:
    return load_tokenizer(str(byte_level_directory))


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """`tokenizer.ggml.*` of a sentencepiece vocabulary: control tokens, bytes, characters, and words by score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3] + [6] * 256
    words = [*SENTENCEPIECE_WORDS, "▁▁", *SENTENCEPIECE_CHARACTERS]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(SENTENCEPIECE_WORDS))] + [-1e9]
    scores += [-100.0 - rank for rank in range(len(SENTENCEPIECE_CHARACTERS))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *words],
        "tokenizer.ggml.token_type": [*kinds, *[1] * len(words)],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def sentencepiece_file(
    tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., str], sentencepiece_metadata: dict[str, Any]
) -> str:
    return write_gguf(tmp_path_factory.mktemp("sentencepiece") / "model.gguf", "llama", sentencepiece_metadata)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_file: str) -> Tokenizer:
    return load_tokenizer(sentencepiece_file)


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose decoder is no map from tokens to bytes: what it writes for a token depends on its place."""
    directory = tmp_path_factory.mktemp("wordpiece")
    words = ["[UNK]", "[SEP]", "stop", "the", "watch", "##watch", "##s", "a", ".", "é"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    backend.save(str(directory / "tokenizer.json"))
    return load_tokenizer(str(directory))


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
