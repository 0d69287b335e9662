"""The engine sleeps between requests: it says so, refuses requests meanwhile, and answers as before once awake."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
from scripted_model import PLAIN
from server_process import API_KEY, ServerProcess

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "one two three four five six seven eight " * 8}], "temperature": 0}


@pytest.fixture
def awake(scripted_server: ServerProcess) -> Iterator[httpx.Client]:
    """The server, which is awake again at the end."""
    with scripted_server.http() as http:
        yield http
        http.post("/wake_up")


def test_sleep_and_wake(awake: httpx.Client) -> None:
    before = [awake.post(CHAT, json=QUESTION).json() for _ in range(2)][1]
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert awake.get("/is_sleeping").json() == {"is_sleeping": False}
    assert awake.post("/sleep", params={"level": 1}).json() == {"is_sleeping": True}
    assert awake.get("/is_sleeping").json() == {"is_sleeping": True}
    for path in (CHAT, "/v1/messages", "/v1/responses", "/tokenize"):
        refused = awake.post(path, json=QUESTION)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1"), path
        assert "/wake_up" in refused.json()["error"]["message"]
    assert awake.get("/health").status_code == 503
    assert [awake.get(path).status_code for path in ("/metrics", "/version", "/server_info")] == [200] * 3
    assert awake.post("/sleep").json() == {"is_sleeping": True}
    assert awake.post("/wake_up").json() == {"is_sleeping": False}
    assert awake.get("/health").status_code == 200
    after = awake.post(CHAT, json=QUESTION).json()
    assert after["choices"] == before["choices"]
    assert after["choices"][0]["message"]["content"] == "".join(PLAIN)
    # The caches were dropped.
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert awake.post("/wake_up").json() == {"is_sleeping": False}


def test_open_requests_end_first(awake: httpx.Client) -> None:
    long = QUESTION | {"ignore_eos": True, "max_tokens": 200, "stream": True}
    with awake.stream("POST", CHAT, json=long) as stream:
        lines = stream.iter_lines()
        next(lines)
        asleep: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: asleep.append(httpx.post(f"{awake.base_url}/sleep", timeout=60)))
        thread.start()
        rest = list(lines)
    thread.join(60)
    assert rest[-2] == "data: [DONE]"
    assert asleep[0].json() == {"is_sleeping": True}


def test_what_cannot_be_done_is_refused(awake: httpx.Client) -> None:
    for path, params, param in (
        ("/sleep", {"level": "2"}, "level"),
        ("/sleep", {"mode": "abort"}, "mode"),
        ("/wake_up", {"tags": "weights"}, "tags"),
    ):
        refused = awake.post(path, params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert awake.get("/is_sleeping").json() == {"is_sleeping": False}


def test_it_has_to_be_wanted(http: httpx.Client) -> None:
    for path in ("/sleep", "/wake_up"):
        refused = http.post(path)
        assert refused.status_code == 403
        assert "--enable-sleep-mode" in refused.json()["error"]["message"]


def test_it_is_behind_the_key(keyed_server: ServerProcess) -> None:
    with keyed_server.http() as http:
        assert [http.post(path).status_code for path in ("/sleep", "/wake_up")] == [401, 401]
        assert http.get("/is_sleeping").status_code == 401
        assert http.get("/is_sleeping", headers={"x-api-key": API_KEY}).status_code == 200
