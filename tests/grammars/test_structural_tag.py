"""Structural tags: which texts they allow, where tags are special tokens and where they are plain text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from allotrope.errors import InvalidRequest
from allotrope.grammars.backend import load_backend
from allotrope.grammars.vocabulary import Vocabulary
from allotrope.request import Grammar

pytest.importorskip("llguidance", reason="grammars need llguidance")

SPECIAL = b"<|call|>"
TOKENS = (*(bytes([byte]) for byte in range(256)), b"</s>", SPECIAL)
EXCLUDES = ["<g>", 'é\n"/']


def taken(format: dict[str, Any], *pieces: str | bytes) -> str:
    """The beginning of a text that the grammar allows. `pieces`: plain text, and special tokens as bytes."""
    vocabulary = Vocabulary(TOKENS, frozenset((256, 257)), (256,))
    source = json.dumps({"type": "structural_tag", "format": format})
    matcher = load_backend("llguidance", vocabulary).compile(Grammar("structural_tag", source)).matcher()
    out = b""
    for piece in pieces:
        for token in [TOKENS.index(piece)] if isinstance(piece, bytes) else piece.encode():
            if not matcher.take(token):
                return out.decode(errors="replace")
            out += TOKENS[token]
    return out.decode()


def triggered(trigger: str, **more: Any) -> dict[str, Any]:
    tag = {"type": "tag", "begin": trigger, "content": {"type": "const_string", "value": "J"}, "end": "E"}
    return {"type": "triggered_tags", "triggers": [trigger], "tags": [tag], **more}


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize(("trigger", "piece"), [("<f>", "<f>"), (SPECIAL.decode(), SPECIAL)])
def test_text_around_triggers_excludes_texts(trigger: str, piece: str | bytes, stop: bool) -> None:
    for excludes in ([], EXCLUDES):
        format = triggered(trigger, stop_after_first=stop, excludes=excludes)
        assert taken(format, "a<", piece, "JE") == f"a<{trigger}JE"
        assert taken(format, "a", piece, "X") == f"a{trigger}"
        # In any tokens it is the trigger.
        assert taken(format, f"a{trigger}X") in (f"a{trigger}", f"a{trigger[:-1]}")
        for text in EXCLUDES:
            whole = taken(format, f"a{text}b")
            assert whole == (f"a{text[:-1]}" if excludes else f"a{text}b")


@pytest.mark.parametrize(("end", "piece"), [("</f>", "</f>"), (SPECIAL.decode(), SPECIAL)])
def test_text_within_a_tag_excludes_texts(end: str, piece: str | bytes) -> None:
    content = {"type": "any_text", "excludes": EXCLUDES}
    format = {"type": "tag", "begin": "<f>", "content": content, "end": end}
    assert taken(format, "<f>a<g é\n", piece) == f"<f>a<g é\n{end}"
    assert taken(format, "<f>a<g>") == "<f>a<g"
    assert taken(format, f"<f>a{end}X") in (f"<f>a{end}", f"<f>a{end[:-1]}")
    assert taken(content, 'aé\n"/') == 'aé\n"'


@pytest.mark.parametrize(
    ("pattern", "text"), [("a/b", "a/b"), (r"a\/b", "a/b"), (r"\\/", r"\/"), (r"\\\/x", r"\/x"), (r"[\\/]+", r"/\/")]
)
def test_a_regex_has_slashes_behind_any_number_of_backslashes(pattern: str, text: str) -> None:
    format = {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": pattern}, "end": "E"}
    assert taken(format, f"<f>{text}E") == f"<f>{text}E"
    assert taken(format, "<f>b") == "<f>"


TEXT = {"type": "const_string", "value": "J"}
TAG = {"type": "tag", "begin": "<f>", "content": TEXT, "end": "E"}


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({"format": TEXT, "at_least_one": True}, "structural_tag has the unknown field 'at_least_one'"),
        ({"format": TEXT, "triggers": ["<"]}, "structural_tag has the unknown field 'triggers'"),
        ({"format": TEXT | {"values": ["K"]}}, "const_string has the unknown field 'values'; it has value"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "unknown field 'style'"),
        ({"format": TAG | {"excludes": ["K"]}}, "tag has the unknown field 'excludes'"),
        ({"format": TAG | {"content": {"type": "any_text", "exclude": ["K"]}}}, "any_text has the unknown field"),
        ({"format": triggered("<f>", stop_after_frist=True)}, "unknown field 'stop_after_frist'"),
        ({"format": triggered("<f>", stop_after_first="false")}, "stop_after_first is true or false"),
        ({"format": {"type": "tags_with_separator", "tags": [TAG], "at_least_one": 1}}, "at_least_one is true or"),
        ({"structures": [{"begin": "<f>", "end": "E", "scheme": {"a": 1}}], "triggers": ["<f>"]}, "field 'scheme'"),
    ],
)
def test_fields_that_would_have_no_effect_are_refused(tag: dict[str, Any], reason: str) -> None:
    vocabulary = Vocabulary(TOKENS, frozenset((256, 257)), (256,))
    with pytest.raises(InvalidRequest, match=reason):
        load_backend("llguidance", vocabulary).compile(Grammar("structural_tag", json.dumps(tag)))


def test_other_fields_may_ask_for_what_is_done_anyway() -> None:
    schema = {"type": "json_schema", "json_schema": {"type": "integer"}, "style": "json"}
    assert taken(schema | {"excludes": [], "any": None}, "7x") == "7"


def test_a_choice_of_many_texts() -> None:
    texts = [f"{index:x}." for index in range(4096)]
    elements = [{"type": "const_string", "value": text} for text in [*texts, "", SPECIAL.decode()]]
    format = {"type": "sequence", "elements": [{"type": "or", "elements": elements}, elements[0]]}
    for first in ("fff.", ""):
        assert taken(format, f"{first}0.X") == f"{first}0."
    assert taken(format, SPECIAL, "0.X") == f"{SPECIAL.decode()}0."
    assert taken(format, "g") == "" and taken(format, "1000.") == "100"
