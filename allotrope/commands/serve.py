"""`allotrope serve`: the OpenAI-compatible server."""

from __future__ import annotations

import typer

from allotrope.config import EngineConfig, ServerConfig


def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Serve MODEL over HTTP with the OpenAI API."""
    from allotrope.server.app import serve as run

    raise typer.Exit(run(engine, server))
