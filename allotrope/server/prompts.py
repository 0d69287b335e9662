"""Turns a client's text, token ids or messages into prompt token ids, in threads beside the event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from allotrope.errors import InvalidRequest
from allotrope.server.conversation import Conversation, named_answers
from allotrope.server.protocol import Prompt
from allotrope.text.chat import normalise_messages

if TYPE_CHECKING:
    from allotrope.text.tokenizer import Tokenizer

T = TypeVar("T")

_WORKERS = 2


@dataclass(frozen=True)
class RenderedPrompt:
    """A conversation as text, and its token ids."""

    text: str
    ids: list[int]


class PromptReader:
    """Runs the tokenizer in a small pool of threads.

    `max_model_len`: context of the model in tokens. `max_token_bytes`: byte length of the longest token. `template`:
    chat template that replaces the tokenizer's own, or None.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_token_bytes: int, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = template
        # A text of more bytes than max_model_len longest tokens cannot fit. The factor 2 allows for tokenizers that
        # drop characters before they match tokens.
        self._max_characters = 2 * max_model_len * max_token_bytes
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tokenizer")

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None or self._tokenizer.chat_template is not None

    async def read_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `InvalidRequest` for a text that is too long for any tokenization."""
        self._check_size(len(text), "prompt")
        return await self._in_pool(lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def read_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one prompt of a completion request. Token ids are returned unchanged."""
        if isinstance(prompt, str):
            return await self.read_text(prompt, add_special_tokens=add_special_tokens)
        return prompt

    async def read_conversation(self, conversation: Conversation, variables: Mapping[str, Any]) -> RenderedPrompt:
        """The prompt of a conversation, rendered by the chat template with `variables`. Raises `InvalidRequest`."""
        self._check_size(sum(map(_length, conversation.messages)), "messages")
        if self.template_for(tools=bool(variables.get("tools"))) is None:
            raise InvalidRequest(
                "this model has no chat template, so it cannot take messages; start the server with --chat-template "
                "FILE, or use /v1/completions.",
                "messages",
            )
        messages = named_answers(conversation.messages)

        def work() -> RenderedPrompt:
            if conversation.continue_final_message:
                text = self._render_open(messages, variables)
            else:
                text = self._tokenizer.render_chat(
                    messages, template=self._template, add_generation_prompt=conversation.opens_answer, **variables
                )
            self._check_size(len(text), "messages")
            try:
                # The template has written the special tokens itself.
                return RenderedPrompt(text, self._tokenizer.encode(text, add_special_tokens=False))
            except InvalidRequest as error:
                raise InvalidRequest(str(error), "messages") from error

        return await self._in_pool(work)

    def template_for(self, *, tools: bool) -> str | None:
        """The chat template of conversations with or without tools."""
        return self._template or self._tokenizer.template_for(tools=tools)

    def _render_open(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The conversation up to the last message's content, without the tokens that close that message."""
        mark = f"<{uuid.uuid4().hex}>"
        *earlier, last = normalise_messages(messages)
        marked = [*earlier, {**last, "content": last["content"] + mark}]
        text = self._tokenizer.render_chat(marked, template=self._template, add_generation_prompt=False, **variables)
        before, separator, _ = text.rpartition(mark)
        if not separator:
            raise InvalidRequest(
                "continue_final_message=true is not possible: the chat template leaves the last message out.",
                "continue_final_message",
            )
        return before

    async def write_text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._in_pool(lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def truncate(self, ids: list[int], keep: int | None, reserve: int) -> list[int]:
        """The last `keep` tokens of a prompt. None: all of them; -1: as many as leave room for `reserve` more."""
        if keep is None:
            return ids
        if keep == 0 or keep > self._max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens={keep} is not valid; allowed: -1, or 1 to {self._max_model_len}.",
                "truncate_prompt_tokens",
            )
        return ids[-(keep if keep > 0 else max(1, self._max_model_len - reserve)) :]

    def close(self) -> None:
        """Cancel the queued calls, and let the running ones end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, characters: int, param: str) -> None:
        if characters > self._max_characters:
            raise InvalidRequest(
                f"{param} has {characters} characters; the context of {self._max_model_len} tokens (--max-model-len) "
                f"can hold {self._max_characters} at the very most.",
                param,
            )

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _length(message: Mapping[str, Any]) -> int:
    """Characters of a message's own texts, which are all in the prompt if the template shows the message."""
    content = message.get("content") or ""
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
