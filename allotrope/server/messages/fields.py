"""The rule of every field that POST /v1/messages and POST /v1/messages/count_tokens know."""

from __future__ import annotations

from allotrope.server.fields import SAMPLED, Fields, foreign_of_chat
from allotrope.server.rules import Honoured, Misplaced, Only, Renamed, Rule, WithoutEffect

_CONVERSATION: dict[str, Rule] = {
    **dict.fromkeys(
        ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"),
        Honoured(),
    ),
    "cache_control": WithoutEffect("object", "the prefix cache finds equal prefixes without marks"),
    "container": Only((), "this server runs no tools of its own"),
    "context_management": Only(({}, {"edits": []}), "a conversation that is too long is refused"),
    "mcp_servers": Only(([],), "this server runs no tools of its own"),
    "speed": Only(("standard",), "there is one speed"),
    "thread": Only((), "conversations are not kept here; send the whole conversation"),
    "user_profile_id": WithoutEffect("string", "it names the end user for records that this server does not keep"),
    "workspace_id": WithoutEffect("string", "it names a group of users for records that this server does not keep"),
}
_KNOWN: dict[str, Rule] = {
    **SAMPLED,
    **_CONVERSATION,
    **dict.fromkeys(("max_tokens", "stop_sequences", "stream"), Honoured()),
    "diagnostics": Only((), "this server does not report it"),
    "inference_geo": WithoutEffect("string", "the server is where it is"),
    "metadata": WithoutEffect("object", "it names the end user for records that this server does not keep"),
    "service_tier": Only(("auto", "standard_only"), "there is one tier of service"),
}
_ELSEWHERE: dict[str, Rule] = {
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_new_tokens"), Renamed("max_tokens")),
    "stop_sequence": Renamed("stop_sequences"),
    **dict.fromkeys(("prompt", "input"), Misplaced("write messages")),
    "instructions": Renamed("system"),
    "output_format": Misplaced("write output_config.format"),
    "response_format": Misplaced("write output_config.format"),
    "n": Only((1,), "one answer is made"),
    "logprobs": Only((False,), "ask /v1/chat/completions for log-probabilities"),
}

MESSAGES = Fields(_KNOWN, foreign_of_chat(_KNOWN, _ELSEWHERE), has_inner=False)
# A client may send a whole body to be counted; what concerns the answer does not change the count.
COUNT_TOKENS = Fields(
    _CONVERSATION,
    {
        **{name: rule for name, rule in MESSAGES.foreign.items() if name in ("prompt", "input")},
        "output_format": _ELSEWHERE["output_format"],
    },
    has_inner=False,
)
