"""The HTTP surface as OpenAPI: the bodies that are read, field by field, and how errors look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.preprocess.bodies import ChatBody, CompletionBody, EmbeddingBody

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
}
_ERROR = {
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
                "code": {"type": "string"},
            },
        }
    },
}


def described(api: FastAPI) -> Callable[[], dict[str, Any]]:
    """What makes the description of an application, once; for its `openapi`."""

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _describe(api)
        return api.openapi_schema

    return openapi


def _describe(api: FastAPI) -> dict[str, Any]:
    schema = get_openapi(title=api.title, version=api.version, routes=api.routes)
    bodies, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template=_REF
    )
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components |= definitions.get("$defs", {}) | {"Error": _ERROR}
    for path, body in _BODIES.items():
        schema["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": bodies[body, "validation"]}},
        }
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # what FastAPI itself would answer
            operation["responses"]["default"] = {"description": "An error", "content": error}
    return schema
