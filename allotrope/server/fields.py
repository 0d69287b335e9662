"""Tables of every request field that the API knows, one for each route, with the rule that holds for its value.

A field is honoured (a model in `protocol` declares it, and it has an effect), accepted without effect (no value changes
the answer), or limited to neutral values (other values are refused with the reason). `foreign_fields` has the fields by
which other engines change an answer; they are refused with a hint. null means that a field is left out.
A field in none of these tables is unknown: --strict refuses it, otherwise a response header names it. In messages,
tools and stream_options an unknown field is always refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.server import foreign_fields as foreign
from allotrope.server.rules import Honoured, Misplaced, Only, Renamed, Rule, WithoutEffect, check_value
from allotrope.server.values import describe_value

_OLD_TOOLS = "it is the old form of tools"
_NO_BUILT_IN_TOOLS = "this server has no tools of its own"
_NO_BEAM = "beam search is not offered"
_OF_CLIENTS = WithoutEffect("object", "clients add it to messages that they send back, and templates do not read it")

# Of every route that generates.
SAMPLED: dict[str, Rule] = {
    "temperature": Honoured(),
    "top_p": Honoured(),
    "top_k": Honoured(),
    "min_p": Honoured(),
    "presence_penalty": Honoured(),
    "frequency_penalty": Honoured(),
    "repetition_penalty": Honoured(),
    "seed": Honoured(),
    "stop": Honoured(),
    "stop_token_ids": Honoured(),
    "include_stop_str_in_output": Honoured(),
    "min_tokens": Honoured(),
    "ignore_eos": Honoured(),
    "logit_bias": Honoured(),
    "allowed_token_ids": Honoured(),
}

_SAMPLING: dict[str, Rule] = {
    **SAMPLED,
    "max_tokens": Honoured(),
    "n": Honoured(),
    "logprobs": Honoured(),
    "prompt_logprobs": Honoured(),
    "skip_special_tokens": Honoured(),
    "best_of": Only((), "candidates are not ranked; ask for n"),
    "use_beam_search": Only((False,), _NO_BEAM),
    "length_penalty": Only((1.0,), _NO_BEAM),
    "early_stopping": Only((False,), _NO_BEAM),
    "bad_words": Only(([],), "words cannot be banned; give their tokens a logit_bias of -100"),
    "spaces_between_special_tokens": Only((True,), "special tokens are always set apart as the tokenizer does"),
    "logits_processors": Only(([],), "code in requests is not run"),
    "thinking_token_budget": Only((), "reasoning is not cut short; see reasoning_effort"),
}

_COMMON: dict[str, Rule] = {
    "model": Honoured(),
    "stream": Honoured(),
    "stream_options": Honoured(),
    "truncate_prompt_tokens": Honoured(),
    "return_token_ids": Honoured(),
    "return_tokens_as_token_ids": Honoured(),
    "user": WithoutEffect("string", "it names the end user for records that this server does not keep"),
    "priority": Only((0,), "requests are served in the order of their arrival"),
    "request_id": Only((), "ids are chosen by the server"),
    "cache_salt": Only((), "the prefix cache cannot be split between users"),
    "structured_outputs": Honoured(),
    "guided_json": Honoured(),
    "guided_regex": Honoured(),
    "guided_choice": Honoured(),
    "guided_grammar": Honoured(),
    "guided_decoding_backend": Only((), "the operator chooses it (--structured-outputs-backend)"),
    "response_format": Honoured(),
    "kv_transfer_params": Only((), "caches are not moved between servers"),
    "vllm_xargs": Only(({},), "there are no extension arguments"),
}

_CHAT: dict[str, Rule] = {
    **_SAMPLING,
    **_COMMON,
    "messages": Honoured(),
    "max_completion_tokens": Honoured(),
    "top_logprobs": Honoured(),
    "add_generation_prompt": Honoured(),
    "continue_final_message": Honoured(),
    "chat_template_kwargs": Honoured(),
    "add_special_tokens": Only((False,), "the chat template writes the special tokens itself"),
    "echo": Only((False,), "a chat answer does not repeat the prompt; ask for return_token_ids"),
    "metadata": WithoutEffect("object", "it labels stored completions, and none are stored"),
    "safety_identifier": WithoutEffect("string", "it names the end user for records that this server does not keep"),
    "prompt_cache_key": WithoutEffect("string", "the prefix cache finds equal prefixes without a key"),
    "store": Only((False,), "completions are not stored"),
    "service_tier": Only(("auto", "default"), "there is one tier of service"),
    "prompt_cache_retention": Only(("in_memory",), "the prefix cache lives in memory only"),
    "prompt_cache_options": Only(({}, {"mode": "implicit"}), "the prefix cache has no options in a request"),
    "modalities": Only((["text"],), "this server writes text only"),
    "verbosity": Only(("medium",), "say it in the prompt"),
    "reasoning_effort": Honoured(),
    "reasoning": Only((), "write reasoning_effort"),
    "include_reasoning": Honoured(),
    "tools": Honoured(),
    "tool_choice": Honoured(),
    "parallel_tool_calls": Honoured(),
    "functions": Only(([],), f"{_OLD_TOOLS}; write tools"),
    "function_call": Only(("none", "auto"), f"{_OLD_TOOLS}; write tools and tool_choice"),
    "web_search_options": Only((), _NO_BUILT_IN_TOOLS),
    "audio": Only((), "this server writes text only"),
    "moderation": Only((), "this server does not moderate"),
    "prediction": Only((), "predicted output is not used"),
    "chat_template": Only((), "templates are run as code, so only the operator sets one (--chat-template)"),
    "documents": Only(([],), "pass them in chat_template_kwargs if the model's template reads them"),
    "mm_processor_kwargs": Only(({},), "this server reads text only"),
}

_COMPLETIONS: dict[str, Rule] = {
    **_SAMPLING,
    **_COMMON,
    "prompt": Honoured(),
    "add_special_tokens": Honoured(),
    "echo": Honoured(),
    "best_of": Honoured(),
    "suffix": Only(("",), "text cannot be filled in before a suffix"),
    "prompt_embeds": Only((), "prompts are text or token ids"),
}

_TOKENIZE: dict[str, Rule] = {
    "model": Honoured(),
    "prompt": Honoured(),
    "messages": Honoured(),
    "add_special_tokens": Honoured(),
    "return_token_strs": Honoured(),
    "add_generation_prompt": Honoured(),
    "continue_final_message": Honoured(),
    "chat_template_kwargs": Honoured(),
    "chat_template": _CHAT["chat_template"],
    "tools": Honoured(),
    "reasoning_effort": Honoured(),
    "mm_processor_kwargs": _CHAT["mm_processor_kwargs"],
}

_DETOKENIZE: dict[str, Rule] = {"model": Honoured(), "tokens": Honoured(), "skip_special_tokens": Honoured()}

_MESSAGE: dict[str, Rule] = {
    "role": Honoured(),
    "content": Honoured(),
    "name": Honoured(),
    "reasoning_content": Honoured(),
    "refusal": Only((), "the model's refusals are plain content"),
    "audio": Only((), "this server reads text only"),
    "reasoning": Honoured(),
    "tool_calls": Honoured(),
    "tool_call_id": Honoured(),
    "function_call": Only((), f"{_OLD_TOOLS}; write tool_calls"),
    "annotations": Only(([],), "nothing is cited"),
    "provider_specific_fields": _OF_CLIENTS,
}
_PART: dict[str, Rule] = {"type": Honoured(), "text": Honoured()}
_TOOL_CALL: dict[str, Rule] = {
    "id": Honoured(),
    "type": Honoured(),
    "function": Honoured(),
    "index": WithoutEffect("integer", "calls are in the order of the list"),
    "provider_specific_fields": _OF_CLIENTS,
}
_FUNCTION_CALL: dict[str, Rule] = {"name": Honoured(), "arguments": Honoured()}
_TOOL: dict[str, Rule] = {"type": Honoured(), "function": Honoured()}
_FUNCTION: dict[str, Rule] = {
    "name": Honoured(),
    "description": Honoured(),
    "parameters": Honoured(),
    "strict": Honoured(),
}
_CHOSEN_FUNCTION: dict[str, Rule] = {"name": Honoured()}
_STREAM_OPTIONS: dict[str, Rule] = {
    "include_usage": Honoured(),
    "continuous_usage_stats": Honoured(),
    "include_obfuscation": Only((False,), "chunks are never padded"),
}


def _of_the_other_route(table: Mapping[str, Rule], other: Mapping[str, Rule], path: str) -> dict[str, Rule]:
    """Rules for the fields that only the other route reads. `table`: this route's; `other`: the one of `path`."""
    misplaced = Misplaced(f"it is one of {path}")
    return {
        name: rule if isinstance(rule, Only) else misplaced
        for name, rule in other.items()
        if name not in table and not isinstance(rule, WithoutEffect)
    }


def foreign_of_chat(known: Mapping[str, Rule], own: Mapping[str, Rule]) -> dict[str, Rule]:
    """The foreign fields of another API that answers conversations: `own` and those of a chat, but for those whose
    name or advice does not hold there. `known`: the fields of that API.
    """
    return dict(own) | {
        name: rule
        for name, rule in foreign.CHAT.items()
        if name not in known
        and name not in own
        and not (isinstance(rule, Renamed) and not isinstance(known.get(rule.to), Honoured))
    }


@dataclass(frozen=True)
class Fields:
    """Rules of one body's fields. `known`: fields of this API. `foreign`: fields of other engines.

    `has_inner`: objects within the body have tables here. Otherwise their models say what is known, see `inner`.
    """

    known: Mapping[str, Rule]
    foreign: Mapping[str, Rule]
    has_inner: bool = True


CHAT = Fields(_CHAT, _of_the_other_route(_CHAT, _COMPLETIONS, "/v1/completions") | foreign.CHAT)
COMPLETIONS = Fields(
    _COMPLETIONS, _of_the_other_route(_COMPLETIONS, _CHAT, "/v1/chat/completions") | foreign.COMPLETIONS
)
TOKENIZE = Fields(_TOKENIZE, foreign.TOKENIZE)
DETOKENIZE = Fields(_DETOKENIZE, foreign.DETOKENIZE)
MESSAGE = Fields(_MESSAGE, foreign.MESSAGE)
PART = Fields(_PART, {})
TOOL_CALL = Fields(_TOOL_CALL, {})
FUNCTION_CALL = Fields(_FUNCTION_CALL, {})
TOOL = Fields(_TOOL, {})
FUNCTION = Fields(_FUNCTION, {})
CHOSEN_FUNCTION = Fields(_CHOSEN_FUNCTION, {})
STREAM_OPTIONS = Fields(_STREAM_OPTIONS, {})


def unknown_fields(body: Mapping[str, Any], fields: Fields) -> list[str]:
    """The fields of `body` that are in neither table of `fields` and are not null.

    Raises `InvalidRequest` for a refused value, and for an unknown field within messages, tools or stream_options.
    """
    unknown = _check(body, fields)
    if not fields.has_inner:
        return unknown
    for path, inner, inner_fields in _inner_objects(body):
        for name in _check(inner, inner_fields, f"{path}."):
            allowed = ", ".join(name for name, rule in inner_fields.known.items() if isinstance(rule, Honoured))
            raise InvalidRequest(
                f"{path} has the unknown field {describe_value(name)}. Allowed: {allowed}.", f"{path}.{name[:60]}"
            )
    return unknown


def _check(body: Mapping[str, Any], fields: Fields, prefix: str = "") -> list[str]:
    """Check each field by its rule. Returns the fields that have a value and no rule."""
    unknown = []
    for name, value in body.items():
        rule = fields.known.get(name) or fields.foreign.get(name)
        if rule is not None:
            check_value(name, body, rule, prefix + name)
        elif value is not None:
            unknown.append(name)
    return unknown


def _inner_objects(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Fields]]:
    """The objects within a body that have tables of their own: path, object and table."""
    if isinstance(options := body.get("stream_options"), dict):
        yield "stream_options", options, STREAM_OPTIONS
    for index, message in _objects(body.get("messages")):
        yield from _in_message(f"messages[{index}]", message)
    for index, tool in _objects(body.get("tools")):
        # The pydantic model refuses tools of other types, and parts of other types below.
        if tool.get("type") == "function":
            yield from _with_function(f"tools[{index}]", tool, TOOL, FUNCTION)
    if isinstance(choice := body.get("tool_choice"), dict) and choice.get("type") == "function":
        yield from _with_function("tool_choice", choice, TOOL, CHOSEN_FUNCTION)


def _in_message(path: str, message: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Fields]]:
    yield path, message, MESSAGE
    for index, part in _objects(message.get("content")):
        if part.get("type") == "text":
            yield f"{path}.content[{index}]", part, PART
    for index, call in _objects(message.get("tool_calls")):
        yield from _with_function(f"{path}.tool_calls[{index}]", call, TOOL_CALL, FUNCTION_CALL)


def _with_function(
    path: str, holder: Mapping[str, Any], fields: Fields, inner: Fields
) -> Iterator[tuple[str, Mapping[str, Any], Fields]]:
    """An object of table `fields` and the function within it, of table `inner`."""
    yield path, holder, fields
    if isinstance(function := holder.get("function"), dict):
        yield f"{path}.function", function, inner


def _objects(value: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Index and value of the objects in `value`, if it is a list."""
    if isinstance(value, list):
        yield from ((index, item) for index, item in enumerate(value) if isinstance(item, dict))
