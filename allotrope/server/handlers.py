"""Handlers of the generating routes: they turn a checked body into engine requests and return the response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

from allotrope.request import SamplingParams
from allotrope.server.answers import Answer, CompletionAnswer
from allotrope.server.chat_answer import ChatAnswer
from allotrope.server.chat_body import chat_conversation
from allotrope.server.conversation import read_conversation
from allotrope.server.engine_request import check_count, log_prompt, make_request
from allotrope.server.generation import Delta, Generation, merge
from allotrope.server.logprobs import Report
from allotrope.server.message_stream import MessageDelta
from allotrope.server.protocol import ChatRequest, CompletionRequest, Prompt
from allotrope.server.respond import GenerationResponse
from allotrope.server.sampling import chat_max_tokens, chat_sampling, completion_sampling
from allotrope.server.state import ServerState, Serving

D = TypeVar("D", Delta, MessageDelta)


async def answer_chat(
    state: ServerState, body: ChatRequest, headers: Mapping[str, str]
) -> GenerationResponse[MessageDelta]:
    """The answer to a conversation. Raises `InvalidRequest`."""
    serving = state.ready()
    params = chat_sampling(body, serving.limits.sampling_defaults)
    stream = await read_conversation(
        state,
        chat_conversation(body),
        params,
        max_tokens=chat_max_tokens(body),
        truncate=body.truncate_prompt_tokens,
        length_field="max_completion_tokens" if body.max_tokens is None else "max_tokens",
    )
    answer = ChatAnswer(state.model_name, stream, serving.tokenizer, _report(body, params.logprobs), serving.formats)
    return _response(state, body, headers, answer, stream.deltas(serving.engine, serving.metrics))


async def answer_completion(
    state: ServerState, body: CompletionRequest, headers: Mapping[str, str]
) -> GenerationResponse[Delta]:
    """The continuations of one or more prompts. Raises `InvalidRequest`."""
    serving = state.ready()
    params = completion_sampling(body, serving.limits.sampling_defaults)
    count = len(body.prompt) * params.n
    param = "prompt" if len(body.prompt) > 1 else "n"
    check_count(serving, count, f"prompt has {len(body.prompt)} prompts, with n={params.n} {count} sequences", param)
    generations: list[Generation] = []
    for prompt in body.prompt:
        generations.append(await _read_completion(serving, body, params, prompt, len(generations)))
        log_prompt(state, generations[-1].request.prompt_ids)
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
    request = make_request(serving, ids, params)
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
    answer: Answer[D],
    deltas: AsyncGenerator[D, None],
) -> GenerationResponse[D]:
    """The response that sends `answer` as its `deltas` arrive. It streams if `body` asks for it."""
    keep_alive = state.config.sse_keep_alive_interval
    return GenerationResponse(
        answer, deltas, stream=body.stream or False, headers=headers, keep_alive_seconds=keep_alive
    )


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
