"""Routes that report the server's state: health, load, metrics and configuration."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import allotrope
from allotrope.server.guard import METRICS, PROBES
from allotrope.server.metrics import CONTENT_TYPE
from allotrope.server.state import ServerState

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn")


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as a JSON answer."""
    return Response(msgspec.json.encode(value), headers=dict(headers or {}), media_type="application/json")


def add_status_routes(router: APIRouter, state: ServerState) -> None:
    """Add to `router` the routes that report `state`."""

    @router.get(PROBES[0])
    async def health() -> Response:
        """200 while the server takes requests; 503 with the reason while it loads, drains, ends or is stalled."""
        return Response()

    @router.get(PROBES[1])
    @router.post(PROBES[1])
    async def ping() -> Response:
        """The same as /health, for hosts that ask here."""
        return Response()

    @router.get("/version")
    async def version() -> Response:
        """The version of Allotrope."""
        return json_response({"version": allotrope.__version__})

    @router.get("/load")
    async def load() -> Response:
        """How many prompts are being answered, and how many sequences of them run and wait."""
        engine = state.ready().engine
        stats = engine.stats()
        return json_response({"server_load": engine.open_requests, "running": stats.running, "waiting": stats.waiting})

    @router.get("/server_info")
    async def server_info() -> Response:
        """Versions, the model and the plan of its memory, options and limits. Of keys it shows only their number."""
        return json_response(_describe(state))

    @router.get(METRICS)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(state.ready().metrics.exposition(), headers={"content-type": CONTENT_TYPE})


def _describe(state: ServerState) -> dict[str, Any]:
    serving = state.ready()
    options = asdict(state.config)
    for name in ("api_key", "metrics_api_key"):
        options[name] = len(options[name])
    return {
        "version": allotrope.__version__,
        "python": platform.python_version(),
        "packages": {name: installed for name in _PACKAGES if (installed := _version(name)) is not None},
        "started": state.created,
        "model_names": state.model_names,
        "model": asdict(serving.engine.model),
        "chat": serving.prompts.chats,
        "default_max_tokens": state.default_max_tokens,
        "limits": asdict(serving.limits),
        "engine": asdict(serving.options),
        "server": options,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
