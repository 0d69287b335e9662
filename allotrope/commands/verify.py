"""`allotrope verify`: is the engine right about a model?

Exit status 0: it is. 1: it is not. 2: nothing could be compared.
"""

from __future__ import annotations

import dataclasses
import json

import typer

from allotrope.commands.flags import expand_configs
from allotrope.commands.judgement import conclude, say, status_2
from allotrope.config import EngineConfig
from allotrope.verify.options import VerifyOptions


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
    conclude(console, report, (options.json, write_json), (options.plot, write_plot))
