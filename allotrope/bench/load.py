"""Load test of a running server: sends requests at given times, and records when their output arrives.

Owns the client side of a streamed completion. It uses only the server's HTTP API.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from allotrope.bench.record import RequestRecord, seeded_generator

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class Target:
    """A model on a server. `url`: address without /v1. `model`: the model's name in the API."""

    url: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True)
class Traffic:
    """Arrival process and size of requests.

    `output_len`: tokens to generate for each. `rate`: average requests a second (Poisson; infinite: all at once).
    `max_concurrency`: largest number of requests in flight, or None.
    """

    output_len: int
    rate: float = float("inf")
    max_concurrency: int | None = None
    seed: int = 0


async def run_load(
    target: Target, prompts: Sequence[Sequence[int]], traffic: Traffic, on_done: Callable[[RequestRecord], None]
) -> tuple[list[RequestRecord], float]:
    """Send every prompt (token ids) and wait for all answers.

    `on_done` is called as each request ends. Returns the records in the order of `prompts`, and the seconds from the
    start of the first request to the end of the last. The record of a failed request holds the reason.
    """
    import httpx

    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limit = asyncio.Semaphore(traffic.max_concurrency or len(prompts))
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=target.url, headers=headers, timeout=None, limits=pool) as client:

        async def run_one(prompt: Sequence[int]) -> RequestRecord:
            async with limit:
                record = await _complete(client, target.model, prompt, traffic.output_len)
            on_done(record)
            return record

        begin = time.perf_counter()
        tasks = []
        for prompt, at in zip(prompts, send_times(len(prompts), traffic), strict=True):
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            tasks.append(asyncio.create_task(run_one(prompt)))
        records = await asyncio.gather(*tasks)
        return records, time.perf_counter() - begin


def send_times(count: int, traffic: Traffic) -> list[float]:
    """The send time of each request in seconds; the first is 0."""
    if traffic.rate == float("inf"):
        return [0.0] * count
    gaps = seeded_generator(traffic.seed).exponential(1 / traffic.rate, size=count)
    return [float(at) for at in np.cumsum(gaps) - gaps[0]]


async def _complete(client: httpx.AsyncClient, model: str, prompt: Sequence[int], output_len: int) -> RequestRecord:
    import httpx

    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = RequestRecord(prompt_tokens=len(prompt), started=time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                record.error = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _note(record, json.loads(line.removeprefix("data: ")))
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.finished = time.perf_counter()
    if record.error is None and not record.arrivals:
        record.error = "the server sent no output"
    return record


def _note(record: RequestRecord, event: dict[str, Any]) -> None:
    """Add one event of a stream to the request's record."""
    if "error" in event:
        record.error = str(event["error"].get("message", event["error"]))
    if any(choice.get("text") for choice in event.get("choices", ())):
        record.arrivals.append(time.perf_counter())
    usage = event.get("usage")
    if usage:
        record.prompt_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
