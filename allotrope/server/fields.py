"""Every request field that the API knows, and what becomes of it: one table per route.

A field is honoured (the models in `protocol` declare it and it has an effect), accepted without effect (any value means
the same here), or limited to neutral values (anything else is refused with the reason). null always means "not given".
A field in none of these is unknown: refused under --strict, else named in a response header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allotrope.errors import InvalidRequest
from allotrope.server.values import describe_value, same_value


@dataclass(frozen=True)
class Honoured:
    """Has the effect that its help text in `protocol` states."""


@dataclass(frozen=True)
class WithoutEffect:
    """Taken in any value of a JSON type, because none could change the answer."""

    json_type: str
    why: str


@dataclass(frozen=True)
class Only:
    """Taken in `values` only, all of which ask for what this server does anyway; others are refused because `why`."""

    values: tuple[Any, ...]
    why: str


Rule = Honoured | WithoutEffect | Only

_NO_TOOLS = "this server does not call tools"
_NO_GRAMMAR = "output cannot be held to a schema or grammar by this server"
_NO_BEAM = "beam search is not offered"

_SAMPLING: dict[str, Rule] = {
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
    "max_tokens": Honoured(),
    "ignore_eos": Honoured(),
    "logit_bias": Honoured(),
    "allowed_token_ids": Honoured(),
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
    "thinking_token_budget": Only((), "reasoning is not told apart from the answer"),
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
    "structured_outputs": Only((), _NO_GRAMMAR),
    "guided_json": Only((), _NO_GRAMMAR),
    "guided_regex": Only((), _NO_GRAMMAR),
    "guided_choice": Only((), _NO_GRAMMAR),
    "guided_grammar": Only((), _NO_GRAMMAR),
    "guided_decoding_backend": Only((), _NO_GRAMMAR),
    "response_format": Only(({"type": "text"},), _NO_GRAMMAR),
    "kv_transfer_params": Only((), "caches are not moved between servers"),
    "vllm_xargs": Only(({},), "there are no extension arguments"),
}

CHAT: dict[str, Rule] = {
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
    "prompt_cache_key": WithoutEffect("string", "the prefix cache finds equal beginnings by itself"),
    "parallel_tool_calls": WithoutEffect("boolean", "no tools are called, in parallel or not"),
    "store": Only((False,), "completions are not stored"),
    "service_tier": Only(("auto", "default"), "there is one tier of service"),
    "prompt_cache_retention": Only(("in_memory",), "the prefix cache lives in memory only"),
    "prompt_cache_options": Only(({}, {"mode": "implicit"}), "the prefix cache works by itself"),
    "modalities": Only((["text"],), "this server writes text only"),
    "verbosity": Only(("medium",), "say it in the prompt"),
    "reasoning_effort": Only((), "pass it in chat_template_kwargs if the model's template reads it"),
    "reasoning": Only((), "pass it in chat_template_kwargs if the model's template reads it"),
    "include_reasoning": Only((True,), "reasoning is not told apart from the answer"),
    "tools": Only(([],), _NO_TOOLS),
    "tool_choice": Only(("none", "auto"), _NO_TOOLS),
    "functions": Only(([],), _NO_TOOLS),
    "function_call": Only(("none", "auto"), _NO_TOOLS),
    "web_search_options": Only((), _NO_TOOLS),
    "audio": Only((), "this server writes text only"),
    "moderation": Only((), "this server does not moderate"),
    "prediction": Only((), "predicted output is not used"),
    "chat_template": Only((), "templates are run as code, so only the operator sets one (--chat-template)"),
    "documents": Only(([],), "pass them in chat_template_kwargs if the model's template reads them"),
    "mm_processor_kwargs": Only(({},), "this server reads text only"),
}

COMPLETIONS: dict[str, Rule] = {
    **_SAMPLING,
    **_COMMON,
    "prompt": Honoured(),
    "add_special_tokens": Honoured(),
    "echo": Honoured(),
    "best_of": Honoured(),
    "suffix": Only(("",), "text cannot be filled in before a suffix"),
    "prompt_embeds": Only((), "prompts are text or token ids"),
}

TOKENIZE: dict[str, Rule] = {
    "model": Honoured(),
    "prompt": Honoured(),
    "messages": Honoured(),
    "add_special_tokens": Honoured(),
    "return_token_strs": Honoured(),
    "add_generation_prompt": Honoured(),
    "continue_final_message": Honoured(),
    "chat_template_kwargs": Honoured(),
    "chat_template": CHAT["chat_template"],
    "tools": CHAT["tools"],
    "mm_processor_kwargs": CHAT["mm_processor_kwargs"],
}

DETOKENIZE: dict[str, Rule] = {"model": Honoured(), "tokens": Honoured(), "skip_special_tokens": Honoured()}


def unknown_fields(body: Mapping[str, Any], table: Mapping[str, Rule]) -> list[str]:
    """The fields of `body` that `table` does not hold; raises `InvalidRequest` for a value that is refused."""
    unknown = []
    for name, value in body.items():
        rule = table.get(name)
        if rule is None:
            unknown.append(name)
        elif value is not None:
            _check(name, value, rule)
    return unknown


def _check(name: str, value: Any, rule: Rule) -> None:
    match rule:
        case Only(values, why) if not any(same_value(value, neutral) for neutral in values):
            allowed = " or ".join([describe_value(neutral) for neutral in values] + ["leaving it out"])
            raise InvalidRequest(f"{name}={describe_value(value)} is not supported: {why}. Allowed: {allowed}.", name)
        case WithoutEffect(json_type, _) if not isinstance(value, _PYTHON_TYPES[json_type]):
            raise InvalidRequest(f"{name}={describe_value(value)} is not valid: a JSON {json_type} is needed.", name)


_PYTHON_TYPES: dict[str, type] = {"string": str, "object": dict, "boolean": bool}


def schema_of(rule: WithoutEffect | Only) -> dict[str, Any]:
    """The JSON schema of a field that is not honoured."""
    if isinstance(rule, WithoutEffect):
        return {"type": [rule.json_type, "null"], "description": f"Without effect: {rule.why}."}
    return {"enum": [*rule.values, None], "description": f"Limited: {rule.why}."}
