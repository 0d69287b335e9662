"""Runs one prompt in the engine, and turns its sequence outputs into deltas of text.

Both kinds of answer are made of the same deltas: a stream sends each one, a whole answer accumulates them. This module
must not know HTTP or any JSON form.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from allotrope.errors import AllotropeError, InvalidRequest
from allotrope.request import NOTHING_ALLOWED, FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from allotrope.text.stream import TextStream

if TYPE_CHECKING:
    from allotrope.engine.client import EngineClient
    from allotrope.server.metrics import Metrics
    from allotrope.text.tokenizer import Tokenizer


class GenerationFailed(AllotropeError):
    """The engine dropped this request; other requests continue."""


class TokenScore(NamedTuple):
    """A token and, if requested, its log-probabilities. `offset`: characters of its sequence's text before its own."""

    id: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(frozen=True)
class Delta:
    """The text and tokens that sequence `index` of an answer gains.

    `tokens`: the tokens of `text`, with those that add no text. `pieces`: the text that each of them adds; what follows
    the last token's is one more. `echoed`: the delta repeats the prompt.
    """

    index: int
    text: str
    tokens: tuple[TokenScore, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    echoed: bool = False
    pieces: tuple[str, ...] = ()


@dataclass
class _Sequence:
    stream: TextStream
    # Tokens whose text is not sent yet.
    held: list[TokenScore] = field(default_factory=list)
    done: bool = False
    # By the caller.
    cut: bool = False
    # Tokens that its last output has added, and how many of these may be accepted drafts.
    added: int = 0
    drafted: int = 0


class Generation:
    """The answer to one prompt: `request.params.n` sequences.

    `continues_text`: the answer continues the prompt's text (a completion); a chat answer starts a text of its own.
    `echo`: text of the prompt with which each sequence begins, or None. `no_new_tokens`: the client sent
    `max_tokens=0`, so the one token that the engine generates is dropped. `keeps_end_token`: an end-of-sequence
    token is part of the text, for a parser to which it means something. `textless`: ids that add no text.
    `first_index`: index of the first sequence in an answer that covers several prompts. `may_end`: the caller may
    `end` a sequence, behind which no further tokens count. Arriving outputs fill `cached_tokens`,
    `cache_lost`, `prompt_logprobs`, `completion_tokens`, and the `draft_tokens` and `accepted_tokens` of
    speculative decoding.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        continues_text: bool = False,
        echo: str | None = None,
        no_new_tokens: bool = False,
        keeps_end_token: bool = False,
        textless: frozenset[int] = frozenset(),
        first_index: int = 0,
        may_end: bool = False,
    ) -> None:
        self.request = request
        self._may_end = may_end
        self.first_index = first_index
        self.cached_tokens = 0
        self.cache_lost: dict[str, int] = {}
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._echo = echo
        self._tokenizer = tokenizer
        self._no_new_tokens = no_new_tokens
        self._kept_ends = frozenset(request.eos_ids if keeps_end_token else ())
        self._completion_tokens = 0
        self._started = False
        self._sequences = [
            _Sequence(TextStream(tokenizer, request.params, continues_text=continues_text, textless=textless))
            for _ in range(request.params.n)
        ]

    @property
    def completion_tokens(self) -> int:
        """The number of tokens generated so far, over all sequences."""
        return 0 if self._no_new_tokens else self._completion_tokens

    async def deltas(self, engine: EngineClient, metrics: Metrics) -> AsyncGenerator[Delta, None]:
        """Run the request and yield its deltas. Closing the generator aborts the sequences that still run.

        Raises `GenerationFailed` if the engine dropped a sequence, and every error of `EngineClient.generate`.
        """
        with metrics.track(self.request) as timer:
            async with aclosing(engine.generate(self.request, join=not self._may_end)) as outputs:
                async for output in outputs:
                    before = self._completion_tokens
                    deltas = self.take(output)
                    arrived = self._completion_tokens - before
                    timer.tokens(output.index, arrived)
                    if before == 0:
                        timer.queued(output.queued_seconds)
                    try:
                        for delta in deltas:
                            yield delta
                    finally:
                        # The caller may have called `end`, which takes tokens back.
                        if not self._no_new_tokens:
                            timer.generated(self._completion_tokens - before)
                        reasons = [delta.finish_reason for delta in deltas if delta.finish_reason is not None]
                        if deltas and self._sequences[output.index].cut:
                            timer.ended("stop")
                        elif reasons:
                            timer.ended(reasons[-1])
                    if all(sequence.done for sequence in self._sequences):
                        break
                    if self._sequences[output.index].done and output.finish_reason is None:
                        # A stop string or `end` ended this sequence. The engine matches stop ids only, so it is told
                        # to abort it; the other sequences continue.
                        engine.abort(self.request.request_id, output.index)

    def end(self, index: int, behind: int) -> None:
        """End sequence `index` before the last `behind` tokens of its last delta, for a caller that wants no more."""
        sequence = self._sequences[index - self.first_index]
        sequence.done = sequence.cut = True
        self._completion_tokens -= behind
        self.accepted_tokens -= max(0, min(sequence.drafted, sequence.added) - (sequence.added - behind))

    def take(self, output: SequenceOutput) -> list[Delta]:
        """The deltas that `output` adds. There are none if its text is held back, or its sequence has ended.

        Raises `GenerationFailed` if the engine dropped the sequence, InvalidRequest where the client's own limits left
        it no token.
        """
        sequence = self._sequences[output.index]
        if sequence.done:
            return []
        if output.error == NOTHING_ALLOWED:
            raise InvalidRequest(NOTHING_ALLOWED, "allowed_token_ids")
        if output.finish_reason in ("error", "abort"):
            raise GenerationFailed(output.error or "the engine dropped this request")
        deltas = self._begin(output) if not self._started else []
        before = self._completion_tokens
        delta = self._advance(sequence, output)
        self.draft_tokens += output.num_draft_tokens
        # Accepted drafts come first; tokens behind a stop string are not of the answer.
        sequence.added, sequence.drafted = self._completion_tokens - before, output.num_accepted_tokens
        self.accepted_tokens += min(sequence.drafted, sequence.added)
        if delta.text or delta.finish_reason is not None:
            deltas.append(delta)
        else:
            sequence.held = [*delta.tokens]
        return deltas

    def _begin(self, output: SequenceOutput) -> list[Delta]:
        """Store the fields of the first output. Returns the echoed prompt once for each sequence."""
        self._started = True
        self.cached_tokens, self.cache_lost = output.cached_tokens, output.cache_lost
        self.prompt_logprobs = output.prompt_logprobs
        if self._echo is None:
            return []
        ids = self.request.prompt_ids
        tokens = tuple(map(TokenScore, ids, self.prompt_logprobs or [None] * len(ids), self._echoed_offsets(ids)))
        indices = range(self.first_index, self.first_index + len(self._sequences))
        return [Delta(index, self._echo, tokens, echoed=True) for index in indices]

    def _echoed_offsets(self, ids: Sequence[int]) -> Iterator[int]:
        if self.prompt_logprobs is None:
            # Offsets are reported with log-probabilities alone.
            yield from itertools.repeat(0, len(ids))
            return
        echo, stream, in_special = self._echo or "", TextStream(self._tokenizer, SamplingParams()), 0
        for token in ids:
            start = stream.characters + in_special
            yield min(start, len(echo))
            stream.push([token])
            if token in self._tokenizer.special_ids:
                # One that the tokenizer has added is not in the text, one that the client has written is.
                text = self._tokenizer.token_text(token)
                in_special += len(text) if echo.startswith(text, start) else 0

    def _advance(self, sequence: _Sequence, output: SequenceOutput) -> Delta:
        """The delta of `output`. Tokens are read one by one, so the text is the same for any number of them a step."""
        params = self.request.params
        tokens, held, sequence.held = sequence.held, len(sequence.held), []
        pieces = [""] * held
        reason, stop_reason = output.finish_reason, output.stop_reason
        # The engine stops at stop ids only, so the last token of reason "stop" is one. Its text is left out by default.
        omitted = len(output.token_ids) - 1 if reason == "stop" and not params.include_stop_str_in_output else -1
        scores = output.logprobs or [None] * len(output.token_ids)
        for offset, (token, score) in enumerate(zip(output.token_ids, scores, strict=True)):
            tokens.append(TokenScore(token, score, len(self._echo or "") + sequence.stream.characters))
            pieces.append("" if offset == omitted and token not in self._kept_ends else sequence.stream.push([token]))
            if sequence.stream.stopped_by is not None:
                reason, stop_reason = "stop", sequence.stream.stopped_by
                break
        if reason is not None and sequence.stream.stopped_by is None:
            pieces.append(sequence.stream.push([], final=True))
        sequence.done = reason is not None
        self._completion_tokens += len(tokens) - held
        index = self.first_index + output.index
        if self._no_new_tokens:
            return Delta(index, "", (), "length" if reason is not None else None)
        return Delta(index, "".join(pieces), tuple(tokens), reason, stop_reason, pieces=tuple(pieces))


async def merge(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The deltas of several generations as they arrive.

    The first error is raised and ends all of them. Closing this generator closes all of them.
    """
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
