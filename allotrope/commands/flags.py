"""Command-line flags made from the fields of config dataclasses.

Owns how a field becomes a flag and how a command line is read back into the dataclass. It must not know what any
option means.
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

# Fields whose flag also reads 32k, 1.5GiB and the like, beside those named *_bytes.
_COUNTS = ("max_model_len", "max_num_batched_tokens", "memory")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ENVIRONMENT = {"api_key": "ALLOTROPE_API_KEY", "metrics_api_key": "ALLOTROPE_METRICS_API_KEY"}
# A field that may be given several times.
_LIST = tuple[str, ...]
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtKMGT]?)(iB|B|)")


def parse_size(text: str | int) -> int:
    """The number that `text` writes: digits, perhaps a fraction, perhaps a suffix.

    k, m, g, t and kB, MB, GB, TB are powers of 1000; K, M, G, T and KiB, MiB, GiB, TiB powers of 1024. Raises
    `typer.BadParameter` for anything else and for a number that is not whole.
    """
    # A default comes through here as the number it is.
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number such as 4096, 32k, 32K or 8GiB.")
    digits, letter, unit = match[1], match[2], match[3]
    binary = unit == "iB" or (not unit and letter.isupper())
    value = float(digits) * (1024 if binary else 1000) ** " kmgt".index(letter.lower() or " ")
    if value != int(value):
        raise typer.BadParameter(f"{text!r} is {value}, which is not a whole number.")
    return int(value)


def read_list(values: Sequence[str]) -> tuple[str, ...]:
    """The texts that `values` give: each is one, or a JSON list of some. Raises `typer.BadParameter`."""
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
    """`command` with each parameter that is a config dataclass replaced by one flag per field.

    A field `model` becomes the positional argument MODEL; where the parameter is `Config | None`, MODEL may be left
    out and the parameter is then None. Booleans get --name/--no-name, `Literal` fields their choices. `--config FILE`
    gives values to flags that are left out.
    """
    hints = get_type_hints(command, include_extras=True)
    configs = {name: config for name, hint in hints.items() if (config := _config_of(hint)) is not None}
    positional: list[inspect.Parameter] = []
    flags: list[inspect.Parameter] = []
    for name, config in configs.items():
        optional = hints[name] != config
        for parameter in _parameters(config, model_optional=optional):
            (positional if parameter.name == "model" else flags).append(parameter)
    given = inspect.signature(command).parameters.items()
    own = [p.replace(annotation=hints[name], kind=_KEYWORD) for name, p in given if name not in configs]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        # What the file says has become the values of the other parameters.
        values.pop("config_file", None)
        for name, config in configs.items():
            taken = {field.name: values.pop(field.name) for field in dataclasses.fields(config)}
            for field_name, hint in get_type_hints(config).items():
                if hint == _LIST:
                    taken[field_name] = read_list(taken[field_name] or [])
            values[name] = None if taken.get("model", "") is None else config(**taken)
        command(**values)

    parameters = [*positional, *own, *flags]
    if configs:
        parameters.append(_config_file({p.name: p.annotation for p in parameters}))
    expanded.__dict__["__signature__"] = inspect.Signature(parameters)
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    return expanded


def _config_file(hints: dict[str, Any]) -> inspect.Parameter:
    """The flag `--config`, which is read before all others. `hints`: types of the command's parameters."""

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
    made = []
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
        made.append(inspect.Parameter(field.name, _KEYWORD, default=default, annotation=annotation))
    return made


def _option(field: dataclasses.Field[Any], hint: Any, panel: str) -> Any:
    """The typer option of one config field."""
    names = flag_names(field)
    more: dict[str, Any] = {}
    if hint is bool:
        opposites = [f" /{name}" for name in OPPOSITES.get(field.name, ())]
        names = [f"{names[0]}/--no-{names[0][2:]}", *names[1:], *opposites]
    elif field.name.endswith("_bytes") or field.name in _COUNTS:
        more = {"parser": parse_size, "metavar": "SIZE"}
    return typer.Option(
        *names, help=field.metadata["help"], rich_help_panel=panel, envvar=_ENVIRONMENT.get(field.name), **more
    )


def flag_names(field: dataclasses.Field[Any]) -> list[str]:
    """Every spelling of a field's flag, the one that help shows first: --its-name, its short form, aliases."""
    short = field.metadata.get("short")
    return [f"--{field.name.replace('_', '-')}", *([short] if short else []), *ALIASES.get(field.name, ())]


class FlagCommand(HelpCommand):
    """A command that also reads --snake_case, and refuses another engine's flags by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name: p for p in self.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
        end = args.index("--") if "--" in args else len(args)
        head: list[str] = []
        # The parameter whose value the next argument is.
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
        """`arg` with the name of its flag in kebab case, if that names a flag; else as it is."""
        flag, equals, value = arg.partition("=")
        kebab = flag.replace("_", "-")
        if flag.startswith("--") and "_" in flag and (kebab in known or refusal(kebab)):
            return kebab + equals + value
        return arg


def _repeat_flags(args: list[str], lists: set[str], with_value: set[str]) -> list[str]:
    """`args` with `--name a b` written as `--name a --name b`, for flags in `lists`.

    Only after a first argument that is no flag's: before it, the next one may be meant to be that. `with_value`: flags
    that take a value.
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
