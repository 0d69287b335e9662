"""Turns a client's text, token ids or messages into prompt token ids, in threads beside the event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from allotrope.errors import InvalidRequest
from allotrope.server.protocol import ChatRequest, Message, Prompt, TokenizeRequest

if TYPE_CHECKING:
    from allotrope.text.tokenizer import Tokenizer

T = TypeVar("T")

_WORKERS = 2
_RESERVED_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "template")


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

    async def read_messages(self, messages: Sequence[Message], body: ChatRequest | TokenizeRequest) -> list[int]:
        """Token ids of a conversation, rendered by the chat template."""
        plain = [_as_template_reads(message) for message in messages]
        self._check_size(sum(len(message["content"]) for message in plain), "messages")
        extra, continued, opening = _template_options(body)

        def work() -> list[int]:
            if continued:
                return self._tokenizer.encode(self._render_open(plain, extra), add_special_tokens=False)
            return self._tokenizer.apply_chat_template(
                plain, template=self._template, add_generation_prompt=opening, **extra
            )

        return await self._in_pool(work)

    def _render_open(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> str:
        """The conversation up to the last message's content, without the tokens that close that message."""
        mark = f"<{uuid.uuid4().hex}>"
        *earlier, last = messages
        marked = [*earlier, {**last, "content": last["content"] + mark}]
        text = self._tokenizer.render_chat(marked, template=self._template, add_generation_prompt=False, **extra)
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


def _as_template_reads(message: Message) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": text}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain


def _template_options(body: ChatRequest | TokenizeRequest) -> tuple[dict[str, Any], bool, bool]:
    """Variables for the template, whether to continue the last message, and whether to add the generation prompt."""
    extra = body.chat_template_kwargs or {}
    for name in _RESERVED_VARIABLES:
        if name in extra:
            raise InvalidRequest(f"chat_template_kwargs must not set {name}.", "chat_template_kwargs")
    continued = body.continue_final_message or False
    opening = body.add_generation_prompt if body.add_generation_prompt is not None else not continued
    if continued and opening:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true.", "continue_final_message"
        )
    return extra, continued, opening
