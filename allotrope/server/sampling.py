"""Makes the engine's `SamplingParams` from a request body: applies defaults and checks rules between fields."""

from __future__ import annotations

from allotrope.engine.sampling_defaults import Defaults
from allotrope.errors import InvalidRequest
from allotrope.request import SamplingParams
from allotrope.server.protocol import ChatRequest, CompletionRequest, Sampled, StructuredFields
from allotrope.server.structured import grammar_of
from allotrope.server.values import describe_value

_COMPLETION_TOKENS = 16


def chat_sampling(body: ChatRequest, defaults: Defaults) -> SamplingParams:
    """Sampling parameters of a chat answer.

    `defaults`: sampling defaults of the checkpoint. If neither they nor the client set `max_tokens`, only the context
    limits the answer.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(f"top_logprobs={body.top_logprobs} needs logprobs=true.", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} differ; set one.",
            "max_completion_tokens",
        )
    max_tokens, default = chat_max_tokens(body), defaults.get("max_tokens")
    return _sampling(
        body,
        defaults,
        max_tokens=int(default) if max_tokens is None and default is not None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def chat_max_tokens(body: ChatRequest) -> int | None:
    """The client's `max_tokens` or `max_completion_tokens`."""
    return body.max_completion_tokens if body.max_tokens is None else body.max_tokens


def completion_sampling(body: CompletionRequest, defaults: Defaults) -> SamplingParams:
    """Sampling parameters of a completion.

    `defaults`: sampling defaults of the checkpoint; their `max_tokens` is ignored. The engine always generates a token,
    so max_tokens=0 becomes 1 here.
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


def plain_sampling(
    body: Sampled, defaults: Defaults, *, max_tokens: int | None, logprobs: int | None = None
) -> SamplingParams:
    """Sampling parameters of an answer of another API. `max_tokens`, `logprobs`: what its body asks for."""
    default = defaults.get("max_tokens")
    return _sampling(
        body,
        defaults,
        max_tokens=int(default) if max_tokens is None and default is not None else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=None,
    )


def _sampling(
    body: Sampled,
    defaults: Defaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    if isinstance(body, ChatRequest | CompletionRequest) and body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream=true.", "stream_options")
    values = {name: value for name in _PASSED_ON if (value := getattr(body, name, None)) is not None}
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0)
    return SamplingParams(
        **{**defaults, **values, "max_tokens": max_tokens},
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(body) if isinstance(body, StructuredFields) else None,
    )


# These fields have the same name, meaning and neutral value in a body and in `SamplingParams`.
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


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidRequest(f"logit_bias has the key {describe_value(key)}; keys are token ids.", "logit_bias")
    found = {int(key): bias for key, bias in biases.items()}
    if len(found) < len(biases):
        twice = next(key for key in biases if str(int(key)) != key)
        raise InvalidRequest(f"logit_bias has token {int(twice)} twice, once as {twice!r}.", "logit_bias")
    return found
