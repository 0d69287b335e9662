"""Objects within a body whose unknown fields have no effect: they are named to the client, as a body's own are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class OpenModel(BaseModel):
    """An object that clients send back, with fields that other servers add."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False, protected_namespaces=())


def kind_of(value: Any) -> str | None:
    """The `type` of an object of a union, before and after it is read."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def unknown_within(value: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields within `value` that no model declares and that are not null."""
    if isinstance(value, BaseModel):
        for name, extra in (value.model_extra or {}).items():
            if extra is not None:
                yield f"{path}.{name}" if path else name
        for name in type(value).model_fields:
            yield from unknown_within(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from unknown_within(item, f"{path}[{index}]")
