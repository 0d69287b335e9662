"""Numbers of schemas: a grammar keeps them as they are, or is refused before it is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allotrope.errors import InvalidRequest
from allotrope.grammars.backend import load_backend
from allotrope.grammars.limits import check_limits
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar

TOKENS = (*(bytes([byte]) for byte in range(256)), b"</s>")


def is_taken(source: str, text: str) -> bool:
    """Whether `text` is a whole answer. Raises `InvalidRequest` if the schema is refused."""
    pytest.importorskip("llguidance", reason="grammars need llguidance")
    grammar = Grammar("json_schema", source)
    check_limits(grammar)
    matcher = load_backend("llguidance", Vocabulary(TOKENS, frozenset((256,)), (256,))).compile(grammar).matcher()
    return all(map(matcher.take, text.encode())) and matcher.take(256)


EXACT = ["0", "-7", "9007199254740992", "9007199254740994", "9223372036854774784", "-9223372036854774784", "0.1"]
EXACT += ["1234567.891", "-3.14159", "12345678901234.5"]
INEXACT = ["9007199254740993", "-9007199254740993", "9223372036854775808", "-9223372036854775808", "1e400", "5e-324"]
INEXACT += ["123456789.12345679", "18446744073709551615", "1" * 4000, "0.30000000000000004", "0." + "1" * 50]


@pytest.mark.parametrize("number", EXACT)
def test_numbers_that_are_kept(number: str) -> None:
    kind = "number" if "." in number else "integer"
    for source in (
        f'{{"const": {number}}}',
        f'{{"enum": ["a", {number}]}}',
        f'{{"type": "{kind}", "minimum": {number}, "maximum": {number}}}',
    ):
        assert is_taken(source, number)
    assert is_taken(f'{{"const": [{{"a": {number}}}]}}', f'[{{"a":{number}}}]')


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
@pytest.mark.parametrize("number", INEXACT)
def test_numbers_that_would_be_others_are_refused(number: str, kind: Any) -> None:
    def check(source: str) -> None:
        if kind == "structural_tag":
            source = f'{{"format": {{"type": "json_schema", "json_schema": {source}}}}}'
        check_limits(Grammar(kind, source))

    for keyword, value in (
        ("const", number),
        ("enum", f"[1, {number}]"),
        ("const", f'{{"a": [{number}]}}'),
        ("minimum", number),
        ("exclusiveMinimum", number),
        ("multipleOf", number),
    ):
        with pytest.raises(InvalidRequest, match=f"{keyword} has the number .*64-bit float") as caught:
            check(f'{{"properties": {{"n": {{"anyOf": [{{"{keyword}": {value}}}]}}}}}}')
        assert len(str(caught.value)) < 300
    check(f'{{"type": "string", "default": {number}}}')


def test_upper_bounds_that_are_rounded_down() -> None:
    largest = (1 << 63) - 1
    for bound in (largest, 1 << 63, (1 << 64) - 1):
        schema = json.dumps({"type": "integer", "minimum": 3, "maximum": bound})
        assert is_taken(schema, str(largest)) and not is_taken(schema, str(1 << 64))
    for schema in ({"maximum": largest}, {"type": "number", "maximum": largest}, {"maximum": (1 << 53) + 3}):
        with pytest.raises(InvalidRequest, match="maximum"):
            check_limits(Grammar("json_schema", json.dumps(schema)))
    check_limits(Grammar("json_schema", json.dumps({"maximum": (1 << 53) + 1})))
    # Both bounds at the smallest integer of 64 bits are a recursion without end in the library.
    with pytest.raises(InvalidRequest, match="minimum"):
        check_limits(Grammar("json_schema", json.dumps({"type": "integer", "minimum": -1 << 63, "maximum": -1 << 63})))
    with pytest.raises(InvalidRequest):
        check_limits(Grammar("json_schema", '{"const": 1e99999999999999999999}'))
