"""The routes: each one reads and checks its body, then calls the handler that does the work."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from allotrope.errors import InvalidRequest
from allotrope.server import fields
from allotrope.server.body import parse, read_body
from allotrope.server.errors import HttpError
from allotrope.server.handlers import answer_chat, answer_completion
from allotrope.server.openapi import accepts
from allotrope.server.page_routes import add_page_routes
from allotrope.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from allotrope.server.state import ServerState, Serving
from allotrope.server.status_routes import add_status_routes, json_response
from allotrope.server.values import header_value

M = TypeVar("M", bound=BaseModel)
log = logging.getLogger("allotrope.server")


def build_router(state: ServerState) -> APIRouter:
    """All routes of the server. `state`: the state that they share."""
    router = APIRouter()
    for routes in (_generating_routes, _token_routes, _model_routes, add_status_routes):
        routes(router, state)
    add_page_routes(router)
    return router


def _generating_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/chat/completions", openapi_extra=accepts(ChatRequest))
    async def chat_completions(http: HttpRequest) -> Response:
        """Answer a conversation."""
        body, headers = await _read(http, state, ChatRequest, fields.CHAT)
        return await answer_chat(state, body, headers)

    @router.post("/v1/completions", openapi_extra=accepts(CompletionRequest))
    async def completions(http: HttpRequest) -> Response:
        """Continue one or more prompts."""
        body, headers = await _read(http, state, CompletionRequest, fields.COMPLETIONS)
        return await answer_completion(state, body, headers)


def _token_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", openapi_extra=accepts(TokenizeRequest))
    async def tokenize(http: HttpRequest) -> Response:
        """Token ids of a text or of a conversation."""
        body, headers = await _read(http, state, TokenizeRequest, fields.TOKENIZE)
        serving = state.ready()
        ids = await _tokenize(serving, body)
        strings = [serving.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": serving.limits.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return json_response(answer, headers)

    @router.post("/detokenize", openapi_extra=accepts(DetokenizeRequest))
    async def detokenize(http: HttpRequest) -> Response:
        """Text of token ids."""
        body, headers = await _read(http, state, DetokenizeRequest, fields.DETOKENIZE)
        serving = state.ready()
        for token in body.tokens:
            if token >= serving.limits.vocab_size:
                raise InvalidRequest(
                    f"tokens has token id {token}; the vocabulary has ids 0 to {serving.limits.vocab_size - 1}.",
                    "tokens",
                )
        skip = body.skip_special_tokens or False
        return json_response(
            {"prompt": await serving.prompts.write_text(body.tokens, skip_special_tokens=skip)}, headers
        )


def _model_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models")
    async def models() -> Response:
        """The served model, once for each of its names."""
        return json_response({"object": "list", "data": [_model_card(state, name) for name in state.model_names]})

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """The served model."""
        _check_model(state, model_id)
        return json_response(_model_card(state, model_id))


async def _read(
    http: HttpRequest, state: ServerState, model: type[M], known: fields.Fields
) -> tuple[M, dict[str, str]]:
    """The checked body, and a response header with the names of ignored fields.

    `model`: pydantic model of the body. `known`: rules of the body's fields.
    """
    data = await read_body(http, state.config.max_body_bytes)
    body, ignored = await parse(data, model, known, strict=state.config.strict)
    _check_model(state, getattr(body, "model", None))
    if not ignored:
        return body, {}
    names = header_value(ignored)
    log.warning("%s: ignored unknown fields: %s", http.url.path, names)
    return body, {"x-allotrope-ignored-fields": names}


def _check_model(state: ServerState, name: str | None) -> None:
    if name is not None and name not in state.model_names:
        raise HttpError(
            404,
            f"The model {name[:200]!r} does not exist; this server has {', '.join(map(repr, state.model_names))}.",
            "model",
            "model_not_found",
        )


async def _tokenize(serving: Serving, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages is needed, and not both.", "prompt")
    if body.messages is None:
        add_special_tokens = body.add_special_tokens is not False
        return await serving.prompts.read_text(body.prompt or "", add_special_tokens=add_special_tokens)
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens=true is not for messages: the chat template writes the special tokens itself.",
            "add_special_tokens",
        )
    return await serving.prompts.read_messages(body.messages, body)


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "allotrope",
        "root": state.model_name,
        "parent": None,
        "max_model_len": state.ready().limits.max_model_len,
        "sampling_defaults": state.ready().limits.sampling_defaults,
    }
