"""Makes the engine's `Request` of prompt ids and parameters, within the limits of the server."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allotrope.errors import InvalidRequest
from allotrope.request import Request, SamplingParams
from allotrope.server.request_log import note_prompt

if TYPE_CHECKING:
    from allotrope.server.state import ServerState, Serving


def make_request(serving: Serving, ids: Sequence[int], params: SamplingParams) -> Request:
    """The request for the prompt `ids`. Raises `InvalidRequest` if the model can never run it."""
    request = Request(
        request_id=uuid.uuid4().hex,
        prompt_ids=tuple(ids),
        params=params,
        eos_ids=serving.eos_ids,
        arrival=time.monotonic(),
    )
    request.check(serving.limits.vocab_size, serving.limits.max_model_len)
    return request


def check_count(serving: Serving, count: int, fact: str, param: str) -> None:
    """Raise `InvalidRequest` if one request asks for more sequences than the server queues."""
    if count > serving.max_sequences:
        raise InvalidRequest(f"{fact}; this server queues {serving.max_sequences} at most (--max-num-waiting).", param)


def limit_length(state: ServerState, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
    """`params` of a client that set no `max_tokens`: with the server's default, or what the context leaves."""
    limit = state.default_max_tokens
    max_model_len = state.ready().limits.max_model_len
    if limit is not None and params.max_tokens is None:
        limit = max(limit, params.min_tokens)
        if limit < max_model_len - prompt_tokens:
            params = dataclasses.replace(params, max_tokens=limit)
    return params.fitted(prompt_tokens, max_model_len)


def log_prompt(state: ServerState, ids: Sequence[int]) -> None:
    """Give the prompt to the log of requests, if the operator wants prompts there."""
    if state.config.enable_log_prompts:
        note_prompt(state.ready().tokenizer.decode(ids, skip_special_tokens=False))
