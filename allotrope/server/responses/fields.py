"""The rule of every field that POST /v1/responses knows."""

from __future__ import annotations

from allotrope.server.fields import SAMPLED, Fields, foreign_of_chat
from allotrope.server.rules import Honoured, Misplaced, Only, Renamed, Rule, WithoutEffect

_NO_OWN_TOOLS = "this server runs no tools of its own"
_KNOWN: dict[str, Rule] = {
    **SAMPLED,
    **dict.fromkeys(
        (
            *("model", "input", "instructions", "previous_response_id", "max_output_tokens", "tools", "tool_choice"),
            *("parallel_tool_calls", "text", "reasoning", "include", "top_logprobs", "metadata", "store", "stream"),
            "chat_template_kwargs",
        ),
        Honoured(),
    ),
    "background": Only((False,), "an answer is made while its client waits"),
    "context_management": Only(([],), "a conversation that is too long is refused"),
    "conversation": Only((), "conversations are not objects here; go on from previous_response_id"),
    "max_tool_calls": Only((), _NO_OWN_TOOLS),
    "moderation": Only((), "this server does not moderate"),
    "prompt": Only((), "no prompt templates are kept; write instructions and input"),
    "prompt_cache_key": WithoutEffect("string", "the prefix cache finds equal prefixes without a key"),
    "prompt_cache_options": Only(({}, {"mode": "implicit"}), "the prefix cache has no options in a request"),
    "prompt_cache_retention": Only(("in_memory",), "the prefix cache lives in memory only"),
    "safety_identifier": WithoutEffect("string", "it names the end user for records that this server does not keep"),
    "service_tier": Only(("auto", "default"), "there is one tier of service"),
    "stream_options": Only(({}, {"include_obfuscation": False}), "events are never padded, and the last has the usage"),
    "truncation": Only(("disabled",), "a conversation that is too long is refused"),
    "user": WithoutEffect("string", "it names the end user for records that this server does not keep"),
}
_ELSEWHERE: dict[str, Rule] = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict"), Renamed("max_output_tokens")
    ),
    **dict.fromkeys(("messages", "prompt_ids", "inputs"), Misplaced("write input, or ask /v1/chat/completions")),
    **dict.fromkeys(("system", "system_prompt"), Renamed("instructions")),
    "response_format": Misplaced("write text.format"),
    "reasoning_effort": Misplaced("write reasoning.effort"),
    "verbosity": Misplaced("write text.verbosity"),
    "n": Only((1,), "one answer is made"),
    "logprobs": Misplaced("write include=['message.output_text.logprobs'] and top_logprobs"),
}

RESPONSES = Fields(_KNOWN, foreign_of_chat(_KNOWN, _ELSEWHERE), has_inner=False)
