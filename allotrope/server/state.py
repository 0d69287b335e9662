"""State that all routes share: the engine, the tokenizer, and the phase of the server's lifecycle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from allotrope.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from allotrope.engine.client import EngineClient
    from allotrope.engine.report import EngineLimits
    from allotrope.server.message_formats import MessageFormats
    from allotrope.server.metrics import Metrics
    from allotrope.server.prompts import PromptReader
    from allotrope.text.tokenizer import Tokenizer


# A small model takes about a minute for these on a CPU. Without a limit, an answer may fill the whole context.
_CPU_MAX_TOKENS = 1024


class Phase(Enum):
    """Phase of the server: it loads, serves (and perhaps sleeps), then drains or ends with its engine."""

    LOADING = auto()
    SERVING = auto()
    SLEEPING = auto()
    DRAINING = auto()
    DEAD = auto()


@dataclass(frozen=True)
class Serving:
    """The parts that exist once the model is loaded.

    `options`: the engine's configuration. `max_sequences`: the largest number of sequences of one request. `eos_ids`:
    end-of-sequence ids of the checkpoint and the tokenizer. `formats`: of the model's messages.
    """

    engine: EngineClient
    options: EngineConfig
    tokenizer: Tokenizer
    prompts: PromptReader
    metrics: Metrics
    limits: EngineLimits
    max_sequences: int
    eos_ids: tuple[int, ...]
    formats: MessageFormats


class ServerState:
    """`model_names`: the model's names in the API. `detail`: a description of the current phase."""

    def __init__(self, config: ServerConfig, model_names: Sequence[str]) -> None:
        self.config = config
        self.model_names = tuple(dict.fromkeys(model_names))
        self.created = int(time.time())
        self.phase = Phase.LOADING
        self.detail = "starting"
        self.serving: Serving | None = None
        # Returns whether the number of connections exceeds --max-connections.
        self.is_full: Callable[[], bool] = lambda: False
        self._open_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.model_names[0]

    @property
    def why_not_ready(self) -> str | None:
        """The reason why the server takes no requests now, or None if it takes them."""
        match self.phase:
            case Phase.LOADING:
                return f"The server is loading the model ({self.detail}). Try again in a moment."
            case Phase.DRAINING:
                return "The server is shutting down and takes no new requests."
            case Phase.DEAD:
                return f"The server is ending because its engine has: {self.detail}."
            case Phase.SLEEPING:
                return "The server sleeps and takes no requests until POST /wake_up."
            case Phase.SERVING:
                return None

    @property
    def why_unhealthy(self) -> str | None:
        """The reason why a load balancer should send no requests now, or None."""
        stalled = 0.0 if self.serving is None else self.serving.engine.silent_seconds
        if self.phase is Phase.SERVING and stalled > self.config.health_timeout:
            return (
                f"The engine has ended no step for {stalled:.0f} s although requests are under way "
                f"(--health-timeout {self.config.health_timeout:g})."
            )
        return self.why_not_ready

    def ready(self) -> Serving:
        """The loaded parts. Raises `RuntimeError` while the model loads; the guard refuses requests until then."""
        if self.serving is None:
            raise RuntimeError("a request passed while the model was loading")
        return self.serving

    @property
    def default_max_tokens(self) -> int | None:
        """The limit of a chat answer for clients that set none. None: the rest of the context."""
        limit = self.config.default_max_tokens
        return _CPU_MAX_TOKENS if limit is None and self.ready().limits.device_type == "cpu" else limit

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open until the block ends."""
        self._open_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open_requests -= 1
            if not self._open_requests:
                self._idle.set()

    async def idle(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most until no request is open. Returns whether none is open."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True
