"""The whole command line. A new command is one function and one row here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from allotrope.commands.batch import batch
from allotrope.commands.benchmarks import bench_latency, bench_serve, bench_throughput
from allotrope.commands.chat import chat
from allotrope.commands.compat import compat
from allotrope.commands.eval import evaluate
from allotrope.commands.families import families
from allotrope.commands.flags import FlagCommand, expand_configs
from allotrope.commands.generate import generate
from allotrope.commands.help_text import HelpGroup
from allotrope.commands.plan import plan
from allotrope.commands.serve import serve
from allotrope.commands.verify import verify
from allotrope.commands.version import version
from allotrope.logs import log_info

_SETTINGS = {"help_option_names": ["-h", "--help"]}
COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "batch": batch,
    "generate": generate,
    "chat": chat,
    "plan": plan,
    "verify": verify,
    "eval": evaluate,
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
    # Help is plain text, because the boxes of rich cut long flags off at 80 columns.
    app = typer.Typer(
        cls=HelpGroup,
        rich_markup_mode=None,
        help="An engine for hybrid language models, with an OpenAI-compatible server.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
    )
    bench = typer.Typer(
        cls=HelpGroup, help="Measure latency and throughput.", rich_markup_mode=None, context_settings=_SETTINGS
    )
    for group, commands in ((app, COMMANDS), (bench, BENCHMARKS)):
        for name, command in commands.items():
            group.command(name, cls=FlagCommand, context_settings=_SETTINGS)(expand_configs(command))
    app.add_typer(bench, name="bench")
    app.callback()(_root)
    return app


def run() -> int:
    """Run the command line in `sys.argv` and return its exit status. An invalid one prints its fault and returns 2."""
    # typer's class for invalid command lines has no public name.
    refusal: Any = typer.BadParameter.__bases__[0]
    try:
        return int(build_app()(prog_name="allotrope", standalone_mode=False) or 0)
    except typer.Abort:
        return 1
    except refusal as error:
        command = "allotrope" if error.ctx is None else error.ctx.command_path
        message = error.format_message().rstrip(".")
        print(f"allotrope: error: {message}. See: {command} --help", file=sys.stderr)
        return 2


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (any command).")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens (any command).")] = False,
    version: Annotated[
        bool, typer.Option("-V", "--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """The flags before the command. `allotrope.cli.main` reads `--debug`."""
    if verbose:
        log_info()
