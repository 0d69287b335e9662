"""One prompt on its way through the engine: sequence outputs in, deltas of text out.

Both kinds of answer are made of the same deltas: a stream sends each, a whole answer accumulates them. It must not
know HTTP or any JSON form.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from allotrope.errors import AllotropeError
from allotrope.request import FinishReason, Request, SequenceOutput, TokenLogprobs
from allotrope.text.stream import TextStream

if TYPE_CHECKING:
    from allotrope.engine.client import EngineClient
    from allotrope.server.metrics import Metrics
    from allotrope.text.tokenizer import Tokenizer


class GenerationFailed(AllotropeError):
    """The engine gave up on this request; others go on."""


class TokenScore(NamedTuple):
    """A token and, where asked for, its log-probabilities."""

    id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Delta:
    """What is new in sequence `index` of an answer.

    `tokens`: those that `text` was made of, and any that gave none. `echoed`: this is the prompt, not the answer.
    """

    index: int
    text: str
    tokens: tuple[TokenScore, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    echoed: bool = False


@dataclass
class _Sequence:
    stream: TextStream
    held: list[TokenScore] = field(default_factory=list)
    done: bool = False


class Generation:
    """The answer to one prompt: `request.params.n` sequences.

    `continues_text`: the answer goes on where the prompt's text stops (a completion), rather than being a text of its
    own. `echo`: text of the prompt, where each sequence begins with it. `no_new_tokens`: `max_tokens=0`, though the
    engine always makes one. `first_index`: index of the first sequence, where one answer covers several prompts.
    `cached_tokens`, `cache_lost`, `prompt_logprobs` and `completion_tokens` are filled as outputs arrive.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        continues_text: bool = False,
        echo: str | None = None,
        no_new_tokens: bool = False,
        first_index: int = 0,
    ) -> None:
        self.request = request
        self.first_index = first_index
        self.cached_tokens = 0
        self.cache_lost: dict[str, int] = {}
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._echo = echo
        self._no_new_tokens = no_new_tokens
        self._completion_tokens = 0
        self._started = False
        self._sequences = [
            _Sequence(TextStream(tokenizer, request.params, continues_text=continues_text))
            for _ in range(request.params.n)
        ]

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far, of all its sequences."""
        return 0 if self._no_new_tokens else self._completion_tokens

    async def deltas(self, engine: EngineClient, metrics: Metrics) -> AsyncGenerator[Delta, None]:
        """Run the request and yield its deltas. Closing the generator aborts what still runs.

        Raises `GenerationFailed` if the engine gave up on a sequence, and whatever `EngineClient.generate` raises.
        """
        with metrics.track(self.request) as timer:
            async with aclosing(engine.generate(self.request)) as outputs:
                async for output in outputs:
                    before = self._completion_tokens
                    deltas = self.take(output)
                    timer.tokens(output.index, self._completion_tokens - before)
                    if before == 0:
                        timer.queued(output.queued_seconds)
                    for delta in deltas:
                        if delta.finish_reason is not None:
                            timer.ended(delta.finish_reason)
                        yield delta
                    if all(sequence.done for sequence in self._sequences):
                        break
                    if self._sequences[output.index].done and output.finish_reason is None:
                        # Its text was stopped here, which the engine cannot know; its siblings go on.
                        engine.abort(self.request.request_id, output.index)

    def take(self, output: SequenceOutput) -> list[Delta]:
        """The deltas that `output` adds; none where its text must wait for more, or its sequence has ended.

        Raises `GenerationFailed` if the engine gave up on the sequence.
        """
        sequence = self._sequences[output.index]
        if sequence.done:
            return []
        if output.finish_reason in ("error", "abort"):
            raise GenerationFailed(output.error or "the engine dropped this request")
        deltas = self._begin(output) if not self._started else []
        delta = self._advance(sequence, output)
        if delta.text or delta.finish_reason is not None:
            deltas.append(delta)
        else:
            sequence.held = [*delta.tokens]
        return deltas

    def _begin(self, output: SequenceOutput) -> list[Delta]:
        """Take what only the first output brings; the echoed prompt, once for each sequence."""
        self._started = True
        self.cached_tokens, self.cache_lost = output.cached_tokens, output.cache_lost
        self.prompt_logprobs = output.prompt_logprobs
        if self._echo is None:
            return []
        ids = self.request.prompt_ids
        tokens = tuple(map(TokenScore, ids, self.prompt_logprobs or [None] * len(ids)))
        indices = range(self.first_index, self.first_index + len(self._sequences))
        return [Delta(index, self._echo, tokens, echoed=True) for index in indices]

    def _advance(self, sequence: _Sequence, output: SequenceOutput) -> Delta:
        """Token by token, so that the answer does not depend on how many tokens one step brought."""
        params = self.request.params
        tokens, text = sequence.held, ""
        held, sequence.held = len(tokens), []
        reason, stop_reason = output.finish_reason, output.stop_reason
        # The engine knows stop ids only: where it stopped, the last token is one, and shown only on request.
        unseen = len(output.token_ids) - 1 if reason == "stop" and not params.include_stop_str_in_output else -1
        scores = output.logprobs or [None] * len(output.token_ids)
        for place, (token, score) in enumerate(zip(output.token_ids, scores, strict=True)):
            tokens.append(TokenScore(token, score))
            if place != unseen:
                text += sequence.stream.push([token])
            if sequence.stream.stopped_by is not None:
                reason, stop_reason = "stop", sequence.stream.stopped_by
                break
        if reason is not None and sequence.stream.stopped_by is None:
            text += sequence.stream.push([], final=True)
        sequence.done = reason is not None
        self._completion_tokens += len(tokens) - held
        index = self.first_index + output.index
        if self._no_new_tokens:
            return Delta(index, "", (), "length" if reason is not None else None)
        return Delta(index, text, tuple(tokens), reason, stop_reason)


async def merge(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The deltas of several generations as they come. The first that fails fails all; closing closes all."""
    arrived: asyncio.Queue[Delta | None] = asyncio.Queue()

    async def forward(source: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(source):
                async for delta in source:
                    arrived.put_nowait(delta)
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            delta = await arrived.get()
            if delta is not None:
                yield delta
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
