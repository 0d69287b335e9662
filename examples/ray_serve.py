"""Serve a model with Ray Serve, which starts it again when a rank, a host or a link has failed.

    pip install 'ray[serve]'
    cd examples
    serve run ray_serve:build model=MODEL options="--tensor-parallel-size 8 --pipeline-parallel-size 2"

The API is at http://127.0.0.1:8000/v1, as that of `allotrope serve MODEL` with these options. Every host
needs this file and the model at the same paths. A replica runs `allotrope serve` on a port of its own host's loopback
interface, and passes requests and answers on; the server's ranks are actors that Ray places.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import httpx
import ray
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

_PR_SET_PDEATHSIG = 1
# Headers of one connection, which are not those of the next.
_OF_CONNECTION = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@serve.deployment(
    max_ongoing_requests=1024,
    # The server says within seconds that it has ended; Serve then starts another replica.
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=30,
    ray_actor_options={"num_cpus": 1},
)
class Server:
    """One server. `options`: of `allotrope serve`."""

    def __init__(self, model: str, options: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "allotrope", "serve", model, "--port", str(port)]
        command += ["--distributed-executor-backend", "ray", *options]
        environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        # A replica that is killed takes its server along, and this one its ranks.
        self._process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None)
        while not _is_ready(port):
            self.check_health()
            time.sleep(0.2)

    def check_health(self) -> None:
        """Raise once the server has ended. Serve asks for this."""
        status = self._process.poll()
        if status is not None:
            raise RuntimeError(f"allotrope serve ended with status {status}; its log has the reason")

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer back as it comes. If the client leaves, the server aborts it."""
        headers = [(name, value) for name, value in request.headers.items() if name not in _OF_CONNECTION]
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        sent = self._client.build_request(request.method, url, headers=headers, content=await request.body())
        answer = await self._client.send(sent, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in _OF_CONNECTION}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    def __del__(self) -> None:
        self._process.terminate()


def build(arguments: dict[str, str]) -> serve.Application:
    """The application. `arguments`: `model`, and perhaps `options` of `allotrope serve` in one text."""
    return Server.bind(arguments["model"], shlex.split(arguments.get("options", "")))


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False
