"""Pydantic models of the request bodies. The Responses and Messages API declare theirs in folders of their own.

`fields` lists the known fields that have no effect or a limited one. `sampling` and `prompts` turn values into engine
parameters. The models check types and ranges only, so that the server rarely refuses a body that fits its schema.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from allotrope.request import MAX_LOGPROBS, MAX_SEED, MIN_REPETITION_PENALTY
from allotrope.server.tools import MAX_TOOLS
from allotrope.server.values import describe_value

_INT32 = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=_INT32)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Prompt = str | list[int]


def _read_prompts(value: Any) -> list[Prompt]:
    """Read the four forms of `prompt` as a list of texts and token id lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("a string, a list of strings, a list of token ids or a list of such lists is needed")
    if not value:
        raise ValueError("at least one prompt or token id is needed")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        return [_read_ids(item, f"prompt {index} of the batch must hold token ids") for index, item in enumerate(value)]
    return [_read_ids(value, "its items must be all strings, all token ids or all lists of token ids")]


def _read_ids(value: list[Any], rule: str) -> list[int]:
    invalid = [item for item in value if type(item) is not int]
    if invalid:
        raise ValueError(f"{rule}; found {describe_value(invalid[0])}")
    return value


def _read_stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _INT32}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS_SCHEMA,
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
    ]
}
_STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": 1024},
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 1024}, "maxItems": 16},
        {"type": "null"},
    ]
}


class _Body(BaseModel):
    # The tables in `fields` check undeclared fields before pydantic validates the body.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = Field(None, description="Name of the served model; may be left out.")


class _Inner(BaseModel):
    """An object within a body. `fields` refuses every field that it does not declare."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, json_schema_extra={"additionalProperties": False}
    )


class StreamOptions(_Inner):
    """Options of a stream's chunks."""

    include_usage: bool | None = Field(None, description="Send the usage in one more chunk at the end.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")


class StructuredFields(_Body):
    """Fields that say what an answer has to be; at most one of them. `structured` reads what is within."""

    response_format: dict[str, Any] | None = Field(
        None, description="json_object, json_schema or structural_tag: what the answer has to be; text for none."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object or structural_tag."
    )
    guided_json: str | dict[str, Any] | None = Field(None, description="A JSON schema; see structured_outputs.")
    guided_regex: Annotated[str, Field(min_length=1)] | None = Field(None, description="A regular expression.")
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = Field(None, description="Texts to choose from.")
    guided_grammar: Annotated[str, Field(min_length=1)] | None = Field(None, description="A grammar in Lark or GBNF.")


class Sampled(_Body):
    """Fields of every generating route: sampling and its ends."""

    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy; 1 where left out.")
    top_p: float | None = Field(None, gt=0, le=1, description="Sample among the most likely that reach this mass.")
    top_k: int | None = Field(None, ge=-1, le=_INT32, description="Sample among this many; -1 or 0 for all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Drop tokens below this share of the most likely one.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted from logits of generated tokens.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Subtracted once per occurrence.")
    repetition_penalty: float | None = Field(
        None, ge=MIN_REPETITION_PENALTY, le=100, description="Lowers logits of tokens so far."
    )
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED, description="Makes sampling repeatable.")
    stop: Annotated[
        Annotated[list[StopText], Field(max_length=16)] | None,
        BeforeValidator(_read_stops),
        WithJsonSchema(_STOP_SCHEMA),
    ] = Field(None, description="Text that ends the answer and is not part of it.")
    stop_token_ids: list[TokenId] | None = Field(None, description="Token ids that end the answer.")
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop text in the answer.")
    min_tokens: int | None = Field(None, ge=0, le=_INT32, description="No end before this many tokens.")
    ignore_eos: bool | None = Field(None, description="Go on after an end-of-sequence token.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None,
        description="Added to the logits of token ids.",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = Field(
        None, description="Only these ids may be chosen."
    )


class _Generation(Sampled, StructuredFields):
    """Fields of chat and text completions: number, limits and reports."""

    n: int | None = Field(None, ge=1, le=128, description="Number of answers to each prompt.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Report the prompt's log-probabilities and as many alternatives."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; true by default.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream=true.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=_INT32, description="Keep the last tokens of the prompt only; -1 as many as fit."
    )
    return_token_ids: bool | None = Field(None, description="Report the token ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Write tokens in logprobs as 'token_id:7'.")


class TextPart(_Inner):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(_Inner):
    """The function of a tool call."""

    name: str
    arguments: str = Field(description="The arguments as JSON text.")


class ToolCall(_Inner):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] | None = None
    function: FunctionCall


class Message(_Inner):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(
        None, description="Needed, but for an assistant's tool calls and reasoning."
    )
    name: str | None = None
    reasoning_content: str | None = Field(None, description="Earlier reasoning, for templates that read it.")
    reasoning: str | None = Field(None, description="Another name of reasoning_content.")
    tool_calls: list[ToolCall] | None = Field(None, description="Earlier tool calls of the assistant.")
    tool_call_id: str | None = Field(None, description="Id of the call that a tool message answers.")


class Function(_Inner):
    """The function of a tool."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments; none where left out.")
    strict: bool | None = Field(None, description="Let the arguments fit the schema in any case.")


class FunctionTool(_Inner):
    """A tool that the answer may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(_Inner):
    """The name of a function."""

    name: str


class ChosenTool(_Inner):
    """The one tool to call."""

    type: Literal["function"]
    function: ChosenFunction


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templated(BaseModel):
    """Options of the chat template."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the answer may call."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="How much to reason, for templates that read it or can turn reasoning off (none)."
    )
    add_generation_prompt: bool | None = Field(None, description="End with the opening of the answer; true by default.")
    continue_final_message: bool | None = Field(None, description="Leave the last message open, to be continued.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables of the chat template.")


class ChatRequest(_Generation, Templated):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(description="The conversation so far.")
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = Field(
        None, description="Whether the answer may, may not or must call tools, or the tool it must call; default: may."
    )
    parallel_tool_calls: bool | None = Field(None, description="False ends the answer with its first call.")
    include_reasoning: bool | None = Field(None, description="False leaves the reasoning out of the answer.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        le=_INT32,
        description="Longest answer; default: the rest of the context, or what the server is set to.",
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32, description="The newer name of max_tokens.")
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="And of as many alternatives.")


class CompletionRequest(_Generation):
    """POST /v1/completions"""

    prompt: Annotated[list[Prompt], PlainValidator(_read_prompts), WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description="What to continue: text or token ids, one or a batch."
    )
    max_tokens: int | None = Field(None, ge=0, le=_INT32, description="Longest answer; 16 where left out.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Report the log-probability of each token and as many alternatives."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own, such as <s>.")
    echo: bool | None = Field(None, description="Begin each answer with the prompt.")
    best_of: int | None = Field(None, ge=1, le=128, description="Must equal n: candidates are not ranked.")


def _only(required: str, absent: str) -> dict[str, Any]:
    """Schema of an object that has field `required` and lacks field `absent`."""
    return {"required": [required], "properties": {required: {"not": {"type": "null"}}, absent: {"type": "null"}}}


class TokenizeRequest(_Body, Templated):
    """POST /tokenize: a prompt or messages"""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_only("prompt", "messages"), _only("messages", "prompt")]})

    prompt: str | None = Field(None, description="Text to tokenize.")
    messages: Annotated[list[Message], Field(min_length=1)] | None = Field(None, description="Or a conversation.")
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add its own; not with messages.")
    return_token_strs: bool | None = Field(None, description="Report the text of each token too.")


class DetokenizeRequest(_Body):
    """POST /detokenize"""

    tokens: list[TokenId] = Field(description="Token ids to turn into text.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out; false by default.")
