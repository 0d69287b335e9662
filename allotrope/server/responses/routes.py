"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from allotrope.errors import InvalidRequest
from allotrope.server.checked_body import read_checked
from allotrope.server.conversation import read_conversation
from allotrope.server.errors import HttpError
from allotrope.server.guard import sent_key
from allotrope.server.message_stream import MessageDelta
from allotrope.server.openapi import accepts
from allotrope.server.respond import GenerationResponse
from allotrope.server.responses.answer import ResponsesAnswer, reports_logprobs
from allotrope.server.responses.fields import RESPONSES
from allotrope.server.responses.protocol import ResponsesRequest
from allotrope.server.responses.store import ResponseStore
from allotrope.server.responses.translate import as_conversation, read_input
from allotrope.server.sampling import plain_sampling
from allotrope.server.state import ServerState
from allotrope.server.status_routes import json_response

_PATH = "/v1/responses"


def add_responses_routes(router: APIRouter, state: ServerState) -> None:
    """Add the routes to `router`. The answers are kept for as long as `state` lives."""
    store = ResponseStore(state.config.response_store_entries, state.config.response_store_bytes)

    @router.post(_PATH, openapi_extra=accepts(ResponsesRequest))
    async def create(http: HttpRequest) -> Response:
        """Answer input items, perhaps going on from an earlier answer."""
        body, headers = await read_checked(http, state, ResponsesRequest, RESPONSES)
        return await _answer(state, store, body, headers, sent_key(http.scope))

    @router.get(_PATH + "/{response_id}")
    async def retrieve(http: HttpRequest, response_id: str) -> Response:
        """An earlier answer that is kept."""
        if http.query_params.get("stream", "false") != "false":
            raise InvalidRequest("stream is not supported here: the answer is complete.", "stream")
        response = store.response(sent_key(http.scope), response_id)
        if response is None:
            raise _not_kept(response_id)
        return json_response(response)

    @router.delete(_PATH + "/{response_id}")
    async def delete(http: HttpRequest, response_id: str) -> Response:
        """Keep an earlier answer no longer."""
        if not store.delete(sent_key(http.scope), response_id):
            raise _not_kept(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


async def _answer(
    state: ServerState, store: ResponseStore, body: ResponsesRequest, headers: Mapping[str, str], key: bytes
) -> GenerationResponse[MessageDelta]:
    serving = state.ready()
    messages = read_input(body, _earlier(store, body, key))
    scored = reports_logprobs(body)
    params = plain_sampling(
        body,
        serving.limits.sampling_defaults,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if scored else None,
    )
    try:
        stream = await read_conversation(
            state,
            as_conversation(body, messages),
            params,
            max_tokens=body.max_output_tokens,
            length_field="max_output_tokens",
        )
    except InvalidRequest as error:
        raise _in_terms_of_input(error) from None

    def keep(response: dict[str, Any], message: dict[str, Any]) -> bool:
        return body.store is not False and store.put(key, response, [*messages, message])

    answer = ResponsesAnswer(state.model_name, body, stream, serving.tokenizer, serving.formats.new_call_id, keep)
    return GenerationResponse(
        answer,
        stream.deltas(serving.engine, serving.metrics),
        stream=body.stream or False,
        headers=headers,
        keep_alive_seconds=state.config.sse_keep_alive_interval,
    )


def _earlier(store: ResponseStore, body: ResponsesRequest, key: bytes) -> list[dict[str, Any]]:
    """The conversation that `body` goes on from."""
    if body.previous_response_id is None:
        return []
    messages = store.messages(key, body.previous_response_id)
    if messages is None:
        raise HttpError(
            400,
            f"previous_response_id={body.previous_response_id[:100]!r} is not kept (any more): send the whole "
            "conversation as input.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return messages


def _not_kept(response_id: str) -> HttpError:
    return HttpError(404, f"The response {response_id[:100]!r} is not kept (any more).", "response_id")


def _in_terms_of_input(error: InvalidRequest) -> InvalidRequest:
    """`error` with the field names of this API."""
    if (error.param or "").startswith("messages"):
        return InvalidRequest(f"input: {str(error).removeprefix('messages: ')}", "input")
    if error.param == "reasoning_effort":
        return InvalidRequest(str(error).replace("reasoning_effort=", "reasoning.effort=", 1), "reasoning.effort")
    return error
