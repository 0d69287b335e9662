"""Pydantic models of POST /v1/responses: the body and the items of its input.

A field that a client sends within an item and that no model declares has no effect; see `allotrope.server.inner`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from allotrope.request import MAX_LOGPROBS
from allotrope.server.inner import OpenModel, kind_of
from allotrope.server.protocol import Sampled

_INT32 = 2**31 - 1
Status = Literal["in_progress", "completed", "incomplete"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Name = Annotated[str, Field(min_length=1, max_length=128)]

_TEXT_ONLY = "this server reads text only: parts of type input_text, output_text or refusal"
_ITEMS = (
    "items are of type message, function_call, function_call_output or reasoning; this server runs no tools of its "
    "own and finds no single items by their id"
)
_FUNCTIONS = "only functions can be called: tools of type function, each with a name"
_CHOICES = "the tool choice is none, auto, required, or an object of type function or allowed_tools"
_FORMATS = "the format is of type text, json_object or json_schema"


class InputText(OpenModel):
    """A text part of a message or of a tool's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(None, description="Without effect.")
    logprobs: list[Any] | None = Field(None, description="Without effect.")


class InputRefusal(OpenModel):
    """A refusal in an earlier answer; it is read as its text."""

    type: Literal["refusal"]
    refusal: str


def _part_kind(value: Any) -> str | None:
    kind = kind_of(value)
    return "text" if kind in ("input_text", "output_text", "text") else kind


Part = Annotated[
    Annotated[InputText, Tag("text")] | Annotated[InputRefusal, Tag("refusal")],
    Discriminator(_part_kind, custom_error_type="part", custom_error_message=_TEXT_ONLY),
]
Parts = Annotated[list[Part], Field(min_length=1)]


class InputMessage(OpenModel):
    """A message of the conversation, or one of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="Without effect.")


class InputFunctionCall(OpenModel):
    """A call of a function, of an earlier answer."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str = Field(description="JSON text.")
    id: str | None = None
    status: Status | None = None


class InputFunctionOutput(OpenModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | list[Part]
    id: str | None = None
    name: str | None = None
    status: Status | None = None


class InputReasoning(OpenModel):
    """Reasoning of an earlier answer; its content is read, its summary only where there is no content."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = Field(None, description="Without effect: no one can read it here.")
    status: Status | None = None


def _item_kind(value: Any) -> str | None:
    kind = kind_of(value)
    return "message" if kind is None and isinstance(value, dict) and "role" in value else kind


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_item_kind, custom_error_type="item", custom_error_message=_ITEMS),
]


class FunctionTool(OpenModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")],
    Discriminator(kind_of, custom_error_type="tool", custom_error_message=_FUNCTIONS),
]


class NamedChoice(OpenModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: Name


class AllowedTools(OpenModel):
    """The functions among `tools` that may be called (`mode` auto) or of which one must be (required)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1)]


def _choice_kind(value: Any) -> str | None:
    return "mode" if isinstance(value, str) else kind_of(value)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedChoice, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_choice_kind, custom_error_type="tool_choice", custom_error_message=_CHOICES),
]


class TextFormat(OpenModel):
    """Plain text."""

    type: Literal["text"]


class ObjectFormat(OpenModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(OpenModel):
    """JSON that holds to a schema."""

    model_config = ConfigDict(protected_namespaces=())

    type: Literal["json_schema"]
    name: Name
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Without effect: a schema always holds.")


Format = Annotated[
    Annotated[TextFormat, Tag("text")]
    | Annotated[ObjectFormat, Tag("json_object")]
    | Annotated[SchemaFormat, Tag("json_schema")],
    Discriminator(kind_of, custom_error_type="format", custom_error_message=_FORMATS),
]


class TextConfig(OpenModel):
    """The form of the answer's text."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = Field(None, description="Say it in the prompt.")


class ReasoningConfig(OpenModel):
    """How the model reasons."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = Field(None, description="Reasoning is never summarized: it is given whole.")
    generate_summary: Literal["auto"] | None = Field(None, description="The older name of summary.")


def _check_metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > 16 or any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        raise ValueError("at most 16 pairs are taken, of keys of 64 and values of 512 characters at most")
    return value


class ResponsesRequest(Sampled):
    """POST /v1/responses"""

    input: str | list[Item] | None = Field(None, description="What is said: text, or items of a conversation.")
    instructions: str | None = Field(None, description="System message before the conversation; of this answer only.")
    previous_response_id: str | None = Field(None, description="Answer that this conversation goes on from.")
    max_output_tokens: int | None = Field(None, ge=1, le=_INT32, description="Longest answer, with its reasoning.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Which of them it may or must call.")
    parallel_tool_calls: bool | None = Field(None, description="Whether one answer may call several; true by default.")
    text: TextConfig | None = Field(None, description="The form of the answer's text.")
    reasoning: ReasoningConfig | None = Field(None, description="How the model reasons.")
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = Field(None, description="Report log-probabilities; the rest concerns what never comes.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives of each token.")
    metadata: Annotated[dict[str, str], AfterValidator(_check_metadata)] | None = Field(
        None, description="Kept with the answer and given back."
    )
    store: bool | None = Field(None, description="Keep the answer for previous_response_id; true by default.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables of the chat template.")
