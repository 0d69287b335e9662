"""The formats of the served model's messages: which they are, and the parsers and call ids that they give."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from allotrope.server.message_stream import PlainParser
from allotrope.text import formats
from allotrope.text.formats import MessageFormat, MessageParser
from allotrope.text.formats.parser import make_parser

if TYPE_CHECKING:
    from allotrope.config import ServerConfig
    from allotrope.text.tokenizer import Tokenizer

log = logging.getLogger("allotrope.server")

# A template that refuses ids of another length says so.
_WANTS_SHORT_IDS = re.compile(r"length\s*!=\s*9")
_SHORT_ID = 9


@dataclass(frozen=True)
class MessageFormats:
    """`tools`, `reasoning`: the formats of tool calls and of reasoning; None: unknown.

    `special_tokens`: texts of the special tokens that these formats write. `end_tokens`: texts of those that end an
    answer. `textless`: ids of the other special tokens, which are known from text that only looks like theirs.
    `textless_ends`: ids of those that end an answer.
    `call_id_length`: number of letters and digits of a call's id, if the template refuses others.
    """

    tools: MessageFormat | None = None
    reasoning: MessageFormat | None = None
    special_tokens: frozenset[str] = frozenset()
    end_tokens: frozenset[str] = frozenset()
    textless: frozenset[int] = frozenset()
    textless_ends: frozenset[int] = frozenset()
    call_id_length: int | None = None

    def parsers(
        self,
        called: MessageFormat | None,
        tools: Sequence[Any],
        *,
        reasoning_is_open: bool,
        calls_are_held: bool,
        keeps_special_tokens: bool,
    ) -> Callable[[], MessageParser]:
        """Makes the parser of each sequence of an answer.

        `called`: the format of its calls, if it may call some of `tools`, which are as templates read them.
        `reasoning_is_open`: the prompt ends within reasoning. `calls_are_held`: a grammar lets calls come behind the
        reasoning only. `keeps_special_tokens`: the text has them; only the one at its end is left out.
        """
        if called is None and self.reasoning is None:
            return PlainParser
        reasoning = self.reasoning
        if calls_are_held and reasoning is not None and reasoning.reasoning is not None:
            # What looks like a call within reasoning is none.
            reasoning = replace(reasoning, reasoning=replace(reasoning.reasoning, tools_end=False))
        return partial(
            make_parser,
            reasoning,
            called,
            tools=tools,
            prompt_opens_reasoning=reasoning_is_open,
            special_tokens=self.end_tokens if keeps_special_tokens else self.special_tokens,
        )

    def textless_ids(self, *, keeps_special_tokens: bool) -> frozenset[int]:
        """Ids that add no text to what the parsers read."""
        return self.textless_ends if keeps_special_tokens else self.textless

    def new_call_id(self) -> str:
        """A new id of a tool call, of the form that the model's template reads."""
        letters = uuid.uuid4().hex
        return f"call_{letters[:24]}" if self.call_id_length is None else letters[: self.call_id_length]

    def reasoning_is_open(self, prompt_text: str, continued: str | None = None) -> bool:
        """As `MessageFormat.reasoning_is_open`."""
        return self.reasoning is not None and self.reasoning.reasoning_is_open(prompt_text, continued)


def choose_formats(
    config: ServerConfig,
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    template: str | None,
    architectures: Sequence[str],
) -> MessageFormats:
    """The formats of the loaded model, by options, or by chat template and architecture. The log says which and why.

    `template`: the operator's chat template, which replaces the tokenizer's.
    """
    template = template or tokenizer.template_for(tools=True)
    chosen = formats.for_checkpoint(template, architectures)
    tools, reasoning = chosen.tool, chosen.reasoning
    reasons = [chosen.reason]
    if config.tool_call_parser is not None:
        tools = formats.by_tool_parser(config.tool_call_parser)
        reasons.append(f"--tool-call-parser: {tools.name}")
    if config.reasoning_parser is not None:
        reasoning = formats.by_reasoning_parser(config.reasoning_parser)
        reasons.append(f"--reasoning-parser: {reasoning.name}")
    log.info("formats of messages: %s", "; ".join(reasons))
    if tools is None:
        log.warning("requests with tools are refused: their format is unknown; --tool-call-parser names one")
    special, ends = frozenset((*tokenizer.special_ids, *eos_ids)), frozenset(eos_ids)
    written = frozenset(token for token in special if _is_written(tokenizer.token_text(token), (tools, reasoning)))
    return MessageFormats(
        tools=tools,
        reasoning=reasoning,
        special_tokens=_texts(tokenizer, written),
        end_tokens=_texts(tokenizer, written & ends),
        textless=special - written,
        textless_ends=ends - written,
        call_id_length=_SHORT_ID if template is not None and _WANTS_SHORT_IDS.search(template) else None,
    )


def check_parser_names(config: ServerConfig) -> None:
    """Raise `ConfigError` for names of formats that there are not."""
    if config.tool_call_parser is not None:
        formats.by_tool_parser(config.tool_call_parser)
    if config.reasoning_parser is not None:
        formats.by_reasoning_parser(config.reasoning_parser)


def _is_written(text: str, used: Iterable[MessageFormat | None]) -> bool:
    return bool(text) and any(one is not None and one.may_write(text) for one in used)


def _texts(tokenizer: Tokenizer, ids: Iterable[int]) -> frozenset[str]:
    return frozenset(text for token in ids if (text := tokenizer.token_text(token)))
