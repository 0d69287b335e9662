"""Tokenizers built from GGUF metadata, against the tokenizer that the metadata was written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from allotrope.errors import ModelError
from allotrope.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n    return [i**2 for i in range(10)]\n\n# end",
    "emoji 😀👩‍👩‍👧🇩🇪 done",
    "12345 3.14 1,000 x1y2",
    "naïve — “日本語” العربية",
    "I'll don't WE'RE",
    "<|im_start|>user\nhi<|im_end|>\n<think>x",
    "",
]
# What separates the rules: digits after spaces and newlines, trailing spaces, composed characters, capitals, slashes.
HARD_TEXTS = ["\n\n1. First\n2. Second", "a  1", " x  \n\n \t y ", "  two", "e\u0301", "ABCdefGHI", "...///\n\n//x"]
CORPUS = [*TEXTS, *HARD_TEXTS, "the 2024 results: 12, 345 and 6789; don't stop ABC abcABC\n\n  indented\n"] * 2
PATTERNS: dict[str, str | tuple[str, ...]] = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "kimi-k2": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "minimax-m2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Letters with a case are named one by one; none in these texts is new to that list.
PATTERNS["deepseek-llm"] = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[ࠀ-龥가-퟿]+",
    r"\p{Nd}",
)
PATTERNS["glm4"] = PATTERNS["llama-bpe"]
WHOLE_TOKENS = ("llama-bpe", "tekken", "glm4")


def reference(kind: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer as models with this kind of splitting ship it, trained on a small corpus."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=kind in WHOLE_TOKENS))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in PATTERNS)
    steps: list[Any] = [bytes_only]
    if kind in PATTERNS:
        patterns = PATTERNS[kind]
        several = (patterns,) if isinstance(patterns, str) else patterns
        steps = [*(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in several), bytes_only]
    elif kind == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if kind in ("qwen2", "qwen35"):
        backend.normalizer = tokenizers.normalizers.NFC()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=600, special_tokens=names, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_tokens(["<think>"])
    return backend


def metadata_of(backend: tokenizers.Tokenizer, kind: str) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    by_id = {i: token for token, i in backend.get_vocab().items()}
    tokens = [by_id[i] for i in range(len(by_id))]
    special = {i: 3 if token.special else 4 for i, token in backend.get_added_tokens_decoder().items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [special.get(i, 1) for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{# <|return|> <|call|> #}", ("<|im_end|>", "<|endoftext|>", "<|return|>", "<|call|>")),
        ("{# <|eom_id|> #}", ("<|im_end|>", "<|endoftext|>", "<|eom_id|>")),
    ],
)
def test_tokens_that_end_a_call_end_the_answer(
    template: str, ends: tuple[str, ...], tmp_path: Path, write_gguf: Callable[..., str]
) -> None:
    """No key of a GGUF file names them."""
    backend = reference("gpt-2")
    backend.add_special_tokens(["<|return|>", "<|call|>", "<|eom_id|>"])
    metadata = metadata_of(backend, "gpt-2") | {"tokenizer.chat_template": template}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", "llama", metadata))
    assert {tokenizer.token_text(i) for i in tokenizer.eos_ids} == set(ends)


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", *PATTERNS])
def test_byte_level_pre_tokenizers(kind: str, tmp_path: Path, write_gguf: Callable[..., str]) -> None:
    backend = reference(kind)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", "llama", metadata_of(backend, kind)))
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|im_start|>x"

    @settings(max_examples=60, deadline=None)
    @given(st.text("aB1٣ \n\t.,'’é日😀/<>", max_size=20))
    def any_text(text: str) -> None:
        assert tokenizer.encode(text) == backend.encode(text).ids

    any_text()
    for text in (*TEXTS, *HARD_TEXTS):
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        for skip in (False, True):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_pre_tokenizers_differ(tmp_path: Path, write_gguf: Callable[..., str]) -> None:
    """The texts above do tell the rules apart: with the rules of another kind they give other ids."""
    backend = reference("smollm")
    for kind in ("gpt-2", *PATTERNS):
        metadata = {**metadata_of(backend, "smollm"), "tokenizer.ggml.pre": kind}
        other = load_tokenizer(write_gguf(tmp_path / f"{kind}.gguf", "llama", metadata))
        assert any(other.encode(text) != backend.encode(text).ids for text in HARD_TEXTS), kind


def test_merges_over_whole_lines(tmp_path: Path, write_gguf: Callable[..., str]) -> None:
    """Gemma 4: listed merges over text whose spaces are marks, cut at newlines, other bytes by themselves."""
    words = ["▁", "a", "b", "ab", "▁ab", "b▁ab", "\n", "\n\n"]
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.merges": ["a b", "▁ ab", "b ▁ab", "\n \n"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", "gemma4", metadata))

    def pieces(text: str) -> list[str]:
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and tokenizer.decode(ids) == text
        return [tokens[i] for i in ids[1:]]

    assert pieces("b ab") == ["b▁ab"]
    assert pieces("ab\n\nab") == ["ab", "\n\n", "ab"]
    assert pieces("é") == ["<0xC3>", "<0xA9>"]


def test_begin_and_end_tokens(tmp_path: Path, write_gguf: Callable[..., str]) -> None:
    backend = reference("llama-bpe")
    metadata = metadata_of(backend, "llama-bpe")
    plain = backend.encode("the").ids

    def ids(**changes: Any) -> list[int]:
        entries = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
        entries = {key: value for key, value in entries.items() if value is not None}
        return load_tokenizer(write_gguf(tmp_path / "x.gguf", "llama", entries)).encode("the")

    assert ids() == plain
    assert ids(add_bos_token=True, add_eos_token=True) == [1, *plain, 2]
    # What a file that says nothing means depends on its kind.
    assert ids(add_bos_token=None) == [1, *plain]
    assert ids(add_bos_token=None, pre="gpt-2") == plain


def test_sentencepiece_scores_become_merges(sentencepiece: Tokenizer) -> None:
    def tokens(text: str) -> list[str]:
        return [sentencepiece.token_bytes(i).decode("latin-1") for i in sentencepiece.encode(text)[1:]]

    assert sentencepiece.encode("")[:1] == [sentencepiece.bos_id] == [1]
    assert tokens("the cat") == [" the", " cat"]
    # " an" scores better than " a" + "nd"; "and" comes after "an" is taken.
    assert tokens("and") == [" an", "d"]
    assert tokens("stop") == [" ", "sto", "p"]
    # A space of one's own goes after the one that every text begins with; pairs of spaces are merged last of all.
    assert tokens(" the") == [" ", " the"]
    assert tokens("b  d") == [" ", "b", "  ", "d"]
    assert tokens("ü") == [" ", "\xc3", "\xbc"]


def test_sentencepiece_equals_transformers(sentencepiece: Tokenizer, sentencepiece_file: str) -> None:
    from transformers import AutoTokenizer

    file = Path(sentencepiece_file)
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for text in ["the cat and a stop", "The cat, 日本 and é!", "emoji 😀", "a</s>b", "tabs\tand\nlines", "a  b   c"]:
        ids = sentencepiece.encode(text)
        # Transformers puts no space before text that follows a special token; llama.cpp and sentencepiece do.
        expected = theirs.encode(text) if "</s>" not in text else [*theirs.encode("a</s>"), *theirs.encode("b")[1:]]
        assert ids == expected, text
        assert sentencepiece.decode(ids) == theirs.decode(expected, skip_special_tokens=True)


def test_sentencepiece_text_round_trip(sentencepiece: Tokenizer) -> None:
    for text in ("the cat", " the  cat ", "日本 😀", "x\n", ""):
        assert sentencepiece.decode(sentencepiece.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert'; allowed: 'gpt2', 'llama', 'gemma4'"),
        ({"tokenizer.ggml.pre": "dwarf"}, "tokenizer.ggml.pre='dwarf'; known: "),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["q qq"]}, "--tokenizer"),
        ({"tokenizer.ggml.token_type": [1]}, "3 tokens, but 1 token types"),
        ({"tokenizer.ggml.tokens": ["a", "a", "b"]}, "1 tokens occur twice"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str, tmp_path: Path, write_gguf: Callable[..., str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    entries = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
    with pytest.raises(ModelError) as caught:
        load_tokenizer(write_gguf(tmp_path / "x.gguf", "llama", entries))
    assert words in str(caught.value)


def test_real_model(smollm2_path: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(smollm2_path)
    file = Path(smollm2_path)
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (49152, (2,), 1)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    # Transformers leaves out that digits stand alone, and so cuts the newlines before one apart. The vocabulary was
    # made the other way: no token has a digit and anything else.
    numbered = "Steps:\n\n1. Mix"
    newlines = tokenizer.token_id("ĊĊ")
    assert newlines in tokenizer.encode(numbered) and newlines not in theirs.encode(numbered)
    texts = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size)]
    assert not [t for t in texts if len(t) > 1 and any(c in "0123456789" for c in t)]
