"""The command line as a whole. Adding a command is one function and one row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from allotrope.commands.benchmarks import bench_latency, bench_serve, bench_throughput
from allotrope.commands.chat import chat
from allotrope.commands.compat import compat
from allotrope.commands.families import families
from allotrope.commands.flags import FlagCommand, expand_configs
from allotrope.commands.generate import generate
from allotrope.commands.plan import plan
from allotrope.commands.serve import serve
from allotrope.commands.verify import verify
from allotrope.commands.version import version

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "generate": generate,
    "chat": chat,
    "plan": plan,
    "verify": verify,
    "families": families,
    "compat": compat,
    "version": version,
}
BENCHMARKS: dict[str, Callable[..., None]] = {
    "latency": bench_latency,
    "throughput": bench_throughput,
    "serve": bench_serve,
}


def build_app() -> typer.Typer:
    """The application with every command of the tables above."""
    # Plain help: the boxes of rich cut long flags off at 80 columns.
    app = typer.Typer(
        rich_markup_mode=None,
        help="An engine for hybrid language models, with an OpenAI-compatible server.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    bench = typer.Typer(help="Measure latency and throughput.", rich_markup_mode=None, no_args_is_help=True)
    for group, commands in ((app, COMMANDS), (bench, BENCHMARKS)):
        for name, command in commands.items():
            group.command(name, cls=FlagCommand)(expand_configs(command))
    app.add_typer(bench, name="bench")
    app.callback()(_root)
    return app


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (any command).")] = False,
) -> None:
    """The flags before the command; `--debug` is read by `allotrope.cli.main`."""
