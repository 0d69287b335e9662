"""Makes a `Grammar` of the fields that ask for structured output. Must not know how a grammar is compiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.request import Grammar, GrammarKind
from allotrope.server.protocol import StructuredFields
from allotrope.server.values import describe_value

# Options of other engines that may stand beside the grammar, with the values that ask for our behaviour.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
}


def grammar_of(body: StructuredFields) -> Grammar | None:
    """The grammar that a body asks for, in whatever field. Raises `InvalidRequest` if it asks for two, or for none that
    there is.
    """
    found: dict[str, Grammar] = {}
    for name, read in _READERS.items():
        value = getattr(body, name)
        grammar = None if value is None else read(value, name)
        if grammar is not None:
            found[name] = grammar
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{first} and {second} both say what the answer has to be; set one.", second)
    return next(iter(found.values()), None)


def grammar_of_format(format: Any, param: str) -> Grammar | None:
    """The grammar of a `response_format`, None for plain text. `param`: the field's name in refusals."""
    if not isinstance(format, dict):
        raise InvalidRequest(f"{param}={describe_value(format)} is not valid: a JSON object is needed.", _field(param))
    match format.get("type"):
        case "text":
            _only(format, (), param)
            return None
        case "json_object":
            _only(format, ("schema",), param)
            schema = format.get("schema")
            return Grammar("json_object", param=_field(param)) if schema is None else _schema(schema, f"{param}.schema")
        case "json_schema":
            _only(format, ("json_schema",), param)
            inner = format.get("json_schema")
            if not isinstance(inner, dict):
                raise InvalidRequest(f"{param} needs a json_schema: an object with a name and a schema.", _field(param))
            _only(inner, ("name", "description", "schema", "strict"), f"{param}.json_schema", typed=False)
            for name, kind, needed in (
                ("name", str, "text"),
                ("description", str, "text"),
                ("strict", bool, "boolean"),
            ):
                if inner.get(name) is not None and not isinstance(inner[name], kind):
                    given = describe_value(inner[name])
                    raise InvalidRequest(f"{param}.json_schema.{name}={given}; a {needed} is needed.", _field(param))
            if inner.get("schema") is None:
                raise InvalidRequest(f"{param}.json_schema needs a schema.", _field(param))
            # Strict or not, the schema holds.
            return _schema(inner["schema"], param)
        case "structural_tag":
            return Grammar("structural_tag", _dump(format, param), param=_field(param))
        case other:
            raise InvalidRequest(
                f"{param}.type={describe_value(other)} is not supported. Allowed: 'text', 'json_object', 'json_schema' "
                "or 'structural_tag'.",
                _field(param),
            )


def _structured_outputs(value: Any, param: str) -> Grammar | None:
    given = {name: one for name, one in value.items() if one is not None and name not in _NEUTRAL}
    for name, one in value.items():
        if one is not None and name in _NEUTRAL and one not in _NEUTRAL[name]:
            raise InvalidRequest(f"{param}.{name}={describe_value(one)} is not supported; leave it out.", _field(param))
    if unknown := set(given) - set(_KINDS):
        raise InvalidRequest(
            f"{param} has the unknown field {describe_value(min(unknown))}. Allowed: {', '.join(_KINDS)}.",
            _field(param),
        )
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise InvalidRequest(
            f"{param} has {len(given)} grammars; exactly one of {', '.join(_KINDS)} is needed.", _field(param)
        )
    ((name, one),) = given.items()
    return _KINDS[name](one, f"{param}.{name}")


def _schema(value: Any, param: str) -> Grammar:
    """A schema as an object, or as its JSON text."""
    if isinstance(value, str):
        return Grammar("json_schema", value, param=_field(param))
    if not isinstance(value, dict | bool):
        raise InvalidRequest(f"{param}={describe_value(value)} is not valid: a JSON schema is needed.", _field(param))
    return Grammar("json_schema", _dump(value, param), param=_field(param))


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise InvalidRequest(f"{param} is not valid: a list of at least one string is needed.", _field(param))
    return Grammar("choice", _dump(value, param), param=_field(param))


def _text(kind: GrammarKind) -> Callable[[Any, str], Grammar]:
    def read(value: Any, param: str) -> Grammar:
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{param}={describe_value(value)} is not valid: a text is needed.", _field(param))
        return Grammar(kind, value, param=_field(param))

    return read


def _tag(value: Any, param: str) -> Grammar:
    if isinstance(value, str):
        return Grammar("structural_tag", value, param=_field(param))
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param}={describe_value(value)} is not valid: a JSON object is needed.", _field(param))
    return Grammar("structural_tag", _dump(value, param), param=_field(param))


def _object(value: Any, param: str) -> Grammar:
    if value is not True:
        raise InvalidRequest(f"{param}={describe_value(value)} is not valid: true is needed.", _field(param))
    return Grammar("json_object", param=_field(param))


def _dump(value: Any, param: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deep.", _field(param)) from error


def _field(path: str) -> str:
    """The request's field that `path` leads into."""
    return path.partition(".")[0]


def _only(value: Mapping[str, Any], names: tuple[str, ...], param: str, *, typed: bool = True) -> None:
    allowed = (*names, "type") if typed else names
    for name, one in value.items():
        if name not in allowed and one is not None:
            raise InvalidRequest(
                f"{param} has the unknown field {describe_value(name)}. Allowed: {', '.join(allowed)}.", _field(param)
            )


_KINDS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("lark"),
    "json_object": _object,
    "structural_tag": _tag,
}
_READERS: dict[str, Callable[[Any, str], Grammar | None]] = {
    "response_format": grammar_of_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("lark"),
}
