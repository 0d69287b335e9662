"""The routes of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from allotrope.errors import InvalidRequest
from allotrope.server.checked_body import read_checked
from allotrope.server.conversation import read_conversation, render_conversation
from allotrope.server.message_stream import MessageDelta
from allotrope.server.messages.answer import MessagesAnswer
from allotrope.server.messages.fields import COUNT_TOKENS, MESSAGES
from allotrope.server.messages.protocol import CountTokensRequest, MessagesRequest, ThinkingOff
from allotrope.server.messages.translate import as_conversation
from allotrope.server.openapi import accepts
from allotrope.server.respond import GenerationResponse
from allotrope.server.sampling import plain_sampling
from allotrope.server.state import ServerState
from allotrope.server.status_routes import json_response

_PATH = "/v1/messages"


def add_messages_routes(router: APIRouter, state: ServerState) -> None:
    """Add the routes to `router`."""

    @router.post(_PATH, openapi_extra=accepts(MessagesRequest))
    async def create(http: HttpRequest) -> Response:
        """Answer a conversation, in the form of the Messages API."""
        body, headers = await read_checked(http, state, MessagesRequest, MESSAGES)
        return await _answer(state, body, headers)

    @router.post(_PATH + "/count_tokens", openapi_extra=accepts(CountTokensRequest))
    async def count_tokens(http: HttpRequest) -> Response:
        """The number of tokens of a conversation."""
        body, headers = await read_checked(http, state, CountTokensRequest, COUNT_TOKENS)
        try:
            prompt = await render_conversation(state.ready(), as_conversation(body))
        except InvalidRequest as error:
            raise _in_terms_of_messages(body, error) from None
        return json_response({"input_tokens": len(prompt.ids)}, headers)


async def _answer(
    state: ServerState, body: MessagesRequest, headers: Mapping[str, str]
) -> GenerationResponse[MessageDelta]:
    serving = state.ready()
    stops = [*(body.stop_sequences or ()), *(body.stop or ())]
    params = plain_sampling(
        body.model_copy(update={"stop": stops}), serving.limits.sampling_defaults, max_tokens=body.max_tokens
    )
    try:
        stream = await read_conversation(state, as_conversation(body), params, max_tokens=body.max_tokens)
    except InvalidRequest as error:
        raise _in_terms_of_messages(body, error) from None
    hidden = getattr(body.thinking, "display", None) == "omitted"
    answer = MessagesAnswer(state.model_name, stream, serving.formats.new_call_id, shows_thinking=not hidden)
    return GenerationResponse(
        answer,
        stream.deltas(serving.engine, serving.metrics),
        stream=body.stream or False,
        headers=headers,
        keep_alive_seconds=state.config.sse_keep_alive_interval,
    )


def _in_terms_of_messages(body: MessagesRequest | CountTokensRequest, error: InvalidRequest) -> InvalidRequest:
    """`error` with the field names of this API."""
    if error.param != "reasoning_effort":
        return error
    field = "thinking" if isinstance(body.thinking, ThinkingOff) else "output_config.effort"
    return InvalidRequest(str(error).replace("reasoning_effort", field, 1), field)
