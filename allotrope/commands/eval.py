"""`allotrope eval`: how well does a model answer?

Exit status 0: every figure is in the interval of what it is held to, or nothing was to be compared. 1: some is not. 2:
something could not be measured.
"""

from __future__ import annotations

import typer

from allotrope.commands.flags import expand_configs
from allotrope.commands.judgement import conclude, say, status_2
from allotrope.config import EngineConfig
from allotrope.errors import EngineDead
from allotrope.eval.options import EvalOptions


@status_2
@expand_configs
def evaluate(engine: EngineConfig, options: EvalOptions) -> None:
    """Measure what a model answers, with 95 % intervals. Exit status 0: all figures lie in the intervals of what they
    are held to; 1: some do not; 2: they could not be measured.

    Measured are perplexity, recall by distance and by length, copying, sorting, arithmetic, JSON and tool calls.
    --baseline transformers asks Transformers the same and holds every mode to its intervals. Without a baseline, the
    modes of --modes are held to the first.
    """
    from rich.console import Console

    from allotrope.eval.report import figure_table, write_json, write_plot
    from allotrope.eval.run import evaluate as run

    with Console(stderr=True).status("starting") as status:
        try:
            report = run(engine, options, status.update)
        except EngineDead as error:
            # It failed in a mode, and no other one has figures for a report.
            typer.echo(f"allotrope: error: {error}", err=True)
            raise typer.Exit(1) from error
    # Narrower, the table would lose its figures; a pipe has no width of its own.
    console = Console()
    console.width = max(console.width, 48 + 30 * len(report.runs()))
    say(console, report.heading())
    console.print(figure_table(report))
    say(console, report.notes())
    conclude(console, report, (options.json, write_json), (options.plot, write_plot))
