"""Parts of a structural tag that calls of tools are written with; `allotrope.grammars.structural_tag` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

NOTHING: Json = {"type": "const_string", "value": ""}
ANY_TEXT: Json = {"type": "any_text"}
# Models write newlines between tags or none, as they were trained.
BREAK: Json = {"type": "or", "elements": [{"type": "const_string", "value": "\n"}, NOTHING]}


@dataclass(frozen=True)
class CalledTool:
    """A tool in a grammar. `schema`: of its arguments; None: any object."""

    name: str
    schema: Mapping[str, Any] | None


class NotWritable(Exception):
    """The format's calls cannot be written as a grammar; the text says why."""


def sequence(*elements: Json) -> Json:
    """The elements, one after another."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Json) -> Json:
    """One of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def text(value: str) -> Json:
    """`value` as it stands."""
    return {"type": "const_string", "value": value}
