"""Values of a dataclass's fields held to their annotations, for callers that no type checker reads.

Owns what each annotation takes and how a refusal words it. It must not know which class it checks, nor which error a
refusal becomes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class FieldType(NamedTuple):
    """`takes`: whether a value is of the type. `needs`: what a refusal says behind the value."""

    takes: Callable[[Any], bool]
    needs: str


_ONE = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", NoneType: "None"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}
_TAKES: dict[Any, Callable[[Any], bool]] = {
    # NumPy's numbers are numbers; True and False are integers to Python.
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
}


def field_types(cls: type, *, lists: bool = False) -> dict[str, FieldType]:
    """The type of each field of the dataclass `cls`. `lists`: where a tuple is annotated, a list is taken too."""
    hints = get_type_hints(cls)
    return {field.name: _field_type(hints[field.name], lists) for field in dataclasses.fields(cls)}


def _field_type(hint: Any, lists: bool) -> FieldType:
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = [_member(one, lists) for one in members]
    if any(get_origin(one) is Literal for one in members):
        needs = f"allowed: {', '.join(wanted for _, wanted in types)}"
    else:
        needs = f"{' or '.join(wanted for _, wanted in types)} is needed"
    return FieldType(types[0][0] if len(types) == 1 else lambda value: any(takes(value) for takes, _ in types), needs)


def _member(hint: Any, lists: bool) -> tuple[Callable[[Any], bool], str]:
    """What `hint` takes, and its name: a number, text, bool, class or `Literal` of texts, a tuple or dict of such."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        # Only texts are compared: == of an array is an array.
        return lambda value: isinstance(value, str) and value in arguments, ", ".join(map(repr, arguments))
    if origin is tuple:
        of_item, sequences = _TAKES[arguments[0]], (tuple, list) if lists else (tuple,)
        wanted = f"a {' or '.join(one.__name__ for one in sequences)} of {_SEVERAL[arguments[0]]}"
        return lambda value: isinstance(value, sequences) and all(map(of_item, value)), wanted
    if origin is dict:
        of_key, of_value = (_TAKES[one] for one in arguments)
        wanted = f"a dict from {_SEVERAL[arguments[0]]} to {_SEVERAL[arguments[1]]}"
        return (
            lambda value: isinstance(value, dict) and all(map(of_key, value)) and all(map(of_value, value.values())),
            wanted,
        )
    if hint in _TAKES:
        return _TAKES[hint], _ONE[hint]
    return lambda value: isinstance(value, hint), f"a {hint.__name__}"
