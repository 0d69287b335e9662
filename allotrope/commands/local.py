"""Streams text from a model in this process, for `generate` and `chat`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from allotrope.commands.remote import Thought
from allotrope.config import EngineConfig
from allotrope.errors import ConfigError
from allotrope.progress import show_progress
from allotrope.request import Request, SamplingParams
from allotrope.text import formats
from allotrope.text.formats import ContentDelta, MessageEvent, ReasoningDelta

if TYPE_CHECKING:
    from allotrope.commands.sampling import SamplingOptions


class LocalModel:
    """A model loaded by `config`. `last_tokens`: number of tokens of the latest answer."""

    def __init__(self, config: EngineConfig) -> None:
        from allotrope.llm import LLM

        show_progress()
        self.llm = LLM(**dataclasses.asdict(config))
        self.last_tokens = 0
        self._names = (f"cli-{number}" for number in itertools.count())

    def check_chats(self, instead: str) -> None:
        """Raise ConfigError if the model has no chat template. `instead`: what the user can do then."""
        if self.llm.tokenizer.chat_template is None:
            raise ConfigError(f"{self.llm.config.model} has no chat template, so it cannot take messages. {instead}")

    def stream(self, messages: list[dict[str, str]], sampling: SamplingOptions) -> Iterator[str]:
        """Stream the answer to chat `messages`, its reasoning as `Thought`. Raises `InvalidRequest` if the request is
        invalid."""
        tokenizer = self.llm.tokenizer
        prompt = tokenizer.render_chat(list(messages))
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        params = self.params(ids, sampling)
        architectures = self.llm.engine.checkpoint.config.get("architectures") or ()
        choice = formats.for_checkpoint(tokenizer.chat_template, architectures)
        if choice.reasoning is None:
            yield from self._stream(ids, params, continues_text=False)
            return
        # The tags of reasoning may be special tokens; the parser leaves the others out.
        parser = choice.parser(
            tools=False,
            reasoning=True,
            prompt_opens_reasoning=choice.reasoning_is_open(prompt),
            special_tokens=[text for token in tokenizer.special_ids if (text := tokenizer.token_text(token))],
        )
        params = dataclasses.replace(params, skip_special_tokens=False)
        for piece in self._stream(ids, params, continues_text=False):
            yield from _pieces(parser.push(piece))
        yield from _pieces(parser.finish())

    def stream_unparsed(self, messages: list[dict[str, str]], sampling: SamplingOptions) -> Iterator[str]:
        """Stream the answer to chat `messages` as the model writes it. Raises as `stream`."""
        ids = self.llm.tokenizer.apply_chat_template(list(messages))
        return self._stream(ids, self.params(ids, sampling), continues_text=False)

    def continue_text(self, prompt: str, sampling: SamplingOptions) -> Iterator[str]:
        """Stream the continuation of `prompt`. Raises `InvalidRequest` if the request is invalid."""
        ids = self.llm.tokenizer.encode(prompt)
        return self._stream(ids, self.params(ids, sampling), continues_text=True)

    def params(self, prompt_ids: list[int], sampling: SamplingOptions) -> SamplingParams:
        """Sampling parameters of a prompt's answer. The checkpoint's defaults fill the options that are left out."""
        return sampling.as_params(self.llm.sampling_defaults, len(prompt_ids), self.llm.engine.limits.max_model_len)

    def _stream(self, prompt_ids: list[int], params: SamplingParams, *, continues_text: bool) -> Iterator[str]:
        from allotrope.llm import Accumulator

        engine, tokenizer = self.llm.engine, self.llm.tokenizer
        name = next(self._names)
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt_ids),
            params=params,
            eos_ids=tuple(dict.fromkeys((*engine.limits.eos_ids, *tokenizer.eos_ids))),
            arrival=time.monotonic(),
        )
        self.last_tokens = 0
        answer = Accumulator(request, tokenizer, continues_text=continues_text)
        (completion,) = answer.output.outputs
        engine.add(request)
        try:
            while engine.has_work():
                for output in engine.step():
                    shown = len(completion.text)
                    answer.take(output)
                    self.last_tokens = len(completion.token_ids)
                    if completion.text[shown:]:
                        yield completion.text[shown:]
                    if answer.finished:
                        return
        finally:
            engine.abort([name])


def _pieces(events: list[MessageEvent]) -> Iterator[str]:
    for event in events:
        if isinstance(event, ReasoningDelta):
            yield Thought(event.text)
        elif isinstance(event, ContentDelta):
            yield event.text
