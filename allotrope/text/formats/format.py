"""What a format is: data, of which `parser` makes a message out of text.

A format has tags around reasoning, and a syntax of tool calls: the texts that open and close calls, and a body, one of
the few kinds in `bodies`. `channels` is the other form: a message made of parts, each with a header.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allotrope.text.formats.bodies import Body
    from allotrope.text.formats.channels import ChannelTags
    from allotrope.text.formats.parser import MessageParser


@dataclass(frozen=True)
class ReasoningTags:
    """Texts around reasoning.

    `header`: what follows `start` and is dropped. `anywhere`: reasoning may begin after content has. `tools_end`: a
    tool call ends it, too. Newlines next to the tags belong to them.
    """

    start: str
    end: str
    header: str = ""
    anywhere: bool = False
    tools_end: bool = True


@dataclass(frozen=True)
class ToolSyntax:
    """The texts around tool calls.

    A section holds calls: `section`, calls, `section_end`. Without `section`, every call stands alone. A call is
    `call`, `body`, `call_end`; each is a set of spellings, and an empty one is no text. `bare`: calls may come outside
    a section. `first`: only a message that begins with a call has calls. White space between all of these, and next to
    calls, belongs to the syntax.
    """

    body: Body
    call: tuple[str, ...]
    call_end: tuple[str, ...] = ()
    section: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    bare: bool = False
    first: bool = False


@dataclass(frozen=True)
class MessageFormat:
    """One format by its name. `channels`: the message is made of parts with headers, and the other two are None."""

    name: str
    reasoning: ReasoningTags | None = None
    tools: ToolSyntax | None = None
    channels: ChannelTags | None = None

    @property
    def reasoning_end(self) -> str | None:
        """The text that ends reasoning, if the format has reasoning."""
        if self.channels is not None:
            return self.channels.reasoning_end
        return None if self.reasoning is None else self.reasoning.end

    def may_write(self, token_text: str) -> bool:
        """Whether a special token can be a part of what the format writes."""
        return any(token_text in text for text in _texts_in((self.reasoning, self.tools, self.channels)))

    def reasoning_is_open(self, prompt_text: str, continued: str | None = None) -> bool:
        """Whether a rendered prompt ends inside reasoning, so that the reply begins with it. `continued`: the text of
        the message that the reply goes on with; None: it begins one."""
        tail = prompt_text[-256:].rstrip()
        if self.channels is not None:
            return tail.endswith(self.channels.reasoning_start)
        if self.reasoning is None:
            return False
        if continued is not None:
            begun = self.reasoning.anywhere or continued.lstrip().startswith(self.reasoning.start)
            return begun and continued.rfind(self.reasoning.start) > continued.rfind(self.reasoning.end)
        starts = {self.reasoning.start, (self.reasoning.start + self.reasoning.header).rstrip()}
        return tail.endswith(tuple(starts))

    def parser(
        self,
        *,
        tools: bool | Iterable[Mapping[str, Any]],
        reasoning: bool,
        prompt_opens_reasoning: bool = False,
        special_tokens: Iterable[str] = (),
    ) -> MessageParser:
        """The parser of one message.

        `tools`: whether there are calls; the request's tools themselves say of which types parameters are.
        `reasoning`: whether reasoning is told apart. `prompt_opens_reasoning`: see `reasoning_is_open`.
        `special_tokens`: the tokenizer's; those that are not part of the format are left out of the text.
        """
        from allotrope.text.formats.parser import make_parser

        return make_parser(
            self if reasoning else None,
            self if tools is True or tools else None,
            tools=() if isinstance(tools, bool) else tools,
            prompt_opens_reasoning=prompt_opens_reasoning,
            special_tokens=special_tokens,
        )


def _texts_in(data: Any) -> Iterator[str]:
    """Every text in the data of a format."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, tuple):
        for item in data:
            yield from _texts_in(item)
    elif is_dataclass(data):
        for one in fields(data):
            yield from _texts_in(getattr(data, one.name))
