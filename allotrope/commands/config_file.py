"""`--config FILE`: a YAML or JSON file with values for flags that the command line leaves out.

Owns the reading of the file and the check of its keys by a command's flags. It must not know the meaning of an option.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from allotrope.commands.foreign_flags import plain_value
from allotrope.commands.refusals import refusal
from allotrope.config import JSON_OPTIONS
from allotrope.errors import ConfigError


def use_config_file(ctx: typer.Context, path: str | None, hints: Mapping[str, Any]) -> str | None:
    """Make the file's values the defaults of the command's flags, and return `path`.

    `hints`: type of each parameter of the command. The command line overrides the environment, and the environment
    overrides the file. Raises `typer.BadParameter` with every key and value that the command does not accept.
    """
    if path is None:
        return None
    defaults: dict[str, Any] = {}
    reasons = []
    for key, value in read_mapping(path).items():
        try:
            name, default = _option_value(ctx, str(key), value, hints)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if name in defaults:
            reasons.append(f"{key}: the option is there under two names")
        if default is not None:
            defaults[name] = default
    if reasons:
        raise typer.BadParameter(f"{path}: " + "; ".join(reasons) + ".")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _option_value(ctx: typer.Context, key: str, value: Any, hints: Mapping[str, Any]) -> tuple[str, Any]:
    """The parameter of `key` and its value; None if the value is null. Raises `ValueError` for a wrong key or value."""
    flag = "--" + key.replace("_", "-").removeprefix("--")
    params = {name: p for p in ctx.command.params for name in (*p.opts, *p.secondary_opts)}
    # The model is an argument, and its name has no dashes.
    param: Any = params.get(key if key == "model" else flag)
    if param is None or flag == "--config":
        raise ValueError(f"{key}: {_unknown(flag, list(params))}")
    if value is None:
        return param.name, None
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise ValueError(f"{key}={value!r}: true or false is needed")
        return param.name, value != (flag in param.secondary_opts)
    if isinstance(value, Mapping) and param.name in JSON_OPTIONS:
        value = json.dumps(value)
    if getattr(param, "multiple", False):
        value = value if isinstance(value, list) else [value]
    elif isinstance(value, list | dict):
        raise ValueError(f"{key}={json.dumps(value, default=str)}: one value is needed")
    for item in value if isinstance(value, list) else [value]:
        # YAML reads on, 1.10 and 2026-01-01 as a boolean, a number and a date.
        if _is_text(hints[param.name]) and not isinstance(item, str):
            raise ValueError(f"{key}={item!r}: a text is needed; put it in quotes")
        if isinstance(item, bool):
            raise ValueError(f"{key}={item!r}: a number is needed")
    try:
        if isinstance(value, str):
            value = plain_value(param.name, value)
        param.process_value(ctx, value)
    except typer.BadParameter as error:
        raise ValueError(f"{key}={value!r}: {error.message.removeprefix('Value error, ').rstrip('.')}") from error
    return param.name, value


def _is_text(hint: Any) -> bool:
    """Whether a parameter of this type is plain text."""
    if get_origin(hint) in (Annotated, Union, UnionType, list):
        return any(_is_text(inner) for inner in get_args(hint))
    return hint in (str, Path) or get_origin(hint) is Literal


def _unknown(flag: str, known: list[str]) -> str:
    if reason := refusal(flag):
        return reason
    near = get_close_matches(flag, [name for name in known if name.startswith("--")], n=1)
    return "there is no such option" + (f", but there is {near[0].removeprefix('--')}" if near else "")


def read_mapping(path: str) -> dict[str, Any]:
    """The mapping in the file, which is JSON if its name ends in .json, else YAML. Raises `typer.BadParameter`."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}.") from error
    try:
        mapping = json.loads(text, object_pairs_hook=_without_repeats) if path.endswith(".json") else _read_yaml(text)
    except ValueError as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise typer.BadParameter(f"{path} holds a {type(mapping).__name__}; lines such as `port: 8001` are needed.")
    return mapping


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key} is there twice")
        mapping[key] = value
    return mapping


def _read_yaml(text: str) -> Any:
    """The value of the YAML in `text`. Raises `ValueError` for invalid YAML and for a repeated key."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ConfigError("a YAML file needs PyYAML. Run: pip install 'allotrope[cli]'") from error

    class Loader(yaml.SafeLoader):
        """Refuses repeated keys. YAML's own loader would take the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            pairs = [(self.construct_object(key, deep=True), None) for key, _ in node.value]
            _without_repeats(pairs)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
