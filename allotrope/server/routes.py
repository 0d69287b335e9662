"""The routes: each one reads and checks its body, then calls the handler that does the work."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from allotrope.errors import InvalidRequest
from allotrope.server import fields
from allotrope.server.chat_body import chat_conversation
from allotrope.server.checked_body import check_model, read_checked
from allotrope.server.conversation import render_conversation
from allotrope.server.handlers import answer_chat, answer_completion
from allotrope.server.messages.routes import add_messages_routes
from allotrope.server.openapi import accepts
from allotrope.server.page_routes import add_page_routes
from allotrope.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Templated, TokenizeRequest
from allotrope.server.responses.routes import add_responses_routes
from allotrope.server.sleep_routes import add_sleep_routes
from allotrope.server.state import ServerState, Serving
from allotrope.server.status_routes import add_status_routes, json_response

_POOLING = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/pooling", "/classify")


def build_router(state: ServerState) -> APIRouter:
    """All routes of the server. `state`: the state that they share."""
    router = APIRouter()
    for routes in (
        _generating_routes,
        add_responses_routes,
        add_messages_routes,
        _token_routes,
        _model_routes,
        _refused_routes,
        add_status_routes,
        add_sleep_routes,
    ):
        routes(router, state)
    add_page_routes(router)
    return router


def _generating_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/chat/completions", openapi_extra=accepts(ChatRequest))
    async def chat_completions(http: HttpRequest) -> Response:
        """Answer a conversation."""
        body, headers = await read_checked(http, state, ChatRequest, fields.CHAT)
        return await answer_chat(state, body, headers)

    @router.post("/v1/completions", openapi_extra=accepts(CompletionRequest))
    async def completions(http: HttpRequest) -> Response:
        """Continue one or more prompts."""
        body, headers = await read_checked(http, state, CompletionRequest, fields.COMPLETIONS)
        return await answer_completion(state, body, headers)


def _token_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", openapi_extra=accepts(TokenizeRequest))
    async def tokenize(http: HttpRequest) -> Response:
        """Token ids of a text or of a conversation."""
        body, headers = await read_checked(http, state, TokenizeRequest, fields.TOKENIZE)
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
        body, headers = await read_checked(http, state, DetokenizeRequest, fields.DETOKENIZE)
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
        check_model(state, model_id)
        return json_response(_model_card(state, model_id))


async def _tokenize(serving: Serving, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages is needed, and not both.", "prompt")
    if body.messages is None:
        if options := sorted(name for name in Templated.model_fields if getattr(body, name) is not None):
            raise InvalidRequest(f"{options[0]} is for messages: a prompt is not written by a template.", options[0])
        add_special_tokens = body.add_special_tokens is not False
        return await serving.prompts.read_text(body.prompt or "", add_special_tokens=add_special_tokens)
    if body.add_special_tokens:
        raise InvalidRequest(
            "add_special_tokens=true is not for messages: the chat template writes the special tokens itself.",
            "add_special_tokens",
        )
    return (await render_conversation(serving, chat_conversation(body))).ids


def _refused_routes(router: APIRouter, state: ServerState) -> None:
    """Routes of pooling models."""

    async def refuse(http: HttpRequest) -> Response:
        raise InvalidRequest(
            f"{http.url.path} is not served: this server generates. Its engine gives tokens and log-probabilities, and "
            "no hidden states to pool; /v1/completions with echo and logprobs scores a text."
        )

    for path in _POOLING:
        router.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)


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
