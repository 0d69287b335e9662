"""Grammars by xgrammar: pushdown automata whose masks are largely computed when they compile.

It has no limits of its own, so that sources which multiply repetitions are refused before it sees them, and so are the
keywords that it passes over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import xgrammar

from allotrope.grammars.backend import Bits
from allotrope.grammars.limits import read_json, refuse
from allotrope.grammars.structural_tag import nested_tag
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar

_THREADS = 2
_CACHE_BYTES = 256 << 20
_MOST_SPACES = 32
_MAX_REPETITIONS = 4096
_MAX_ALTERNATIVES = 2048
# What it passes over, or only in part. Texts of a given length may hold control characters.
_PASSED_OVER = frozenset(
    """not if then else contains minContains maxContains uniqueItems multipleOf dependentRequired dependentSchemas
    dependencies propertyNames patternProperties minProperties maxProperties unevaluatedProperties unevaluatedItems
    minLength maxLength allOf oneOf $dynamicRef $recursiveRef contentMediaType""".split()
)
_FORMATS = frozenset("date time date-time duration email hostname ipv4 ipv6 uri uuid".split())
# Keywords whose values hold schemas, by name or at once.
_BY_NAME = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf")
_SIBLINGS = ("type", "properties", "required", "items", "enum", "const", "additionalProperties", "pattern", "minimum")
# A pattern becomes JSON as it stands: what matches quotes, backslashes or control characters would break the text.
_UNESCAPED = re.compile(r'(?:[^\\]|\\.)*?(?:\\[sSDWpPxunrtfv0"\\]|\[\^|\.|")', re.DOTALL)
_REPETITION = re.compile(r"\{(\d+)(?:,(\d*))?\}")


class XGrammarBackend:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._plain = _compiler(vocabulary, with_special=False)
        self._with_special = _compiler(vocabulary, with_special=True)
        self._batch = xgrammar.BatchGrammarMatcher(_THREADS)

    def compile(self, grammar: Grammar) -> XGrammar:
        _check_repetitions(grammar)
        match grammar.kind:
            case "json_schema":
                for reason in _unsupported(read_json(grammar)):
                    raise refuse(grammar, reason)
                compiled = self._plain.compile_json_schema(
                    grammar.source, strict_mode=False, max_whitespace_cnt=_MOST_SPACES
                )
            case "json_object":
                compiled = self._plain.compile_json_schema(
                    '{"type": "object"}', strict_mode=False, max_whitespace_cnt=_MOST_SPACES
                )
            case "regex":
                compiled = self._plain.compile_regex(grammar.source)
            case "choice":
                choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in read_json(grammar))
                compiled = self._plain.compile_grammar(f"root ::= {choices}")
            case "lark":
                if "::=" in grammar.source:
                    compiled = self._plain.compile_grammar(grammar.source)
                else:
                    compiled = self._plain.compile_lark(grammar.source)
            case "structural_tag":
                compiled = self._with_special.compile_structural_tag(json.dumps(nested_tag(grammar)))
        found = XGrammar(compiled, frozenset(self._vocabulary.eos_ids))
        bits = xgrammar.allocate_token_bitmask(1, len(self._vocabulary.tokens))
        found.matcher().inner.fill_next_token_bitmask(bits)
        if not bits.any():
            raise refuse(grammar, "no output can follow it")
        return found

    def fill(self, matchers: Sequence[tuple[XGrammarMatcher, int]], bits: Bits) -> None:
        import torch

        tensor = torch.from_numpy(bits)
        rows = [row for _, row in matchers]
        self._batch.batch_fill_next_token_bitmask([matcher.inner for matcher, _ in matchers], tensor, rows)
        for matcher, row in matchers:
            matcher.see(bits[row])


class XGrammar:
    def __init__(self, compiled: Any, eos_ids: frozenset[int]) -> None:
        self._compiled, self._eos_ids = compiled, eos_ids

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._eos_ids)


class XGrammarMatcher:
    def __init__(self, inner: Any, eos_ids: frozenset[int]) -> None:
        self.inner, self._eos_ids = inner, eos_ids
        self.ended = self.complete = False
        self.error: str | None = None

    def take(self, token: int) -> bool:
        taken = bool(self.inner.accept_token(token))
        self.ended = taken and token in self._eos_ids
        if not taken:
            self.error = f"token {token} does not follow it"
        return taken

    def takes_bytes(self, data: bytes) -> bool:
        return bool(self.inner.accept_string(data))

    def fork(self) -> XGrammarMatcher:
        other = XGrammarMatcher(self.inner.fork(), self._eos_ids)
        other.ended, other.complete, other.error = self.ended, self.complete, self.error
        return other

    def see(self, mask: Any) -> None:
        """Read off a filled mask whether only an end may follow."""
        places = [int(place) for place in mask.nonzero()[0][: len(self._eos_ids) + 1]]
        ids = {32 * place + bit for place in places for bit in range(32) if int(mask[place]) >> bit & 1}
        self.complete = bool(ids) and ids <= self._eos_ids
        if not ids:
            self.error = "no token can follow"


def _compiler(vocabulary: Vocabulary, *, with_special: bool) -> Any:
    """A compiler for which special tokens have their text, or none, so that no answer's text holds one."""
    tokens = [b"" if i in vocabulary.special_ids and not with_special else t for i, t in enumerate(vocabulary.tokens)]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(vocabulary.eos_ids)
    )
    return xgrammar.GrammarCompiler(info, max_threads=_THREADS, cache_limit_bytes=_CACHE_BYTES)


def _check_repetitions(grammar: Grammar) -> None:
    """Refuse counted repetitions that multiply beyond what may be unrolled."""
    product = 1
    for low, high in _REPETITION.findall(grammar.source):
        product *= max(1, int(high or low))
        if product > _MAX_REPETITIONS:
            raise refuse(grammar, f"its repetitions multiply to more than {_MAX_REPETITIONS}")


def _unsupported(schema: Any) -> Iterator[str]:
    """What of a schema it would pass over."""
    left: list[Any] = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
            continue
        if not isinstance(one, dict):
            continue
        for name in ("anyOf", "$ref"):
            if name in one and any(other in one for other in _SIBLINGS):
                yield f"{name} has other keywords beside it"
        for name, value in one.items():
            if name in _PASSED_OVER:
                yield f"Unimplemented keys: [{json.dumps(name)}]"
            if name == "format" and value not in _FORMATS and "string" in one.get("type", "string"):
                yield f"Unknown format: {str(value)[:60]}"
            counted = name in ("minItems", "maxItems") and isinstance(value, int)
            if counted and value > _MAX_REPETITIONS:
                yield f"{name} is more than {_MAX_REPETITIONS}"
            if name in ("enum", "anyOf") and isinstance(value, list) and len(value) > _MAX_ALTERNATIVES:
                yield f"{name} has more than {_MAX_ALTERNATIVES} alternatives"
            if name == "pattern" and (len(str(value)) > _MAX_REPETITIONS or _UNESCAPED.match(str(value))):
                yield "pattern is too long, or matches characters that JSON escapes"
            if name in _BY_NAME and isinstance(value, dict):
                left += value.values()
            elif name in _SCHEMAS:
                left.append(value)
