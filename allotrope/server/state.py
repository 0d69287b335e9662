"""What all routes share: the engine, the tokenizer, and the phase of the server's life."""

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
    from allotrope.server.metrics import Metrics
    from allotrope.server.prompts import PromptReader
    from allotrope.text.tokenizer import Tokenizer


# A minute or so of a small model's time; a client that knows nothing of it would wait for the whole context.
_CPU_MAX_TOKENS = 1024


class Phase(Enum):
    """A server loads, serves, then drains or finds its engine dead."""

    LOADING = auto()
    SERVING = auto()
    DRAINING = auto()
    DEAD = auto()


@dataclass(frozen=True)
class Serving:
    """What exists once the model is loaded. `max_sequences`: most that one request may ask for.

    `options`: what the engine was started with. `eos_ids`: ids that end a sequence by the word of checkpoint or
    tokenizer."""

    engine: EngineClient
    options: EngineConfig
    tokenizer: Tokenizer
    prompts: PromptReader
    metrics: Metrics
    limits: EngineLimits
    max_sequences: int
    eos_ids: tuple[int, ...]


class ServerState:
    """`model_names`: the model's names in the API. `detail`: what the present phase is about, in words."""

    def __init__(self, config: ServerConfig, model_names: Sequence[str]) -> None:
        self.config = config
        self.model_names = tuple(dict.fromkeys(model_names))
        self.created = int(time.time())
        self.phase = Phase.LOADING
        self.detail = "starting"
        self.serving: Serving | None = None
        # Whether more clients are connected than are served.
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
        """Why no request can be taken now; None if it can."""
        match self.phase:
            case Phase.LOADING:
                return f"The server is loading the model ({self.detail}). Try again in a moment."
            case Phase.DRAINING:
                return "The server is shutting down and takes no new requests."
            case Phase.DEAD:
                return f"The server is ending because its engine has: {self.detail}."
            case Phase.SERVING:
                return None

    @property
    def why_unhealthy(self) -> str | None:
        """Why nobody should send requests here now; None if they may."""
        silent = 0.0 if self.serving is None else self.serving.engine.silent_seconds
        if self.phase is Phase.SERVING and silent > self.config.health_timeout:
            return (
                f"The engine has ended no step for {silent:.0f} s although requests are under way "
                f"(--health-timeout {self.config.health_timeout:g})."
            )
        return self.why_not_ready

    def ready(self) -> Serving:
        """The parts that serve. Raises `RuntimeError` while loading; the guard lets no request come that far."""
        if self.serving is None:
            raise RuntimeError("a request passed while the model was loading")
        return self.serving

    @property
    def default_max_tokens(self) -> int | None:
        """Longest chat answer where the client sets no limit; None: the rest of the context."""
        given = self.config.default_max_tokens
        return _CPU_MAX_TOKENS if given is None and self.ready().limits.device_type == "cpu" else given

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open for the length of the block."""
        self._open_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open_requests -= 1
            if not self._open_requests:
                self._idle.set()

    async def idle(self, timeout: float) -> bool:
        """Wait until no request is open, `timeout` seconds at most; whether that came about."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True
