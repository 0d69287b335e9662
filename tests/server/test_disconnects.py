"""Clients that go away, streaming or not, at any phase of their request: nothing of theirs stays behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, wait_until_idle

Json = dict[str, Any]
_LONG = {"ignore_eos": True, "max_tokens": 400, "temperature": 0}


def _body(random_: random.Random) -> tuple[str, Json]:
    ids = [random_.randrange(4, 300) for _ in range(random_.choice([1, 20, 100]))]
    chat = {"messages": [{"role": "user", "content": "the cat " * random_.choice([1, 30])}]}
    more: Json = _LONG | {"stream": random_.random() < 0.5, "n": random_.choice([1, 1, 3])}
    if random_.random() < 0.5:
        return "/v1/chat/completions", chat | more
    return "/v1/completions", {"prompt": [ids, ids[:1]] if random_.random() < 0.3 else ids} | more


async def _leave(url: str, random_: random.Random) -> None:
    """Send a request and hang up: while sending, while it queues or is read, or while it answers."""
    target = httpx.URL(url)
    path, body = _body(random_)
    data = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(target.host, target.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sent = data if random_.random() < 0.9 else data[: len(data) // 2]
    writer.write(head.encode() + sent)
    await writer.drain()
    await asyncio.sleep(random_.choice([0.0, 0.005, 0.05, 0.2]) * random_.random())
    if random_.random() < 0.3:
        writer.transport.abort()
    else:
        writer.close()


async def _run(url: str, leavers: int) -> list[list[int]]:
    random_ = random.Random(7)
    stay = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        alone = (await http.post("/v1/completions", json=stay)).json()
        staying = asyncio.create_task(http.post("/v1/completions", json=stay))
        for _ in range(leavers // 10):
            await asyncio.gather(*(_leave(url, random_) for _ in range(10)))
        among = (await staying).json()
    return [answer["choices"][0]["token_ids"] for answer in (alone, among)]


def test_a_hundred_disconnects_leave_nothing_behind(server: ServerProcess) -> None:
    alone, among_leavers = asyncio.run(_run(server.url, 100))
    assert among_leavers == alone
    with server.http() as http:
        # Far sooner than their 400 tokens would take: they were dropped, not finished.
        wait_until_idle(http, timeout=5)
    assert not [line for line in server.log if "Traceback" in line]


def _aborted(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    line = next(line for line in lines if line.startswith('allotrope_request_success_total{finished_reason="abort"'))
    return float(line.rsplit(" ", 1)[1])


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_ends_with_its_client(server: ServerProcess, stream: bool) -> None:
    with server.http() as http:
        wait_until_idle(http)
        before = _aborted(http)
        body = {"prompt": [5], "stream": stream} | _LONG
        with httpx.Client(base_url=server.url, timeout=60 if stream else 0.1) as hasty:
            if stream:
                with hasty.stream("POST", "/v1/completions", json=body) as response:
                    assert next(response.iter_lines()).startswith("data: {")
            else:
                with pytest.raises(httpx.ReadTimeout):
                    hasty.post("/v1/completions", json=body)
        wait_until_idle(http, timeout=3)
        assert _aborted(http) == before + 1
