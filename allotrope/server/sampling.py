"""From a request body to the engine's `SamplingParams`: defaults, and rules between fields."""

from __future__ import annotations

from allotrope.engine.sampling_defaults import Defaults
from allotrope.errors import InvalidRequest
from allotrope.request import SamplingParams
from allotrope.server.protocol import ChatRequest, CompletionRequest
from allotrope.server.values import describe_value

_COMPLETION_TOKENS = 16


def chat_sampling(body: ChatRequest, defaults: Defaults) -> SamplingParams:
    """How a chat answer is sampled.

    `defaults`: of the checkpoint. Where neither it nor the client limits the length, the context alone does.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(f"top_logprobs={body.top_logprobs} needs logprobs=true.", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} differ; set one.",
            "max_completion_tokens",
        )
    asked, usual = chat_length(body), defaults.get("max_tokens")
    return _sampling(
        body,
        defaults,
        max_tokens=int(usual) if asked is None and usual is not None else asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def chat_length(body: ChatRequest) -> int | None:
    """The limit that the client sets to the length of the answer, by either name."""
    return body.max_completion_tokens if body.max_tokens is None else body.max_tokens


def completion_sampling(body: CompletionRequest, defaults: Defaults) -> SamplingParams:
    """How a completion is sampled.

    `defaults`: of the checkpoint; they do not set a completion's length. The engine always generates: for max_tokens=0
    it is asked for one token.
    """
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest(
            f"best_of={body.best_of} is not supported with n={body.n or 1}: candidates are not ranked.", "best_of"
        )
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return _sampling(
        body,
        defaults,
        max_tokens=_COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(
    body: ChatRequest | CompletionRequest,
    defaults: Defaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream=true.", "stream_options")
    given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)
    return SamplingParams(
        **{**defaults, **given, "max_tokens": max_tokens},
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


# Fields of the same name, meaning and disabled value in a body and in `SamplingParams`.
_PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias has the key {describe_value(key)}; keys are token ids.", "logit_bias")
    return {int(key): bias for key, bias in given.items()}
