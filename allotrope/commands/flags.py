"""Turns the fields of config dataclasses into command-line flags.

Owns the conversion of fields to flags, and of a command line back to the dataclass. It must not know the meaning of an
option.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Container, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer

from allotrope.commands.config_file import use_config_file
from allotrope.commands.foreign_flags import ALIASES, OPPOSITES, plain_value
from allotrope.commands.help_text import GENERAL, HelpCommand, heading_of
from allotrope.commands.refusals import refusal

# Flags of these fields, and of fields named *_bytes, accept sizes such as 32k and 1.5GiB.
_COUNTS = ("max_model_len", "max_num_batched_tokens", "memory", "context")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ENVIRONMENT = {"api_key": "ALLOTROPE_API_KEY", "metrics_api_key": "ALLOTROPE_METRICS_API_KEY"}
# The type of a field whose flag may be repeated.
_LIST = tuple[str, ...]
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtKMGT]?)(iB|B|)")


def parse_size(text: str | int) -> int:
    """The number in `text`: digits with an optional fraction and an optional suffix.

    k, m, g, t and kB, MB, GB, TB are powers of 1000; K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024. Raises
    `typer.BadParameter` for other text, and for results that are fractional or infinite.
    """
    # typer passes a default as an int.
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number such as 4096, 32k, 32K or 8GiB.")
    digits, letter, unit = match[1], match[2], match[3]
    binary = unit == "iB" or (not unit and letter.isupper())
    value = float(digits) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " ")
    if not value.is_integer():
        raise typer.BadParameter(f"{text!r} is {value}, which is not a whole number.")
    return int(value)


def read_list(values: Sequence[str]) -> tuple[str, ...]:
    """The texts in `values`, each of which is a text or a JSON list of texts. Raises `typer.BadParameter`."""
    texts: list[str] = []
    for value in values:
        if not value.startswith("["):
            texts.append(value)
            continue
        try:
            listed = json.loads(value)
        except ValueError as error:
            raise typer.BadParameter(f"{value!r} begins like a JSON list and is none: {error}.") from None
        if not all(isinstance(item, str) for item in listed):
            raise typer.BadParameter(f"{value!r} must hold texts only.")
        texts += listed
    return tuple(texts)


def expand_configs(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with one flag for each field of its parameters that are config dataclasses.

    A field `model` becomes the positional argument MODEL. If the parameter is `Config | None`, MODEL is optional, and
    the parameter is None without it. Booleans get --name/--no-name, `Literal` fields their choices. `--config FILE`
    gives values to flags that the command line leaves out.
    """
    hints = get_type_hints(command, include_extras=True)
    configs = {name: config for name, hint in hints.items() if (config := _config_of(hint)) is not None}
    positional: list[inspect.Parameter] = []
    flags: list[inspect.Parameter] = []
    for name, config in configs.items():
        optional = hints[name] != config
        for parameter in _parameters(config, model_optional=optional):
            (positional if parameter.name == "model" else flags).append(parameter)
    signature = inspect.signature(command).parameters.items()
    own = [p.replace(annotation=hints[name], kind=_KEYWORD) for name, p in signature if name not in configs]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        # The file's values are already the defaults of the other parameters.
        values.pop("config_file", None)
        for name, config in configs.items():
            options = {field.name: values.pop(field.name) for field in dataclasses.fields(config)}
            for field_name, hint in get_type_hints(config).items():
                if hint == _LIST:
                    options[field_name] = read_list(options[field_name] or [])
            values[name] = None if options.get("model", "") is None else config(**options)
        command(**values)

    parameters = [*positional, *own, *flags]
    if configs:
        parameters.append(_config_file({p.name: p.annotation for p in parameters}))
    expanded.__dict__["__signature__"] = inspect.Signature(parameters)
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def _config_file(hints: dict[str, Any]) -> inspect.Parameter:
    """The flag `--config`. typer reads it before all others. `hints`: types of the command's parameters."""

    def read(ctx: typer.Context, value: str | None) -> str | None:
        return use_config_file(ctx, value, hints)

    info = typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel=GENERAL,
        help="YAML or JSON file of options by name; flags on the command line win.",
        is_eager=True,
        callback=read,
    )
    return inspect.Parameter("config_file", _KEYWORD, default=None, annotation=Annotated[str | None, info])


def _config_of(hint: Any) -> type | None:
    """The dataclass in `Config` or `Config | None`; None for any other type."""
    inner = [a for a in get_args(hint) if a is not type(None)] if get_origin(hint) in (Union, UnionType) else [hint]
    config = inner[0]
    return config if len(inner) == 1 and isinstance(config, type) and dataclasses.is_dataclass(config) else None


def _parameters(config: type, *, model_optional: bool) -> list[inspect.Parameter]:
    hints = get_type_hints(config)
    parameters = []
    hint: Any
    for field in dataclasses.fields(config):
        default: Any = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if field.name == "model":
            info = typer.Argument(help=field.metadata["help"], metavar="MODEL", show_default=False)
            hint = (str | None) if model_optional else str
            default = None if model_optional else default
        else:
            info = _option(field, hints[field.name], heading_of(field.name, config.__name__))
            hint = list[str] if hints[field.name] == _LIST else hints[field.name]
            default = list(default) if isinstance(default, tuple) else default
        annotation: Any = Annotated[hint, info]
        parameters.append(inspect.Parameter(field.name, _KEYWORD, default=default, annotation=annotation))
    return parameters


def _option(field: dataclasses.Field[Any], hint: Any, panel: str) -> Any:
    """The typer option of one config field."""
    names = flag_names(field)
    settings: dict[str, Any] = {}
    if hint is bool:
        opposites = [f" /{name}" for name in OPPOSITES.get(field.name, ())]
        names = [f"{names[0]}/--no-{names[0][2:]}", *names[1:], *opposites]
    elif field.name.endswith("_bytes") or field.name in _COUNTS:
        settings = {"parser": parse_size, "metavar": "SIZE"}
    return typer.Option(
        *names, help=field.metadata["help"], rich_help_panel=panel, envvar=_ENVIRONMENT.get(field.name), **settings
    )


def flag_names(field: dataclasses.Field[Any]) -> list[str]:
    """Every spelling of a field's flag: --its-name, its short form, aliases. Help shows the first."""
    short = field.metadata.get("short")
    return [f"--{field.name.replace('_', '-')}", *([short] if short else []), *ALIASES.get(field.name, ())]


class FlagCommand(HelpCommand):
    """A command that also accepts --snake_case, and refuses another engine's flags with a reason."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name: p for p in self.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
        end = args.index("--") if "--" in args else len(args)
        head: list[str] = []
        # The parameter that reads the next argument as its value.
        awaiting: Any = None
        for arg in args[:end]:
            if awaiting is not None:
                head.append(plain_value(awaiting.name, arg))
                awaiting = None
            else:
                flag, equals, value = self._spelled(arg, known).partition("=")
                param = known.get(flag)
                if param is None:
                    self._refuse_foreign(flag, known)
                elif equals:
                    value = plain_value(param.name, value)
                elif flag not in param.secondary_opts and not getattr(param, "is_flag", True):
                    awaiting = param
                head.append(flag + equals + value)
        with_value = {name for p in self.params if not getattr(p, "is_flag", True) for name in p.opts}
        lists = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        return super().parse_args(ctx, [*_repeat_flags(head, lists, with_value), *args[end:]])

    @staticmethod
    def _refuse_foreign(flag: str, known: Container[str]) -> None:
        reason = refusal(flag)
        whole, dot, _ = flag.replace("_", "-").partition(".")
        if dot and whole in known:
            reason = f"write the whole value after {whole}, as one JSON object"
        if reason:
            typer.echo(f"allotrope: error: {flag} is not an option of allotrope: {reason}.", err=True)
            raise typer.Exit(2)

    @staticmethod
    def _spelled(arg: str, known: Container[str]) -> str:
        """`arg` with its flag in kebab case, if that is a known flag; else unchanged."""
        flag, equals, value = arg.partition("=")
        kebab = flag.replace("_", "-")
        if flag.startswith("--") and "_" in flag and (kebab in known or refusal(kebab)):
            return kebab + equals + value
        return arg


def _repeat_flags(args: list[str], lists: set[str], with_value: set[str]) -> list[str]:
    """Rewrite `--name a b` as `--name a --name b`, for flags in `lists`.

    This starts after the first positional argument: before it, `b` may be that argument. `with_value`: flags that
    take a value.
    """
    spread: list[str] = []
    flag, value_next, has_argument = "", False, False
    for arg in args:
        if value_next:
            value_next = False
        elif arg.startswith("-") and arg != "-":
            name, equals, _ = arg.partition("=")
            value_next = name in with_value and not equals
            flag = name if name in lists and not equals else ""
        elif flag and has_argument:
            spread.append(flag)
        else:
            flag, has_argument = "", True
        spread.append(arg)
    return spread
