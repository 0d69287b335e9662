"""Pydantic models of POST /v1/messages and POST /v1/messages/count_tokens: the bodies and the blocks of messages.

A field that a client sends within a block and that no model declares has no effect; see `allotrope.server.inner`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from allotrope.server.inner import OpenModel, kind_of
from allotrope.server.protocol import Sampled, StopText

_INT32 = 2**31 - 1
Name = Annotated[str, Field(min_length=1, max_length=128)]

_TEXT_ONLY = "this server reads text only: blocks of type text"
_BLOCKS = (
    "blocks are of type text, tool_use, tool_result, thinking or redacted_thinking; this server reads text only and "
    "runs no tools of its own"
)
_TOOLS = "only tools of the client can be called: of no type or of type custom, with a name and an input_schema"
_CHOICES = "the tool choice is an object of type auto, any, tool or none"
_THINKING = "thinking is an object of type enabled, disabled or adaptive"
_WITHOUT_EFFECT = "Without effect: the prefix cache finds equal prefixes without marks."


class _Marked(OpenModel):
    cache_control: dict[str, Any] | None = Field(None, description=_WITHOUT_EFFECT)


class TextBlock(_Marked):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, description="Without effect.")


class ToolUseBlock(_Marked):
    """A call of a tool, of an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


OnlyText = Annotated[
    Annotated[TextBlock, Tag("text")],
    Discriminator(kind_of, custom_error_type="block", custom_error_message=_TEXT_ONLY),
]


class ToolResultBlock(_Marked):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[OnlyText] | None = None
    is_error: bool | None = Field(None, description="The text is marked as an error.")


class ThinkingBlock(OpenModel):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="Without effect: it is not checked.")


class RedactedThinkingBlock(OpenModel):
    """Reasoning that no one can read here; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator(kind_of, custom_error_type="block", custom_error_message=_BLOCKS),
]


class InputMessage(OpenModel):
    """One message of the conversation. A last one of the assistant is continued."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ClientTool(_Marked):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="Hold the arguments to the schema.")
    eager_input_streaming: bool | None = Field(None, description="Without effect: arguments stream as they come.")
    input_examples: list[dict[str, Any]] | None = Field(None, description="Without effect.")


def _tool_kind(value: Any) -> str:
    return kind_of(value) or "custom"


Tool = Annotated[
    Annotated[ClientTool, Tag("custom")],
    Discriminator(_tool_kind, custom_error_type="tool", custom_error_message=_TOOLS),
]


class FreeChoice(OpenModel):
    """The model may call a tool (auto), must call one (any), or must call none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(OpenModel):
    """The model must call this tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


def _choice_kind(value: Any) -> str | None:
    kind = kind_of(value)
    return "free" if kind in ("auto", "any", "none") else kind


ToolChoice = Annotated[
    Annotated[FreeChoice, Tag("free")] | Annotated[NamedChoice, Tag("tool")],
    Discriminator(_choice_kind, custom_error_type="tool_choice", custom_error_message=_CHOICES),
]


class ThinkingOn(OpenModel):
    """The model reasons before it answers, where its template can ask it to."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = Field(
        None, description="Without effect: max_tokens limits reasoning and answer together."
    )
    display: Literal["summarized", "omitted"] | None = Field(None, description="Omitted: the blocks have no text.")


class ThinkingOff(OpenModel):
    """The model answers at once, where its template can ask it to."""

    type: Literal["disabled"]


class ThinkingAdaptive(OpenModel):
    """The model reasons as its template has it."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(None, description="Omitted: the blocks have no text.")


Thinking = Annotated[
    Annotated[ThinkingOn, Tag("enabled")]
    | Annotated[ThinkingOff, Tag("disabled")]
    | Annotated[ThinkingAdaptive, Tag("adaptive")],
    Discriminator(kind_of, custom_error_type="thinking", custom_error_message=_THINKING),
]


class SchemaFormat(OpenModel):
    """JSON that holds to a schema."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenModel):
    """The form of the answer's text, and the effort behind it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class _Conversation(BaseModel):
    """Fields that make the prompt."""

    messages: Annotated[list[InputMessage], Field(min_length=1)] = Field(description="The conversation so far.")
    system: str | list[OnlyText] | None = Field(None, description="System message before the conversation.")
    tools: list[Tool] | None = Field(None, description="Tools that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Which of them it may or must call.")
    thinking: Thinking | None = Field(None, description="Whether the model reasons first.")
    output_config: OutputConfig | None = Field(None, description="The form of the answer's text.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables of the chat template.")


class MessagesRequest(Sampled, _Conversation):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=_INT32, description="Longest answer, with its reasoning.")
    stop_sequences: Annotated[list[StopText], Field(max_length=16)] | None = Field(
        None, description="Texts that end the answer and are not part of it."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")


class CountTokensRequest(_Conversation):
    """POST /v1/messages/count_tokens"""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="Name of the served model; may be left out.")
