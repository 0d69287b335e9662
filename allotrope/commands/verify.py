"""`allotrope verify`: is the engine right about a model?

Exit status 0: it is. 1: it is not. 2: nothing could be compared.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from allotrope.commands.flags import expand_configs
from allotrope.config import EngineConfig
from allotrope.errors import AllotropeError
from allotrope.verify.options import VerifyOptions

if TYPE_CHECKING:
    from rich.console import Console


def status_2(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose own errors end it with status 2, for 1 says that the model is wrong."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            command(**values)
        except AllotropeError as error:
            if "--debug" in sys.argv:
                raise
            typer.echo(f"allotrope: error: {error}", err=True)
            raise typer.Exit(2) from error

    return run


def say(console: Console, lines: list[str]) -> None:
    """Print lines as they are: no colours, no wrapping."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _sweep(engine: EngineConfig, options: VerifyOptions) -> None:
    from rich.console import Console

    from allotrope.verify.sweep import sweep, sweep_lines

    with Console(stderr=True).status("starting") as status:
        found = sweep(engine, options.new_tokens, status.update)
    print("\n".join(sweep_lines(found)))
    if options.json is not None:
        options.json.write_text(
            json.dumps([{**dataclasses.asdict(one), "wrong": one.wrong} for one in found], indent=1)
        )
    if any(one.wrong for one in found):
        raise typer.Exit(1)


@status_2
@expand_configs
def verify(engine: EngineConfig, options: VerifyOptions) -> None:
    """Hold the engine against stored outputs or Transformers, in every way it can cut its work. Exit status 0: it is
    right; 1: it is wrong; 2: nothing could be compared.

    Outputs beside MODEL (expected.safetensors, manifest.json) are used where there are some. Otherwise Transformers
    runs the same checkpoint: logits at all positions, and layer by layer to the first that diverges. Both run in
    float32 unless --dtype says otherwise. The modes set batch, chunk and memory sizes themselves.
    """
    from rich.console import Console

    from allotrope.verify.report import layer_table, mode_table, write_json, write_plot
    from allotrope.verify.run import verify as run

    if options.sweep:
        _sweep(engine, options)
        return
    with Console(stderr=True).status("starting") as status:
        report = run(engine, options, status.update)
    # Narrower, the tables would lose their figures; a pipe has no width of its own.
    console = Console()
    console.width = max(console.width, 100)
    say(console, report.heading())
    console.print(mode_table(report))
    say(console, report.legend())
    if report.layers is not None:
        print(f"\nrelative error of hidden states, layer by layer; allowed: {max(report.layers.limits):.0e}")
        console.print(layer_table(report.layers))
    if options.json is not None:
        write_json(options.json, report)
        print(f"wrote {options.json}")
    if options.plot is not None:
        write_plot(options.plot, report)
        print(f"wrote {options.plot}")
    say(console, report.verdict())
    if not report.passed:
        raise typer.Exit(1)
