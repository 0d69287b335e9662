"""`allotrope families`: what attention and the operations run by, of this installation or of one model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from allotrope.config import DType, EngineConfig, KVCacheDType, StateDType, option
from allotrope.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from allotrope.commands.model_backends import ModelBackends

# In fewer columns a table of five would break words.
_TABLE_WIDTH = 80


def _engine_option(name: str) -> Any:
    """The engine's own option of that name."""
    (field,) = (one for one in dataclasses.fields(EngineConfig) if one.name == name)
    return dataclasses.field(default=field.default, metadata=field.metadata)


@dataclass(frozen=True, kw_only=True)
class FamiliesOptions:
    """Of which chip, under which options of the engine, and how it is shown."""

    chip: str | None = option(
        "Of a model: the chip, by its name or its architecture, such as sm_90 or gfx942; default: this one.", None
    )
    json: bool = option("Print JSON.", False)
    device: str = _engine_option("device")
    dtype: DType = _engine_option("dtype")
    kv_cache_dtype: KVCacheDType = _engine_option("kv_cache_dtype")
    state_dtype: StateDType = _engine_option("state_dtype")
    quantized_weights: Literal["auto", "keep", "dequantize"] = _engine_option("quantized_weights")
    tensor_parallel_size: int = _engine_option("tensor_parallel_size")
    data_parallel_size: int = _engine_option("data_parallel_size")
    enable_expert_parallel: bool = _engine_option("enable_expert_parallel")
    attention_backend: str | None = _engine_option("attention_backend")
    op_backend: str | None = _engine_option("op_backend")
    hf_overrides: str | None = _engine_option("hf_overrides")
    revision: str | None = _engine_option("revision")


def families(
    options: FamiliesOptions,
    path: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Show what would run this model; its config alone is read."),
    ] = None,
) -> None:
    """List attention families and operations with their backends, best first, and the architectures made of them.

    With a MODEL: the backend of each of its attentions and operations, and why better-ranked ones are passed over.
    """
    import json

    named = path if model is None else model
    if named is None:
        _refuse_options_of_a_model(options)
        _installation(options.json)
        return
    from allotrope.commands.model_backends import model_backends

    given = dataclasses.asdict(options)
    chip, as_json = given.pop("chip"), given.pop("json")
    found = model_backends(EngineConfig(model=named, **given), chip)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        _print_model(found)


def _refuse_options_of_a_model(options: FamiliesOptions) -> None:
    """Raise ConfigError for options that change what runs a model, where none is named."""
    fields = [field for field in dataclasses.fields(options) if field.name != "json"]
    given = [
        f"{one.name}={getattr(options, one.name)!r}" for one in fields if getattr(options, one.name) != one.default
    ]
    if given:
        raise ConfigError(
            f"bad options: {', '.join(given)}; without a model nothing reads that. Name one with --model, or leave it "
            f"out."
        )


def _installation(as_json: bool) -> None:
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from allotrope.commands.catalogue import catalogue

    found = catalogue()
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return
    tables: list[Table] = []
    for title, entries in (("family", found.families), ("operation", found.operations)):
        about = Table(title, "backends", "what it is")
        for entry in entries:
            about.add_row(entry.name, ", ".join(entry.backends), escape(entry.about))
        tables.append(about)
    models = Table("architecture", "families")
    for architecture, names in found.architectures.items():
        models.add_row(architecture, ", ".join(names))
    Console().print(*tables, models)


def _print_model(found: ModelBackends) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console()
    console.print(f"{found.model}: {found.architecture} on {found.chip}, {found.dtype}", highlight=False, markup=False)
    if console.width < _TABLE_WIDTH:
        for one in found.backends:
            console.print(f"- {one}", highlight=False, markup=False)
    else:
        # A value that is longer than its column goes on in the next line: none is cut off.
        shape, others = (Column(title, overflow="fold") for title in ("shape", "why not the others"))
        table = Table("layer type or operation", shape, "layers", "backend", others)
        for one in found.backends:
            passed = [f"{name}: {', '.join(reasons)}" for name, reasons in one.passed_over.items()]
            cells = (one.op, " ".join(one.numbers), one.layers, one.backend, "; ".join([*passed, *one.fallbacks]))
            table.add_row(*map(escape, cells))
        console.print(table)
    for line in found.remarks:
        console.print(line, highlight=False, markup=False)
