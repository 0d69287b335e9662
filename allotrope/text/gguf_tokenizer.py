"""Builds a tokenizer from the metadata of a GGUF file.

Owns the meaning of the `tokenizer.*` keys: the vocabulary with its token types, the merges or scores, and the
pre-tokenizer, of which the file has only the name. The tokenizer follows llama.cpp, which defines the format. Where
llama.cpp only approximates the model's own tokenizer, it follows the model: a vocabulary with single digits splits them
from the spaces before them, and models trained on NFC text get NFC text.

The names are the values of `tokenizer.ggml.pre`. Their rules are in llama.cpp's `llama-vocab.cpp` and in the models'
own `tokenizer.json` files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from allotrope.errors import ModelError
from allotrope.gguf_file import GgufFile
from allotrope.text.codec import FastCodec
from allotrope.text.tokenizer import Tokenizer

_SPACE_MARK = "▁"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATH_TAIL = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"


class _Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Split:
    """Pre-tokenizer of a byte-level vocabulary.

    `pattern`: regular expression of the pieces; None for GPT-2's. `before`: expressions whose matches become pieces
    before `pattern` is applied. `single_digits`: each digit becomes one, too. `ignore_merges`: a piece that is a token
    skips the merges. `add_bos`: default of `add_bos_token`. `nfc`: normalise text to NFC first.
    """

    pattern: str | None = None
    before: tuple[str, ...] = ()
    single_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = _Split()
_DIGITS = _Split(single_digits=True)
_THREE_DIGITS = _Split(rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}", ignore_merges=True, add_bos=True)
_ONE_DIGIT = _Split(rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}{_TAIL}", nfc=True)
_CASED = _Split(
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}{_PATH_TAIL}", ignore_merges=True, add_bos=True
)
_CASED_CONTRACTIONS = _Split(
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}{_PATH_TAIL}"
)
# Qwen3.5: marks belong to words.
_ONE_DIGIT_MARKS = _Split(
    rf"{_CONTRACTION}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
_CHAT_GLM = _Split(_THREE_DIGITS.pattern)
_GLM = _Split(_THREE_DIGITS.pattern, ignore_merges=True)
_HAN = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_V3 = _Split(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    before=(r"\p{N}{1,3}", _HAN),
)
# Code points of the letters in DeepSeek's first models: those with a case, of scripts that its tokenizer knows.
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_LETTERS = "".join("-".join(rf"\x{{{end}}}" for end in one.split("-")) for one in _CASED_LETTERS.split())
_DEEPSEEK_LLM = _Split(
    r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+",
    before=(
        r"[\r\n]",
        rf"\s?[{_LETTERS}]+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        r"\s+$",
    ),
    single_digits=True,
)
_NO_HAN_UPPER, _NO_HAN_LOWER = (f"[{letters[1:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = _Split(
    rf"\p{{Han}}+|{_WORD}{_NO_HAN_UPPER}*{_NO_HAN_LOWER}+{_CONTRACTION}?"
    rf"|{_WORD}{_NO_HAN_UPPER}+{_NO_HAN_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}{_TAIL}"
)

_SPLITS = {
    **dict.fromkeys(("gpt-2", "olmo", "jais", "mpt", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _ONE_DIGIT),
    "tekken": _CASED,
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _CASED_CONTRACTIONS),
    "qwen35": _ONE_DIGIT_MARKS,
    "chatglm-bpe": _CHAT_GLM,
    **dict.fromkeys(("glm4", "glm5"), _GLM),
    "deepseek-llm": _DEEPSEEK_LLM,
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), _DEEPSEEK_V3),
    "kimi-k2": _KIMI,
}


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises `ModelError` if the file has none, or one of an unknown type."""
    file = GgufFile(str(path))
    vocabulary = _Vocabulary(file)
    model = vocabulary.key("model")
    if model == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif model == "llama":
        backend, add_bos = _sentencepiece(vocabulary, _merges_by_score(vocabulary)), True
    elif model == "gemma4":
        backend, add_bos = _sentencepiece(vocabulary, vocabulary.merges()), True
        # No token joins a newline with another character.
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    else:
        raise vocabulary.bad(f"tokenizer.ggml.model={model!r}; allowed: 'gpt2', 'llama', 'gemma4'")
    vocabulary.add_tokens(backend)
    special = vocabulary.special_tokens()
    _add_bos_eos(backend, vocabulary, add_bos, special)
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    }
    return Tokenizer(FastCodec(backend), special_tokens=special, eos_ids=file.end_ids(), chat_templates=templates)


class _Vocabulary:
    """The tokens of a file with their types. Raises `ModelError` if the keys contradict one another."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens: Sequence[str] = self.key("tokens")
        self.kinds: Sequence[int] = self.key("token_type", [_Kind.NORMAL] * len(self.tokens))
        if len(self.kinds) != len(self.tokens):
            raise self.bad(f"{len(self.tokens)} tokens, but {len(self.kinds)} token types")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise self.bad(f"{len(self.tokens) - len(self.ids)} tokens occur twice")

    def key(self, name: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"tokenizer.ggml.{name}", default)
        if value is None:
            raise self.bad(f"tokenizer.ggml.{name} is missing")
        return value

    def bad(self, reason: str) -> ModelError:
        return ModelError(
            f"cannot load a tokenizer from {self._file.path}",
            [reason, "give --tokenizer a directory that has the model's tokenizer.json"],
        )

    def merges(self) -> list[tuple[str, str]]:
        """The pairs that the file lists, best first."""
        return [(pair[0], pair[-1]) for pair in (merge.split(" ", 1) for merge in self.key("merges"))]

    def backend(self, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
        """A BPE tokenizer with `merges`, without normalizer, pre-tokenizer and decoder."""
        try:
            return tokenizers.Tokenizer(models.BPE(vocab=self.ids, merges=merges, **options))
        except Exception as error:
            # The library raises a plain Exception for merges that do not fit the vocabulary.
            raise self.bad(str(error)) from error

    def add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Make `backend` match control and user-defined tokens whole. Control tokens are special."""
        for kind, special in ((_Kind.CONTROL, True), (_Kind.USER_DEFINED, False)):
            tokens = [t for t, k in zip(self.tokens, self.kinds, strict=True) if k == kind]
            backend.add_tokens([AddedToken(t, normalized=False, special=special) for t in tokens])

    def special_tokens(self) -> dict[str, str]:
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
        ids = {name: self._file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
        known = {name: i for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(self.tokens)}
        return {f"{name}_token": self.tokens[i] for name, i in known.items()}


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer of a byte-level vocabulary, and whether it adds BOS if the file has no `add_bos_token`."""
    name = vocabulary.key("pre")
    if name not in _SPLITS:
        raise vocabulary.bad(f"tokenizer.ggml.pre={name!r}; known: {', '.join(sorted(_SPLITS))}")
    split = _SPLITS[name]
    backend = vocabulary.backend(vocabulary.merges(), ignore_merges=split.ignore_merges)
    steps: list[pre_tokenizers.PreTokenizer] = []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.before]
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    unknown = [t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == _Kind.UNKNOWN]
    backend = vocabulary.backend(merges, unk_token=unknown[0] if unknown else None, fuse_unk=True, byte_fallback=True)
    spaced = vocabulary.key("add_space_prefix", True)
    marks = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), marks]) if spaced else marks
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return backend


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Pairs of tokens that form a token, best score first. sentencepiece merges in this order and stores no merges."""
    merging = (_Kind.NORMAL, _Kind.USER_DEFINED, _Kind.UNUSED)
    ids = {t: i for t, i in vocabulary.ids.items() if vocabulary.kinds[i] in merging}
    scores = vocabulary.key("scores")
    pairs = [
        (-scores[i], i, cut, token)
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(token[:cut], token[cut:]) for _, _, cut, token in sorted(pairs)]


def _add_bos_eos(
    backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, add_bos: bool, special: dict[str, str]
) -> None:
    """Make `backend` put BOS and EOS around a text if the file asks for it. `add_bos`: default of `add_bos_token`."""
    first = [special["bos_token"]] if vocabulary.key("add_bos_token", add_bos) and "bos_token" in special else []
    last = [special["eos_token"]] if vocabulary.key("add_eos_token", False) and "eos_token" in special else []
    if first or last:
        backend.post_processor = TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[(t, vocabulary.ids[t]) for t in (*first, *last)]
        )
