"""`sglang serve --model-type allotrope MODEL`: our own server, with its own options, by SGLang's command."""

from __future__ import annotations

import os
import sys

from sglang.cli.serve_backends import SERVE_BACKEND_API_VERSION, ServeBackend, ServeRequest

# The only version of SGLang's contract for servers so far.
API_VERSION = 1


def serve_backend() -> ServeBackend:
    """What the entry point of the group `sglang.serve_backends` names. Raises RuntimeError for another contract."""
    if SERVE_BACKEND_API_VERSION != API_VERSION:
        raise RuntimeError(f"sglang.serve_backends is of version {SERVE_BACKEND_API_VERSION}; known: {API_VERSION}")
    return ServeBackend(api_version=API_VERSION, run=_run)


def command(request: ServeRequest) -> list[str]:
    """The command line of our server. SGLang writes a model that is given without a name as `--model-path`."""
    options = list(request.argv)
    if "--model-path" in options:
        at = options.index("--model-path")
        options[at : at + 2] = options[at + 1 : at + 2]
    return [sys.executable, "-m", "allotrope", "serve", *options]


def _run(request: ServeRequest) -> None:
    """Become our server: signals and the exit status are its own."""
    started = command(request)
    os.execv(started[0], started)
