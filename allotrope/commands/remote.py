"""Client of a running server, for commands: it reads the served model and streams chat answers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allotrope.errors import AllotropeError, ConfigError

if TYPE_CHECKING:
    import httpx

    from allotrope.commands.sampling import SamplingOptions


def server_root(url: str) -> str:
    """`url` without a final /v1, which clients of the OpenAI API append."""
    return url.rstrip("/").removesuffix("/v1")


def connect(url: str, api_key: str | None) -> httpx.Client:
    """A client of the server at `url`. Raises `ConfigError` if httpx is missing."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ConfigError("talking to a server needs httpx. Run: pip install 'allotrope[cli]'") from error
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=server_root(url), headers=headers, timeout=None)


def served_model(url: str, api_key: str | None) -> str:
    """The name of the first model that the server at `url` lists. Raises `AllotropeError` if the request fails."""
    return str(served_card(url, api_key)["id"])


def served_card(url: str, api_key: str | None) -> dict[str, Any]:
    """The server's description of its first model. Raises `AllotropeError` if the request fails."""
    with connect(url, api_key) as client:
        listed = _answer(client, "/v1/models")["data"]
    if not listed:
        raise AllotropeError(f"the server at {url} lists no model.")
    return dict(listed[0])


def _answer(client: httpx.Client, path: str) -> dict[str, Any]:
    import httpx

    try:
        response = client.get(path, timeout=30)
    except httpx.HTTPError as error:
        raise AllotropeError(f"cannot reach {client.base_url}: {error}. Is the server running?") from error
    if response.status_code != 200:
        raise AllotropeError(f"{client.base_url}{path} answered HTTP {response.status_code}: {response.text[:300]}")
    return dict(response.json())


class Thought(str):
    """A piece of a model's reasoning, which is no part of its answer."""


@dataclass
class RemoteChat:
    """Chats with model `name` of the server at `url`. `set_by_server`: sampling parameters with a default there."""

    url: str
    name: str
    api_key: str | None = None
    set_by_server: Collection[str] = ()
    last_tokens: int = 0

    def stream(self, messages: list[dict[str, str]], sampling: SamplingOptions) -> Iterator[str]:
        """Stream the answer to `messages`, its reasoning as `Thought`, and store its number of tokens in `last_tokens`.

        Raises `AllotropeError` if the server refuses the request or the connection breaks.
        """
        import httpx

        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= sampling.as_request_fields(self.set_by_server)
        try:
            with (
                connect(self.url, self.api_key) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    raise AllotropeError(_reason(response.status_code, response.read()))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from self._deltas(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise AllotropeError(f"the connection to {self.url} failed: {error}.") from error

    def _deltas(self, event: dict[str, Any]) -> Iterator[str]:
        if "error" in event:
            raise AllotropeError(str(event["error"].get("message", event["error"])))
        if event.get("usage"):
            self.last_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Thought(thought)
            if delta.get("content"):
                yield delta["content"]


def _reason(status: int, body: bytes) -> str:
    """The message of an error answer, or the beginning of its body if it has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:300].decode(errors='replace')}"
