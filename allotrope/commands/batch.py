"""`allotrope batch`: answer the lines of a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allotrope.config import BatchOptions, EngineConfig


def batch(
    engine: EngineConfig,
    options: BatchOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests, one a line, as OpenAI's batch API has them.")],
) -> None:
    """Answer each line of FILE with MODEL, and write the answers to another file. Run again, it goes on."""
    from allotrope.server.app import check_packages

    check_packages()
    from allotrope.server.batch import run_batch

    target = Path(options.output) if options.output else file.with_suffix(".answers.jsonl")
    raise typer.Exit(run_batch(engine, options, file, target))
