"""What a server can be set to beside its defaults: names, keys, a root path, web pages of others, a log of requests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_process import ServerProcess

from allotrope.config import EngineConfig, ServerConfig
from allotrope.errors import ConfigError
from allotrope.server.app import serve

ORIGIN = "https://page.example"
SECRET = "a prompt that nobody else should read"


@pytest.fixture(scope="module")
def own(tiny_model: Path) -> Iterator[ServerProcess]:
    """A server with two names and two keys, under a proxy's path, for the pages of one origin, that logs requests."""
    running = ServerProcess(
        tiny_model,
        served_model_name=["tiny", "small"],
        api_key=["first", "second"],
        metrics_api_key=["scraper"],
        root_path="/llm",
        allowed_origins=[ORIGIN],
        allowed_methods=["POST"],
        enable_log_requests=True,
    )
    try:
        yield running.wait_until_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def client(own: ServerProcess) -> Iterator[httpx.Client]:
    with own.http(headers={"authorization": "Bearer second"}) as made:
        yield made


def status(client: httpx.Client, path: str, key: str | None) -> int:
    """What `path` answers to `key`."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(str(client.base_url) + path, headers=headers).status_code


def test_several_names(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["tiny", "small"]
    assert client.get("/v1/models/small").json()["id"] == "small"
    for name in ("tiny", "small"):
        answer = client.post("/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 1})
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
    unknown = client.post("/v1/completions", json={"model": "other", "prompt": "hi"})
    assert unknown.status_code == 404 and "'tiny', 'small'" in unknown.json()["error"]["message"]
    schema = client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]
    assert schema["properties"]["model"]["enum"] == ["tiny", "small", None]


def test_several_keys_and_one_for_metrics(client: httpx.Client) -> None:
    for key, models, metrics in (
        ("first", 200, 200), ("second", 200, 200), ("scraper", 401, 200), ("third", 401, 401), (None, 401, 401),
    ):  # fmt: skip
        assert (status(client, "/v1/models", key), status(client, "/metrics", key)) == (models, metrics)
        assert status(client, "/llm/metrics", key) == metrics


def test_a_root_path(client: httpx.Client) -> None:
    """A proxy may take the path off or leave it on; neither opens a door."""
    for root in ("", "/llm"):
        assert status(client, f"{root}/health", None) == status(client, f"{root}/docs", None) == 200
        assert status(client, f"{root}/v1/models", None) == 401
        assert client.get(f"{root}/v1/models").status_code == 200
    for path in ("/llm/llm/health", "/llmhealth", "/other/health", "/health/", "//health", "/llm//health"):
        assert status(client, path, None) == 401
        assert client.get(str(client.base_url) + path).status_code == 404
    assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_an_allowed_origin_gets_cors_headers(client: httpx.Client) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-own"}
    allowed = httpx.options(client.base_url.join("/v1/completions"), headers={"origin": ORIGIN} | asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert allowed.headers["access-control-allow-methods"] == "POST"
    assert "x-own" in allowed.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in allowed.headers
    for origin, method in (("https://other.example", "POST"), (ORIGIN, "DELETE")):
        asked = {"origin": origin, "access-control-request-method": method}
        assert httpx.options(client.base_url.join("/v1/completions"), headers=asked).status_code == 400
    answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}, headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    # An error can be read too.
    refused = httpx.get(client.base_url.join("/v1/models"), headers={"origin": ORIGIN})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)
    other_request = client.get("/v1/models", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other_request.headers


def test_other_origins_get_no_cors_headers(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=asked).status_code == 405


def test_one_line_for_each_request_without_its_text(own: ServerProcess, client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "ignore_eos": True}
    for stream, name in ((True, "my-1"), (False, "my-2")):
        answer = client.post(
            "/v1/chat/completions?key=hidden", json=body | {"stream": stream}, headers={"x-request-id": name}
        )
        assert answer.headers["x-request-id"] == name
        line = own.wait_for_line(f"request id={name} .*")[0]
        pattern = r" client=127\.0\.0\.1 POST /v1/chat/completions status=200 seconds=\d+\.\d{3} prompt_tokens=(\d+) "
        found = re.search(pattern + r"completion_tokens=3$", line)
        assert found and int(found[1]) > 5
    client.get("/nothing", headers={"x-request-id": "my-3"})
    own.wait_for_line(r"request id=my-3 .* GET /nothing status=404 ")
    odd = client.get("/version", headers={"x-request-id": "a id=b"}).headers["x-request-id"]
    own.wait_for_line(f"request id={odd} .* GET /version status=200")
    assert re.fullmatch("[0-9a-f]{32}", odd)
    client.get("/health")
    client.get("/metrics")
    client.get("/version", headers={"x-request-id": "last"})
    own.wait_for_line("request id=last ")
    logged = "".join(own.log)
    assert SECRET not in logged and "hidden" not in logged and "prompt=" not in logged
    assert "GET /health status=200" not in logged and "GET /metrics status=200" not in logged


def test_prompts_are_logged_only_with_the_option(tiny_model: Path) -> None:
    server = ServerProcess(tiny_model, enable_log_requests=True, enable_log_prompts=True)
    try:
        with server.wait_until_ready().http() as http:
            body = {"prompt": [SECRET, "two\n" + "the cat " * 130], "max_tokens": 1}
            http.post("/v1/completions", json=body, headers={"x-request-id": "my-1"})
        server.wait_for_line(f"request id=my-1 prompt='(<s>)?{SECRET}'$")
        long = server.wait_for_line(r"request id=my-1 prompt='(<s>)?two\\n.*' \.\.\.$")[0]
        assert len(long) < 1300
        server.wait_for_line("request id=my-1 client=")
    finally:
        server.close()


def test_requests_are_logged_whatever_else_is(tiny_model: Path) -> None:
    """The log has warnings and errors alone by default."""
    plain = {name: value for name, value in os.environ.items() if name != "ALLOTROPE_LOGGING_LEVEL"}
    command = [sys.executable, "-m", "allotrope", "serve", str(tiny_model), "--load-format", "dummy", "--threads", "1"]
    options = ["--kv-cache-memory-bytes", "32MB", "--port", "0", "--enable-log-requests", "--enable-log-prompts"]
    with subprocess.Popen(
        [*command, *options], env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        try:
            address = next(found[1] for line in running.stdout if (found := re.search(r" at (http\S+)/v1", line)))
            httpx.post(f"{address}/v1/completions", json={"prompt": SECRET, "max_tokens": 1})
        finally:
            running.terminate()
        log = running.stdout.read()
    assert SECRET in log and "POST /v1/completions status=200" in log and "stopping" not in log


def test_head_has_the_headers_of_get_and_no_body(http: httpx.Client) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/metrics", "/load", "/docs", "/openapi.json"):
        told, whole = http.head(path), http.get(path)
        assert (told.status_code, told.content) == (200, b"")
        assert told.headers.get("content-type") == whole.headers.get("content-type")
    assert http.head("/v1/completions").status_code == 405
    assert http.head("/nothing").status_code == 404


def test_load(server: ServerProcess, http: httpx.Client) -> None:
    idle = {"server_load": 0, "running": 0, "waiting": 0}

    def load_becomes(wanted: int) -> dict[str, int]:
        deadline = time.monotonic() + 30
        while (load := http.get("/load").json())["server_load"] != wanted:
            assert time.monotonic() < deadline, load
        return dict(load)

    assert load_becomes(0) == idle
    with ThreadPoolExecutor(1) as pool:
        # An engine that stands still leaves the request under way for as long as the test needs.
        os.kill(server.engine_pid, signal.SIGSTOP)
        try:
            sent = pool.submit(http.post, "/v1/completions", json={"prompt": [5], "max_tokens": 2})
            load_becomes(1)
        finally:
            os.kill(server.engine_pid, signal.SIGCONT)
        assert sent.result().status_code == 200
    assert load_becomes(0) == idle


def test_server_info_holds_no_key(client: httpx.Client) -> None:
    info = client.get("/server_info").json()
    assert info["engine"]["load_format"] == "dummy" and info["limits"]["device_type"] == "cpu"
    assert info["server"]["api_key"] == 2 and info["server"]["root_path"] == "/llm"
    assert info["model_names"] == ["tiny", "small"] and info["default_max_tokens"] == 1024
    assert {"torch", "uvicorn"} <= set(info["packages"])
    assert not {"first", "second", "scraper"} & set(re.findall(r"\w+", json.dumps(info)))


def test_the_docs_page_loads_nothing_from_other_hosts(own: ServerProcess) -> None:
    page = httpx.get(f"{own.url}/docs")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    # What could make a browser fetch something; the policy forbids it besides.
    assert not re.findall(r"https?:|//[\w-]+\.|\bsrc\s*=|\bhref\s*=|@import|url\(|\bimport\b", page.text)
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    nonce = re.fullmatch(r"'nonce-([\w-]{20,})'", policy["script-src"])
    assert nonce and page.text.count(f'nonce="{nonce[1]}"') == 2 and "{nonce}" not in page.text
    assert nonce[1] not in httpx.get(f"{own.url}/docs").text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"api_key": "secret"}, "api_key=***"),
        ({"allowed_origins": ("",)}, "allowed_origins"),
        ({"allowed_origins": ("*", "example")}, "allowed_origins='example'; a scheme and a host are needed"),
        ({"allowed_origins": ("https://page.example/",)}, "allowed_origins='https://page.example/'"),
        ({"allowed_origins": ("https://a.b/c", "https://A.b")}, "allowed_origins='https://a.b/c', 'https://A.b'"),
        ({"root_path": "llm"}, "root_path='llm'"),
        ({"root_path": "/llm/"}, "root_path='/llm/'"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "name the origins"),
        ({"allow_credentials": True}, "allow_credentials needs allowed_origins"),
        ({"allowed_methods": ("GET",)}, "allowed_methods needs allowed_origins"),
        ({"allowed_headers": ("x-user",)}, "allowed_headers needs allowed_origins"),
        ({"allowed_origins": ("*",), "allowed_methods": ("GET", "post")}, "allowed_methods='post'; browsers"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"max_body_bytes": 0}, "max_body_bytes=0; at least 1 is needed"),
        ({"header_timeout": 0.0}, "header_timeout=0.0"),
        ({"sse_keep_alive_interval": -1.0}, "sse_keep_alive_interval=-1.0"),
        ({"drain_timeout": -1.0}, "drain_timeout=-1.0; at least 0 is needed"),
        ({"drain_timeout": float("nan")}, "drain_timeout=nan; at least 0 is needed"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerConfig(**options)  # type: ignore[arg-type]
    assert named in str(raised.value) and "secret" not in str(raised.value)


def test_origins_are_as_browsers_send_them() -> None:
    origins = (
        "https://page.example",
        "http://localhost:3000",
        "http://[::1]:80",
        "chrome-extension://abc",
        "null",
        "*",
    )
    assert ServerConfig(allowed_origins=origins).allowed_origins == origins


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_before_anything_starts(option: str) -> None:
    with pytest.raises(
        ConfigError, match=r"'zork' is unknown; use one of .*hermes|'zork' is unknown; use one of .*qwen3"
    ):
        serve(EngineConfig(model="no/such/model"), ServerConfig(**{option: "zork"}))


def test_parsers_are_named_by_options(tiny_model: Path) -> None:
    running = ServerProcess(tiny_model, tool_call_parser="qwen3_xml", reasoning_parser="deepseek_r1")
    try:
        line = running.wait_until_ready().wait_for_line(r"formats of messages: (.*)")[1]
        assert "--tool-call-parser: qwen3_coder" in line and "--reasoning-parser: think" in line
        tools = [{"type": "function", "function": {"name": "f"}}]
        with running.http() as http:
            answer = http.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "tools": tools}
            )
        assert answer.status_code == 400 and "does not read them" in answer.json()["error"]["message"]
    finally:
        running.close()
