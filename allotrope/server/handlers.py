"""Handlers of the generating routes: they turn a checked body into engine requests and return the response."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence

from allotrope.errors import InvalidRequest
from allotrope.request import Request, SamplingParams
from allotrope.server.answers import Answer, ChatAnswer, CompletionAnswer
from allotrope.server.generation import Delta, Generation, merge
from allotrope.server.logprobs import Report
from allotrope.server.protocol import ChatRequest, CompletionRequest, Prompt
from allotrope.server.request_log import note_prompt
from allotrope.server.respond import GenerationResponse
from allotrope.server.sampling import chat_max_tokens, chat_sampling, completion_sampling
from allotrope.server.state import ServerState, Serving


async def answer_chat(state: ServerState, body: ChatRequest, headers: Mapping[str, str]) -> GenerationResponse:
    """The answer to a conversation. Raises `InvalidRequest`."""
    serving = state.ready()
    params = chat_sampling(body, serving.limits.sampling_defaults)
    _check_count(serving, params.n, f"n={params.n} asks for {params.n} sequences", "n")
    ids = await serving.prompts.read_messages(body.messages, body)
    max_tokens = chat_max_tokens(body)
    ids = serving.prompts.truncate(ids, body.truncate_prompt_tokens, max_tokens or 1)
    if max_tokens is None:
        params = _limit_length(state, params, len(ids)).fitted(len(ids), serving.limits.max_model_len)
    try:
        request = _request(serving, ids, params)
    except InvalidRequest as error:
        raise _in_terms_of_chat(body, error) from None
    _note_prompt(state, ids)
    generation = Generation(request, serving.tokenizer, continues_text=body.continue_final_message or False)
    answer = ChatAnswer(state.model_name, [generation], serving.tokenizer, _report(body, params.logprobs))
    deltas = generation.deltas(serving.engine, serving.metrics)
    return _response(state, body, headers, answer, deltas)


async def answer_completion(
    state: ServerState, body: CompletionRequest, headers: Mapping[str, str]
) -> GenerationResponse:
    """The continuations of one or more prompts. Raises `InvalidRequest`."""
    serving = state.ready()
    params = completion_sampling(body, serving.limits.sampling_defaults)
    count = len(body.prompt) * params.n
    param = "prompt" if len(body.prompt) > 1 else "n"
    _check_count(serving, count, f"prompt has {len(body.prompt)} prompts, with n={params.n} {count} sequences", param)
    generations: list[Generation] = []
    for prompt in body.prompt:
        generations.append(await _read_completion(serving, body, params, prompt, len(generations)))
        _note_prompt(state, generations[-1].request.prompt_ids)
    answer = CompletionAnswer(state.model_name, generations, serving.tokenizer, _report(body, params.logprobs))
    streams = [generation.deltas(serving.engine, serving.metrics) for generation in generations]
    deltas = streams[0] if len(streams) == 1 else merge(streams)
    return _response(state, body, headers, answer, deltas)


async def _read_completion(
    serving: Serving, body: CompletionRequest, params: SamplingParams, prompt: Prompt, index: int
) -> Generation:
    """`index`: of the prompt in the batch."""
    all_ids = await serving.prompts.read_prompt(prompt, add_special_tokens=body.add_special_tokens is not False)
    ids = serving.prompts.truncate(all_ids, body.truncate_prompt_tokens, params.max_tokens or 1)
    request = _request(serving, ids, params)
    echo = None
    if body.echo:
        whole = isinstance(prompt, str) and len(ids) == len(all_ids)
        echo = str(prompt) if whole else serving.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    return Generation(
        request,
        serving.tokenizer,
        continues_text=True,
        echo=echo,
        no_new_tokens=body.max_tokens == 0,
        first_index=index * params.n,
    )


def _response(
    state: ServerState,
    body: ChatRequest | CompletionRequest,
    headers: Mapping[str, str],
    answer: Answer,
    deltas: AsyncGenerator[Delta, None],
) -> GenerationResponse:
    """The response that sends `answer` as its `deltas` arrive. It streams if `body` asks for it."""
    keep_alive = state.config.sse_keep_alive_interval
    return GenerationResponse(
        answer, deltas, stream=body.stream or False, headers=headers, keep_alive_seconds=keep_alive
    )


def _note_prompt(state: ServerState, ids: Sequence[int]) -> None:
    if state.config.enable_log_prompts:
        note_prompt(state.ready().tokenizer.decode(ids, skip_special_tokens=False))


def _limit_length(state: ServerState, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
    """`params` with the server's default for `max_tokens`, if the client set none and the context has room for more."""
    limit = state.default_max_tokens
    if limit is None or params.max_tokens is not None:
        return params
    limit = max(limit, params.min_tokens)
    room = state.ready().limits.max_model_len - prompt_tokens
    return dataclasses.replace(params, max_tokens=limit) if limit < room else params


def _check_count(serving: Serving, count: int, fact: str, param: str) -> None:
    if count > serving.max_sequences:
        raise InvalidRequest(f"{fact}; this server queues {serving.max_sequences} at most (--max-num-waiting).", param)


def _request(serving: Serving, ids: Sequence[int], params: SamplingParams) -> Request:
    request = Request(
        request_id=uuid.uuid4().hex,
        prompt_ids=tuple(ids),
        params=params,
        eos_ids=serving.eos_ids,
        arrival=time.monotonic(),
    )
    request.check(serving.limits.vocab_size, serving.limits.max_model_len)
    return request


def _in_terms_of_chat(body: ChatRequest, error: InvalidRequest) -> InvalidRequest:
    """`error` with the field names that this client used."""
    if error.param == "prompt":
        return InvalidRequest(f"messages: {error}", "messages")
    if error.param == "max_tokens" and body.max_tokens is None:
        return InvalidRequest(str(error).replace("max_tokens", "max_completion_tokens"), "max_completion_tokens")
    return error


def _report(body: ChatRequest | CompletionRequest, logprobs: int | None) -> Report:
    options = body.stream_options
    return Report(
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=body.return_token_ids or False,
        ids_as_tokens=body.return_tokens_as_token_ids or False,
        usage=options is not None and (options.include_usage or False),
        usage_always=options is not None and (options.continuous_usage_stats or False),
    )
