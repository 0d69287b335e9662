"""The key on every route, strictness, a full queue, bodies that are too large, and routes that do not exist."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from server_process import API_KEY, ServerProcess, wait_until_idle

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/load"),
    ("GET", "/server_info"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
]
KEY = {"authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def keyed(keyed_server: ServerProcess) -> Iterator[httpx.Client]:
    with keyed_server.http(headers=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def unkeyed(keyed_server: ServerProcess) -> Iterator[httpx.Client]:
    with keyed_server.http() as client:
        yield client


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Basic {API_KEY}", API_KEY, "Bearer \xff"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_without_the_key(unkeyed: httpx.Client, method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    response = unkeyed.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["type"] == "authentication_error"
    assert path.startswith("/v1/messages") or error["code"] == "invalid_api_key"


def test_the_test_above_knows_every_route(keyed: httpx.Client) -> None:
    described = keyed.get("/openapi.json").json()
    routes = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    ids = {"/v1/models/tiny": "/v1/models/{model_id}", "/v1/responses/resp_1": "/v1/responses/{response_id}"}
    known = {(method, ids.get(path, path)) for method, path in ROUTES}
    assert routes - known == {("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")}
    assert described["security"] == [{"key": []}]


def test_health_needs_no_key(unkeyed: httpx.Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/health")):
        response = unkeyed.request(method, path)
        assert (response.status_code, response.content) == (200, b"")


def test_strict_refuses_unknown_fields(keyed: httpx.Client) -> None:
    response = keyed.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "invented": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "invented"
    assert keyed.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "user": "me"}).status_code == 200


def test_unknown_fields_are_named_in_a_header(http: httpx.Client, server: ServerProcess) -> None:
    names = {"invented": 1, "sp ace\r\nset-cookie: x": 2, "ü": 3, "": 4}
    for path, body in (("/v1/completions", {"prompt": "hi", "max_tokens": 1}), ("/tokenize", {"prompt": "hi"})):
        response = http.post(path, json=body | names)
        assert response.status_code == 200
        assert response.headers["x-allotrope-ignored-fields"] == 'invented, sp%20ace%0D%0Aset-cookie%3A%20x, %C3%BC, ""'
        assert "set-cookie" not in response.headers
        server.wait_for_line(f"WARNING.*{path}: ignored unknown fields: invented, sp%20ace")


def test_a_body_that_is_too_large(keyed: httpx.Client) -> None:
    declared = keyed.post("/v1/completions", content=b" " * 100_001)
    chunked = keyed.post("/v1/completions", content=(b" " * 10_000 for _ in range(11)))
    for response in (declared, chunked):
        assert response.status_code == 413
        assert "100000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing/here", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/", 404),
    ],
)
def test_errors_of_routing(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


def test_a_full_queue(keyed_server: ServerProcess) -> None:
    body = {"prompt": [5], "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=keyed_server.url, headers=KEY, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    responses = asyncio.run(run())
    refused = [response for response in responses if response.status_code == 429]
    # Four wait, and perhaps one runs already; how many of the rest come while they do depends on timing.
    assert 1 <= len(refused) <= 12 - 4
    assert all(response.headers["retry-after"] == "1" for response in refused)
    assert all(response.json()["error"]["type"] == "rate_limit_error" for response in refused)
    served = [response for response in responses if response.status_code == 200]
    assert len(served) + len(refused) == 12
    assert all(response.text.endswith("data: [DONE]\n\n") for response in served)
    with keyed_server.http(headers=KEY) as client:
        wait_until_idle(client)


def test_more_sequences_than_the_queue_can_ever_hold(keyed: httpx.Client) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "hi", "n": 5}, "n"),
        ("/v1/completions", {"prompt": ["hi"] * 3, "n": 2}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 5}, "n"),
    ):
        response = keyed.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert "at most (--max-num-waiting)" in response.json()["error"]["message"]


def test_aliased_metrics_have_the_same_values(keyed: httpx.Client) -> None:
    keyed.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "ignore_eos": True})
    samples = {}
    for line in keyed.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    for ours, theirs in (
        ("num_requests_running", "num_requests_running"),
        ("num_requests_waiting", "num_requests_waiting"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("num_preemptions_total", "num_preemptions_total"),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
        ("request_queue_time_seconds_sum", "request_queue_time_seconds_sum"),
    ):
        own = samples[f'allotrope_{ours}{{model_name="tiny"}}']
        assert samples[f'vllm:{theirs}{{engine="0",model_name="tiny"}}'] == own
    assert samples['vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'] == 0
    assert samples['allotrope_generation_tokens_total{model_name="tiny"}'] >= 3
    ended = 'request_success_total{engine="0",finished_reason="length",model_name="tiny"}'
    assert samples[f"vllm:{ended}"] >= 1


def test_metrics_have_no_aliases_by_default(http: httpx.Client) -> None:
    assert "vllm:" not in http.get("/metrics").text
