"""Structural tags: text in which tagged passages follow grammars of their own, such as the arguments of tool calls.

Two notations are read: `triggers` and `structures`, and the nested `format` of xgrammar, as a grammar in Lark's
notation. Texts that are special tokens of the model become these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.grammars.limits import read_json, refuse
from allotrope.request import Grammar

_ESCAPE_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
_ANY_TEXT = r"/(.|\n)*/"
# The fields of each format.
_FIELDS = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "any_text": ("excludes",),
    "regex": ("pattern",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "excludes", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
# A field of xgrammar's, with the value that asks for what is done anyway.
_NEUTRAL = {"style": "json"}


def lark_of_tag(grammar: Grammar, special_texts: Mapping[str, int], json_options: Mapping[str, Any]) -> str:
    """The grammar of a structural tag in Lark's notation.

    `special_texts`: text of each special token -> its id. `json_options`: of the schemas within. Raises
    `InvalidRequest` with what is not supported.
    """
    return _Writer(grammar, special_texts, json_options).write(nested_tag(grammar)["format"])


def nested_tag(grammar: Grammar) -> dict[str, Any]:
    """The tag in the nested notation: `triggers` and `structures` become one format. Raises `InvalidRequest`."""
    tag = read_json(grammar)
    if tag.get("type", "structural_tag") != "structural_tag":
        raise refuse(grammar, f"its type is {str(tag['type'])[:60]!r}, not 'structural_tag'")
    _check_fields(grammar, "structural_tag", tag, ("format",) if "format" in tag else ("structures", "triggers"))
    if "format" in tag:
        return {"type": "structural_tag", "format": tag["format"]}
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise refuse(grammar, "it needs a format, or structures and triggers")
    for one in structures:
        _check_fields(grammar, "structure", one, ("begin", "schema", "end"))
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
            "end": one.get("end", ""),
        }
        for one in structures
    ]
    format = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": format}


def _check_fields(grammar: Grammar, what: str, value: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a field of `value` beside its type and `names`, unless its value asks for what is done anyway."""
    for name, one in value.items():
        if name not in (*names, "type") and one not in (None, False, [], _NEUTRAL.get(name)):
            raise refuse(grammar, f"{what} has the unknown field {name[:60]!r}; it has {', '.join(names)}")


class _Writer:
    def __init__(self, grammar: Grammar, special_texts: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self._grammar, self._specials, self._options = grammar, special_texts, dict(json_options)
        longest_first = sorted(special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []
        # Texts that any text excludes -> its terminal.
        self._texts_without: dict[tuple[str, ...], str] = {}

    def write(self, format: Any) -> str:
        start = self._format(format)
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules)) + "\n"

    def _format(self, format: Any) -> str:
        if not isinstance(format, dict):
            raise self._refuse("each format is a JSON object")
        self._check(format)
        match format.get("type"):
            case "const_string":
                return self._text(format.get("value"))
            case "json_schema":
                return self._json(format.get("json_schema"))
            case "any_text":
                return self._any_text(self._excludes(format))
            case "regex":
                return self._rule(self._regex(format.get("pattern")))
            case "sequence":
                return self._rule(" ".join(self._format(one) for one in self._list(format, "elements")))
            case "or":
                return self._either(self._list(format, "elements"))
            case "tag":
                return self._tag(format, "")
            case "triggered_tags":
                tags, triggers = self._list(format, "tags"), self._texts(format, "triggers")
                return self._triggered(
                    tags,
                    triggers,
                    self._excludes(format),
                    at_least_one=self._flag(format, "at_least_one"),
                    stop_after_first=self._flag(format, "stop_after_first"),
                )
            case "tags_with_separator":
                return self._separated(format)
            case other:
                raise self._refuse(f"the format type {str(other)[:60]!r} is not known")

    def _either(self, elements: list[Any]) -> str:
        """One of the elements. Plain texts are one terminal: as rules, each would be an item of the parser."""
        plain = [one["value"] for one in elements if self._is_plain(one)]
        if len(plain) < 2:
            return self._rule(" | ".join(map(self._format, elements)))
        name = self._name("CHOICE")
        self._rules.append(f"{name}: {' | '.join(map(json.dumps, plain))}")
        return self._rule(" | ".join([name, *(self._format(one) for one in elements if not self._is_plain(one))]))

    def _is_plain(self, format: Any) -> bool:
        """Whether a format is a text without special tokens, and not empty."""
        text = format.get("value") if isinstance(format, dict) and format.get("type") == "const_string" else None
        return isinstance(text, str) and bool(text) and not self._special.search(text)

    def _tag(self, tag: Any, trigger: str) -> str:
        """A tag behind `trigger`, which its beginning starts with."""
        if not isinstance(tag, dict) or not isinstance(tag.get("begin"), str):
            raise self._refuse("each tag has a begin, a content and an end")
        self._check(tag, "tag")
        content, end = tag.get("content"), tag.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if isinstance(content, dict) and content.get("type") == "any_text":
            self._check(content)
            return self._tagged_text(tag["begin"][len(trigger) :], ends, self._excludes(content))
        closing = " | ".join(self._text(one) for one in ends)
        begin = tag["begin"][len(trigger) :]
        return self._rule(f"{self._text(begin)} {self._format(content)} ({closing})")

    def _tagged_text(self, begin: str, ends: list[Any], excludes: list[str]) -> str:
        """Text between a beginning and the first of `ends`."""
        if len(ends) != 1 or not isinstance(ends[0], str) or not ends[0]:
            raise self._refuse("a tag with any_text needs one end")
        if ends[0] in self._specials:
            # The end spelled in other tokens is the same text.
            text = self._any_text([*excludes, ends[0]])
            return self._rule(f"{self._text(begin)} {text} {self._text(ends[0])}")
        text = self._any_text(excludes)
        name = self._name("lazy")
        self._rules.append(f"{name}[suffix={json.dumps(ends[0])}]: {text}")
        return self._rule(f"{self._text(begin)} {name}")

    def _triggered(
        self,
        tags: list[Any],
        triggers: list[str],
        excludes: list[str],
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Any text without `excludes`, in which each trigger opens one of the tags that begin with it."""
        found: list[str] = []
        # A trigger spelled in other tokens is the same text.
        text = self._any_text([*excludes, *(trigger for trigger in triggers if trigger in self._specials)])
        for trigger in triggers:
            own = [tag for tag in tags if isinstance(tag, dict) and str(tag.get("begin", "")).startswith(trigger)]
            if not trigger or not own:
                raise self._refuse(f"no tag begins with the trigger {trigger[:60]!r}")
            body = " | ".join(self._tag(tag, trigger) for tag in own)
            if trigger in self._specials:
                found.append(self._rule(f"{text} {self._text(trigger)} ({body})"))
            else:
                name = self._name("trigger")
                self._rules.append(f"{name}[suffix={json.dumps(trigger)}]: {text}")
                found.append(self._rule(f"{name} ({body})"))
        begins = [str(tag.get("begin", "")) if isinstance(tag, dict) else "" for tag in tags]
        if not all(any(begin.startswith(one) for one in triggers) for begin in begins):
            raise self._refuse("a tag begins with none of the triggers")
        either = f"({' | '.join(found)})"
        if stop_after_first:
            return self._rule(either if at_least_one else f"{either} | {text}")
        return self._rule(f"{either}{'+' if at_least_one else '*'} {text}")

    def _separated(self, format: Mapping[str, Any]) -> str:
        tags = self._list(format, "tags")
        either = self._rule(" | ".join(self._tag(tag, "") for tag in tags))
        if self._flag(format, "stop_after_first"):
            repeated = either
        else:
            repeated = f"{either} ({self._text(format.get('separator', ''))} {either})*"
        return self._rule(repeated if self._flag(format, "at_least_one") else f"({repeated})?")

    def _any_text(self, excludes: list[str]) -> str:
        """The terminal of any text in which none of `excludes` stands."""
        key = tuple(sorted(set(excludes)))
        if key not in self._texts_without:
            name = self._texts_without[key] = f"TEXT_{len(self._texts_without)}"
            others = " | ".join(map(json.dumps, key))
            without = f" & ~({_ANY_TEXT} ({others}) {_ANY_TEXT})" if key else ""
            self._rules.append(f"{name}: {_ANY_TEXT}{without}")
        return self._texts_without[key]

    def _excludes(self, format: Mapping[str, Any]) -> list[str]:
        return self._texts(format, "excludes") if format.get("excludes") else []

    def _json(self, schema: Any) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise self._refuse("each json_schema is a JSON object")
        return self._rule("%json " + json.dumps({"x-guidance": self._options, **schema}))

    def _regex(self, pattern: Any) -> str:
        if not isinstance(pattern, str) or not pattern:
            raise self._refuse("each regex has a pattern")
        # Escapes are read as wholes: a slash behind an escaped backslash would end the literal.
        return "/" + _ESCAPE_OR_SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], pattern) + "/"

    def _text(self, text: Any) -> str:
        """`text` as literals and special tokens."""
        if not isinstance(text, str):
            raise self._refuse(f"{str(text)[:60]!r} stands where a text is needed")
        parts, last = [], 0
        for match in self._special.finditer(text):
            parts += [json.dumps(text[last : match.start()])] * (match.start() > last)
            parts.append(f"<[{self._specials[match.group()]}]>")
            last = match.end()
        parts += [json.dumps(text[last:])] * (last < len(text))
        return " ".join(parts) or '""'

    def _rule(self, body: str) -> str:
        name = self._name("part")
        self._rules.append(f"{name}: {body}")
        return name

    def _name(self, kind: str) -> str:
        return f"{kind}_{len(self._rules)}"

    def _check(self, format: Mapping[str, Any], kind: str | None = None) -> None:
        kind = kind or str(format.get("type"))
        if kind in _FIELDS:
            _check_fields(self._grammar, kind, format, _FIELDS[kind])

    def _flag(self, format: Mapping[str, Any], name: str) -> bool:
        value = format.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(f"{name} is true or false")
        return bool(value)

    def _list(self, format: Mapping[str, Any], name: str) -> list[Any]:
        found = format.get(name)
        if not isinstance(found, list) or not found:
            raise self._refuse(f"{name} is a list of at least one")
        return found

    def _texts(self, format: Mapping[str, Any], name: str) -> list[str]:
        found = self._list(format, name)
        if not all(isinstance(one, str) for one in found):
            raise self._refuse(f"{name} are texts")
        return found

    def _refuse(self, reason: str) -> InvalidRequest:
        return refuse(self._grammar, reason)
