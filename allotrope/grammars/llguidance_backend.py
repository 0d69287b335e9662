"""Grammars by llguidance: an Earley parser above a lexer of regex derivatives, with fuel for every part of the work."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from allotrope.grammars.backend import Bits
from allotrope.grammars.limits import read_json, refuse
from allotrope.grammars.structural_tag import lark_of_tag
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar

# A model that writes white space for ever would never end its answer.
_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
# A state takes up to 2 kB; the library's own limit would let one sequence hold half a gigabyte.
_MAX_LEXER_STATES = 25_000
_LONGEST_REASON = 300
_EXCERPT = re.compile(r"^\s*\d+ \| ", re.MULTILINE)
_PLACE_OF_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_NOTHING = "no output can follow it"


class _Wrapped:
    """The vocabulary as `TokenizerWrapper` reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._by_byte = {token: i for i, token in reversed(list(enumerate(vocabulary.tokens))) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._by_byte[bytes([byte])] for byte in text if bytes([byte]) in self._by_byte]


class LLGuidanceBackend:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Wrapped(vocabulary)), eos_token=list(vocabulary.eos_ids))
        self._executor = LLExecutor()
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, grammar: Grammar) -> LLGuidanceGrammar:
        try:
            source = _unforced(self._source(grammar))
        except ValueError as error:
            raise refuse(grammar, _one_sentence(str(error))) from error
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=self._limits)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise refuse(grammar, _refusal(matcher.get_error()))
        if not any(mask):
            raise refuse(grammar, _NOTHING)
        return LLGuidanceGrammar(matcher, self.tokenizer, frozenset(self._vocabulary.eos_ids))

    def fill(self, matchers: Sequence[tuple[LLGuidanceMatcher, int]], bits: Bits) -> None:
        rows, size = bits.shape
        pairs = [(matcher.inner, row) for matcher, row in matchers]
        if len(pairs) == 1:
            ((inner, row),) = pairs
            inner.unsafe_compute_mask_ptr(bits[row].ctypes.data, 4 * size)
        else:
            self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, 4 * size, rows)

    def _source(self, grammar: Grammar) -> str:
        match grammar.kind:
            case "json_schema":
                schema = read_json(grammar)
                if isinstance(schema, bool):
                    return json.dumps({"grammars": [{"json_schema": schema}]})
                return LLMatcher.grammar_from_json_schema(grammar.source, defaults=_OPTIONS)
            case "json_object":
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_OPTIONS)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                # One terminal: as rules, each choice would be an item of the parser at every byte.
                return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in read_json(grammar))
            case "structural_tag":
                return lark_of_tag(grammar, self._vocabulary.special_texts, _OPTIONS)
            case "lark":
                # Grammars in the notation of llama.cpp are told by their sign and rewritten.
                return llguidance.grammar_from("grammar" if "::=" in grammar.source else "lark", grammar.source)


class LLGuidanceGrammar:
    def __init__(self, first: LLMatcher, tokenizer: LLTokenizer, eos_ids: frozenset[int]) -> None:
        self._first, self._tokenizer, self._eos_ids = first, tokenizer, eos_ids

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._first.deep_copy(), self._tokenizer, self._eos_ids)


class LLGuidanceMatcher:
    def __init__(self, inner: LLMatcher, tokenizer: LLTokenizer, eos_ids: frozenset[int]) -> None:
        self.inner, self._tokenizer, self._eos_ids = inner, tokenizer, eos_ids
        self.ended = False

    @property
    def complete(self) -> bool:
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        return _one_sentence(self.inner.get_error()) if self.inner.is_error() else None

    def take(self, token: int) -> bool:
        taken = self.inner.consume_token(token)
        self.ended = taken and token in self._eos_ids
        return taken

    def takes_bytes(self, data: bytes) -> bool:
        pieces = self._tokenizer.tokenize_bytes(data)
        return self._tokenizer.decode_bytes(pieces) == data and self.inner.consume_tokens(pieces)

    def fork(self) -> LLGuidanceMatcher:
        other = LLGuidanceMatcher(self.inner.deep_copy(), self._tokenizer, self._eos_ids)
        other.ended = self.ended
        return other


def _unforced(source: str) -> str:
    """`source`, in which text that can be only one is spelled by the model in whatever tokens it likes.

    Otherwise the library allows a single token there: the first of its own spelling, which is in bytes.
    """
    if source.startswith("{"):
        (grammar,) = json.loads(source)["grammars"]
        schema = grammar.get("json_schema")
        source = grammar["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
        if isinstance(schema, bool):
            return json.dumps({"grammars": [{"json_schema": schema}]})
    head, _, rest = source.partition("\n") if source.startswith("%llguidance") else ("", "", source)
    options = json.loads(head.removeprefix("%llguidance").strip() or "{}")
    return f"%llguidance {json.dumps({'no_forcing': True} | options)}\n{rest}"


def _one_sentence(text: str) -> str:
    """An error of the library on one line, without the excerpt of the source that it appends."""
    message = _EXCERPT.split(text.replace("<non-verbose/>", ""), maxsplit=1)[0]
    line = " ".join(_PLACE_OF_SCHEMA.sub("", message).split())
    # The source has one line of options above the client's.
    line = re.sub(r"^at (\d+)\(", lambda found: f"at {int(found[1]) - 1}(", line)
    return (line[:_LONGEST_REASON] + "…" if len(line) > _LONGEST_REASON else line).rstrip(".")


def _refusal(error: str) -> str:
    return _NOTHING if error.startswith("NoExtension") else _one_sentence(error)
