"""Writes an answer as JSON: OpenAI's text completions, whole or in chunks, and what chat completions share with them.

Each class reads the same deltas: `chunks` turns one into stream events, `whole` joins all of them into one body. This
module must not know the engine or HTTP.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from allotrope.server.errors import HttpError, error_body
from allotrope.server.generation import Delta, Generation, TokenScore
from allotrope.server.logprobs import Report, TokenWriter

if TYPE_CHECKING:
    from allotrope.text.tokenizer import Tokenizer

Json = dict[str, Any]


D = TypeVar("D", contravariant=True)


class Answer(Protocol[D]):
    """Writes deltas of one kind in the JSON form of one route.

    `named_events`: the events of a stream have names, see `respond`.
    """

    named_events: bool

    def opening(self) -> list[Json]:
        """Stream events before the first delta."""
        ...

    def chunks(self, delta: D) -> list[Json]:
        """Stream events of one delta."""
        ...

    def closing(self) -> list[Json]:
        """Stream events after the last delta."""
        ...

    def whole(self, deltas: Sequence[D]) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def failure(self, error: HttpError) -> list[Json]:
        """Stream events of an error that ends a stream."""
        ...

    def usage(self) -> Json:
        """Tokens of prompts and answers so far."""
        ...


@dataclass
class _Accumulated:
    """The joined deltas of one sequence."""

    text: str = ""
    tokens: list[TokenScore] = field(default_factory=list)
    echoed_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def _accumulate(deltas: Sequence[Delta], count: int) -> list[_Accumulated]:
    sequences = [_Accumulated() for _ in range(count)]
    for delta in deltas:
        sequence = sequences[delta.index]
        sequence.text += delta.text
        sequence.tokens += delta.tokens
        sequence.echoed_tokens += len(delta.tokens) if delta.echoed else 0
        if delta.finish_reason is not None:
            sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
    return sequences


class OpenAIAnswer:
    """The parts that both routes share: the object around the choices, and the usage."""

    named_events = False
    prefix: str
    object_whole: str
    object_chunk: str

    def __init__(self, model: str, generations: Sequence[Generation], tokenizer: Tokenizer, report: Report) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._generations = generations
        self._report = report
        self._writer = TokenWriter(tokenizer, report)
        self._count = sum(generation.request.params.n for generation in generations)

    def _generation(self, index: int) -> Generation:
        return self._generations[index // self._generations[0].request.params.n]

    def _frame(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._frame(self.object_chunk, choices)
        if self._report.usage or self._report.usage_always:
            chunk["usage"] = self.usage() if self._report.usage_always or not choices else None
        return chunk

    def closing(self) -> list[Json]:
        return [self._chunk([])] if self._report.usage else []

    def failure(self, error: HttpError) -> list[Json]:
        return [error_body(error)]

    def usage(self) -> Json:
        """Tokens of prompts and answers so far."""
        prompt = sum(len(generation.request.prompt_ids) for generation in self._generations)
        completion = sum(generation.completion_tokens for generation in self._generations)
        details: Json = {"cached_tokens": sum(generation.cached_tokens for generation in self._generations)}
        lost: Counter[str] = sum((Counter(generation.cache_lost) for generation in self._generations), Counter())
        if lost:
            # OpenAI has no such field. It says why cached tokens were computed again.
            details["cache_lost_tokens"] = dict(lost)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
        }
        drafted = sum(generation.draft_tokens for generation in self._generations)
        if drafted:
            accepted = sum(generation.accepted_tokens for generation in self._generations)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return usage


class CompletionAnswer(OpenAIAnswer):
    """POST /v1/completions"""

    prefix = "cmpl"
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, model: str, generations: Sequence[Generation], tokenizer: Tokenizer, report: Report) -> None:
        super().__init__(model, generations, tokenizer, report)
        self._begun = [False] * self._count

    def opening(self) -> list[Json]:
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        new = () if delta.echoed else delta.tokens
        choice = self._choice(delta.index, delta.text, delta.tokens, new)
        choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if not self._begun[delta.index]:
            self._begun[delta.index] = True
            choice |= self._about_prompt(delta.index)
        return [self._chunk([choice])]

    def whole(self, deltas: Sequence[Delta]) -> Json:
        choices = []
        for index, sequence in enumerate(_accumulate(deltas, self._count)):
            new = sequence.tokens[sequence.echoed_tokens :]
            choice = self._choice(index, sequence.text, sequence.tokens, new)
            choice |= {"finish_reason": sequence.finish_reason, "stop_reason": sequence.stop_reason}
            choices.append(choice | self._about_prompt(index))
        return self._frame(self.object_whole, choices) | {"usage": self.usage()}

    def _choice(self, index: int, text: str, tokens: Sequence[TokenScore], new: Sequence[TokenScore]) -> Json:
        scored = self._report.logprobs is not None
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": self._writer.legacy_logprobs(tokens) if scored else None,
            "finish_reason": None,
        }
        if self._report.token_ids:
            choice["token_ids"] = [token.id for token in new]
        return choice

    def _about_prompt(self, index: int) -> Json:
        about: Json = {}
        if self._report.token_ids:
            about["prompt_token_ids"] = list(self._generation(index).request.prompt_ids)
        if self._report.prompt_logprobs is not None:
            about["prompt_logprobs"] = self._writer.prompt_logprobs(self._generation(index))
        return about
