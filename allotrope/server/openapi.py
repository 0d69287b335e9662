"""The OpenAPI description. Its schemas hold the server's limits, so that it rarely refuses a body that fits them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from allotrope.server import fields, protocol
from allotrope.server.messages.fields import COUNT_TOKENS, MESSAGES
from allotrope.server.messages.protocol import CountTokensRequest, MessagesRequest
from allotrope.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from allotrope.server.responses.fields import RESPONSES
from allotrope.server.responses.protocol import ResponsesRequest
from allotrope.server.rules import Only, WithoutEffect, schema_of
from allotrope.server.state import ServerState

Json = dict[str, Any]

_REF = "#/components/schemas/{model}"
_BODIES: tuple[tuple[type[BaseModel], fields.Fields], ...] = (
    (ChatRequest, fields.CHAT),
    (CompletionRequest, fields.COMPLETIONS),
    (TokenizeRequest, fields.TOKENIZE),
    (DetokenizeRequest, fields.DETOKENIZE),
    (ResponsesRequest, RESPONSES),
    (MessagesRequest, MESSAGES),
    (CountTokensRequest, COUNT_TOKENS),
)
_HOLDING_IDS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
_COUNTING_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "truncate_prompt_tokens")
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def accepts(model: type[BaseModel]) -> Json:
    """The part of a route's description that declares its body as `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_api(app: FastAPI, state: ServerState) -> Json:
    """The whole description, with the limits of the loaded model."""
    api = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path in api["paths"].values():
        for operation in path.values():
            operation["responses"] = {
                "200": operation["responses"].get("200", {"description": "Done"}),
                "default": {
                    "description": "An error",
                    "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}},
                },
            }
    components: Json = {"Error": _ERROR}
    for model, table in _BODIES:
        components |= _schemas(model, table, state)
    api["components"] = {"schemas": components}
    if state.config.api_key:
        api["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        api["security"] = [{"key": []}]
    return api


def _schemas(model: type[BaseModel], table: fields.Fields, state: ServerState) -> Json:
    """Schemas of `model` and of the models within it, by name.

    Another API's inner models have the body's name before theirs, as several APIs have messages and tools.
    """
    prefix = "" if model.__module__ == protocol.__name__ else f"{model.__name__}."
    schema = model.model_json_schema(ref_template=_REF.replace("{model}", prefix + "{model}"))
    inner = {prefix + name: one for name, one in schema.pop("$defs", {}).items()}
    properties = schema["properties"]
    for name, rule in table.known.items():
        if isinstance(rule, WithoutEffect | Only):
            properties[name] = schema_of(rule)
    limits = state.ready().limits
    for name in set(_HOLDING_IDS) & set(properties):
        _limit_integers(properties[name], limits.vocab_size - 1)
    for name in set(_COUNTING_TOKENS) & set(properties):
        _limit_integers(properties[name], limits.max_model_len)
    properties["model"] = {"enum": [*state.model_names, None], "description": "The served model; may be left out."}
    return {**inner, model.__name__: schema}


def _limit_integers(schema: Any, maximum: int) -> None:
    """Lower the maximum of every integer in `schema`, in place."""
    if isinstance(schema, list):
        for item in schema:
            _limit_integers(item, maximum)
    elif isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["maximum"] = maximum
        for item in schema.values():
            _limit_integers(item, maximum)
