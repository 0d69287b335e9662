"""Writes the parameters of a tool, each between tags of its own, as parts of a structural tag.

Owns what of a JSON schema such parameters keep, and that the format's parser reads back what was written. Must not know
what stands around them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allotrope.text.call_parts import BREAK, NOTHING, CalledTool, Json, NotWritable, either, sequence, text
from allotrope.text.formats.bodies import NamedParameters
from allotrope.text.formats.parameter_types import ToolSchemas, referred_schema, to_json, value_type

# Keywords that a string written as it comes could break.
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength", "not", "if")
# Keywords of a tool's whole schema that its properties, written one by one, cannot keep.
_OF_ALL = (
    *("$ref", "anyOf", "oneOf", "allOf", "not", "if", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)
# Keywords of a schema that is made of others.
_OF_BRANCHES = ("$ref", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = frozenset(
    (
        *(*_OF_STRINGS, *_OF_BRANCHES, *_OF_ALL, "then", "else", "required", "properties", "additionalProperties"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items", "prefixItems"),
        *("additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems", "uniqueItems"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
_ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
_MAX_CHOICES = 256


def parameters_of(body: NamedParameters, tool: CalledTool) -> list[Json]:
    """The parameters of a schema in its order; those that are not required may be left out."""
    schema = tool.schema or {}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if missing := [name for name in required if name not in properties]:
        raise NotWritable(f"the tool {tool.name} requires {missing[0]!r}, which is none of its properties")
    if lost := [keyword for keyword in _OF_ALL if keyword in schema]:
        raise NotWritable(f"{lost[0]} of the whole schema of the tool {tool.name} cannot be kept in its parameters")
    types = ToolSchemas([{"name": tool.name, "parameters": schema}])
    parts: list[Json] = []
    for name, inner in properties.items():
        if inner is False and name not in required:
            continue
        what = f"the parameter {name!r} of the tool {tool.name}"
        if not body.can_name(name):
            raise NotWritable(f"the name of {what} would not be read as it is written")
        values = _values(body, inner, schema, types.types(tool.name, name), what)
        ways = [_in_tags(body, kind, value) for kind, value in values]
        part = sequence(text(body.key[0]), _literals([name]), either(*ways), BREAK)
        parts.append(part if name in required else either(part, NOTHING))
    return parts


def _in_tags(body: NamedParameters, kind: str, value: Json) -> Json:
    """A value of `kind`, string or json, with all that stands around it behind the name."""
    kinds = {end_kind: end for end, end_kind in reversed(body.key_end)}
    line = "\n" if body.newline else ""
    begin = f"{kinds.get(kind, kinds.get('', ''))}{body.value}{line}"
    # Any text ends at the end's first place, with the newline before it or without.
    end = body.value_end if value["type"] == "any_text" else f"{line}{body.value_end}"
    return {"type": "tag", "begin": begin, "content": value, "end": end}


def _values(
    body: NamedParameters, inner: Any, root: Mapping[str, Any], types: frozenset[str], what: str
) -> list[tuple[str, Json]]:
    """(kind, value) of each way to write a value: text as it comes, or JSON. `types`: as the parser reads them."""
    if types and "string" not in types:
        return [("json", _json_value(inner, root, what))]
    branches = _branches(inner, root, what)
    listed = [value for branch in branches if branch.values is not None for value in branch.values]
    is_any = any(branch.values is None and "string" in branch.kinds for branch in branches)
    texts = [value for value in listed if isinstance(value, str)]
    rest: list[Json] = [branch.json() for branch in branches if branch.values is None and "string" not in branch.kinds]
    if any(kind == "json" for _, kind in body.key_end):
        # Tags say of which kind a value is.
        if others := [value for value in listed if not isinstance(value, str)]:
            rest.append({"enum": others})
        ways = [("json", _json_value(one, root, what)) for one in rest]
    else:
        ways, texts = [], [value if isinstance(value, str) else json.dumps(value) for value in listed]
        if is_any:
            free = {kind for branch in branches if branch.is_free for kind in branch.kinds} | {"string", "null"}
            if held := sorted(types - free):
                raise NotWritable(
                    f"{what} is any text, which may be read as one of the type {held[0]} that does not fit"
                )
        elif any(branch.values is None and branch.kinds & {"array", "object"} for branch in branches):
            raise NotWritable(f"{what} is one of some texts, or an array or object")
        fitting = {*map(_key_of, listed)}
        for value in texts:
            read = value if body.reads_as_it_comes("", types) else json.loads(to_json(value, types))
            if not is_any and _key_of(read) not in fitting:
                raise NotWritable(f"the value {value!r} of {what} would be read as {json.dumps(read)}")
    if lost := [value for value in texts if not is_any and not body.can_hold(value)]:
        raise NotWritable(f"the value {lost[0]!r} of {what} would not be read as it is written")
    if is_any:
        return [("string", {"type": "any_text", "excludes": list(body.implied_ends)}), *ways]
    if texts or (rest and not ways):
        written = [_literals(texts)] if texts else []
        written += [] if ways else [_json_value(one, root, what) for one in rest]
        ways.append(("string", either(*written)))
    if not ways:
        raise NotWritable(f"{what} has no value")
    return ways


@dataclass(frozen=True)
class _Branch:
    """One of the schemas that a value may fit. `kinds`: types that it may have. `values`: those that are listed."""

    schema: Mapping[str, Any]
    kinds: frozenset[str]
    values: tuple[Any, ...] | None = None

    @property
    def is_free(self) -> bool:
        """Whether every value of `kinds` fits."""
        return self.values is None and not _CONSTRAINTS.intersection(self.schema)

    def json(self) -> Json:
        """The schema of its values alone."""
        return {**self.schema, "type": sorted(self.kinds - ({"integer"} if "number" in self.kinds else set()))}

    def overlaps(self, other: _Branch) -> bool:
        """Whether a value may fit both."""
        if self.values is not None and other.values is not None:
            return bool({*map(_key_of, self.values)} & {*map(_key_of, other.values)})
        return bool(self.kinds & other.kinds)


def _branches(inner: Any, root: Mapping[str, Any], what: str) -> list[_Branch]:
    """The schemas without alternatives of which `inner` is made. Text keeps none of their keywords but the values."""
    found: list[_Branch] = []
    is_one = False
    pending: list[tuple[Any, frozenset[str]]] = [(inner, _ALL_TYPES)]
    for _ in range(_MAX_CHOICES):
        if not pending:
            break
        one, kinds = pending.pop(0)
        schema = one if isinstance(one, Mapping) else {}
        kinds &= _stated_types(schema)
        used = sorted(_CONSTRAINTS.intersection(schema))
        inherited = [keyword for keyword in _OF_BRANCHES if keyword in schema]
        if one is False or not kinds:
            continue
        if inherited:
            keyword = inherited[-1]
            if len(used) > 1 or (keyword == "allOf" and len(_listed(schema["allOf"], keyword)) > 1):
                raise NotWritable(f"{keyword} of {what} cannot be kept in it")
            is_one = is_one or keyword == "oneOf"
            is_list = keyword != "$ref"
            branches = _listed(schema[keyword], keyword) if is_list else [referred_schema(str(schema["$ref"]), root)]
            if None in branches:
                raise NotWritable(f"{keyword} of {what} refers to what is no definition")
            pending += [(branch, kinds) for branch in branches]
        elif "const" in schema or "enum" in schema:
            if len(used) > 1:
                raise NotWritable(f"{used[-1]} of {what} cannot be kept in it")
            choices = [schema["const"]] if "const" in schema else _listed(schema["enum"], "enum")
            values = tuple(value for value in choices if _type_of(value) in kinds)
            found.append(_Branch(schema, frozenset(map(_type_of, values)), values))
        elif "string" in kinds and (broken := [keyword for keyword in used if keyword in _OF_STRINGS]):
            raise NotWritable(f"{broken[0]} of {what} cannot be kept in it")
        else:
            found.append(_Branch(schema, kinds))
    if pending:
        raise NotWritable(f"the schema of {what} refers to too many others")
    if is_one and any(one.overlaps(other) for at, one in enumerate(found) for other in found[:at]):
        raise NotWritable(f"oneOf of {what} cannot be kept in it")
    return found


def _stated_types(schema: Mapping[str, Any]) -> frozenset[str]:
    stated = schema.get("type", list(_ALL_TYPES))
    types = _ALL_TYPES.intersection([stated] if isinstance(stated, str) else _listed(stated, "type"))
    return types | {"integer"} if "number" in types else types


def _listed(value: Any, keyword: str) -> list[Any]:
    if not isinstance(value, list):
        raise NotWritable(f"{keyword} is no list")
    return value


def _type_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return value_type(value)


def _key_of(value: Any) -> str:
    """A text that two JSON values have in common if they are equal."""
    return json.dumps(value, sort_keys=True)


def _json_value(inner: Any, root: Mapping[str, Any], what: str) -> Json:
    """A value that is JSON of the schema `inner`, which refers to definitions of `root`."""
    schema = {**(inner if isinstance(inner, Mapping) else {}), **definitions_of(root)}
    pending: list[Any] = [schema]
    while pending:
        one = pending.pop()
        pending += one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ()
        reference = one.get("$ref") if isinstance(one, Mapping) else None
        # Others mean another place in the schema of the value than in that of the tool.
        if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
            raise NotWritable(f"{reference!r} in {what} refers to what is no definition")
    return {"type": "json_schema", "json_schema": schema}


def _literals(texts: Sequence[str]) -> Json:
    """One of `texts`, in tokens that are text: the text of a special token among them does not become this token."""
    pattern = "|".join(map(_pattern, filter(None, texts)))
    written: list[Json] = [{"type": "regex", "pattern": pattern}] if pattern else []
    return either(*written, *([] if all(texts) else [NOTHING]))


def _pattern(text: str) -> str:
    """`text` as a regular expression, on one line."""
    return re.sub(r"\\?([\x00-\x1f\x7f])", lambda found: f"\\x{ord(found[1]):02x}", re.escape(text))


def definitions_of(schema: Mapping[str, Any]) -> Json:
    """What the schemas in it may refer to."""
    return {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
