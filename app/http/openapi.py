"""OpenAPI description of the HTTP API: bodies, parameters, responses and errors.

FastAPI describes the routes and pydantic the bodies; added are the parameters, which handlers read
by themselves, and types that validators take beyond the annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvlane.app.http.anthropic.message_events import MessageEncoder
from kvlane.app.http.anthropic.message_requests import VERSION_HEADER, CountBody, MessagesBody
from kvlane.app.http.api_errors import is_messages_path
from kvlane.app.http.batches.batches_endpoint import NewBatch
from kvlane.app.http.openai.openai_responses import EndpointKind
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.http.openai.response_writer import EncoderFactory
from kvlane.app.http.responses.response_events import ResponseEncoder
from kvlane.app.http.responses.response_requests import ResponsesBody
from kvlane.app.preprocess.requests.request_models import (
    MAX_INPUTS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
)
from kvlane.streams.record_types.batch_records import BatchStatus, FilePurpose
from kvlane.streams.records import MAX_ID_CHARS

_REF = "#/components/schemas/{model}"
_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/messages": MessagesBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages/count_tokens": CountBody,
}
ITEM_FORMS: dict[str, EncoderFactory] = {"message": MessageEncoder, "response": ResponseEncoder}
"""Encoders by the form in which a stream may be resumed, beside those of OpenAI's events."""
_ABOUT = (
    "OpenAI's API, and Anthropic's of messages, for models behind kvlane. Unknown fields of bodies "
    "are ignored. Bodies for models of an attached server go there as they came, and may have more "
    "than is described here."
)

# --- bodies ---------------------------------------------------------------------------------------

_NULL: JsonObject = {"type": "null"}
_TOKENS: JsonObject = {
    "type": "array", "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}  # fmt: skip


def _object(**properties: JsonObject) -> JsonObject:
    """An object that has all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _texts(text: JsonObject) -> JsonObject:
    """A text, the tokens of one, or a list of either."""
    many = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
    return {"anyOf": [text, _TOKENS, many | {"items": {"anyOf": [text, _TOKENS]}}]}


def _nullable(*schemas: JsonObject) -> JsonObject:
    return {"anyOf": [*schemas, _NULL]}


def _text_or_list(part: JsonObject) -> JsonObject:
    return _nullable({"type": "string"}, {"type": "array", "items": part})


_OBJECTS: JsonObject = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
}
_WIDER: Mapping[str, Mapping[str, JsonObject]] = {
    "ChatBody": {
        "tool_choice": _nullable(
            {"enum": ["none", "auto", "required"]},
            _object(type={"const": "function"}, function=_object(name={"type": "string"})),
        )
    },
    "CompletionBody": {"prompt": _texts({"type": "string"})},
    "EmbeddingBody": {"input": _texts({"type": "string", "minLength": 1})},
    "Message": {"content": _text_or_list({"$ref": _REF.format(model="TextPart")})},
    "MessageTurn": {"content": _OBJECTS},
    "ResponsesBody": {"input": _OBJECTS},
    "ToolResultBlock": {"content": _text_or_list({"$ref": _REF.format(model="TextBlock")})},
    "MessagesBody": {"system": _text_or_list({"$ref": _REF.format(model="TextBlock")})},
    "CountBody": {"system": _text_or_list({"$ref": _REF.format(model="TextBlock")})},
}
"""Fields whose validators accept more than their annotations, by the model's name."""
_MODEL_NAME = {"type": "string", "minLength": 1, "maxLength": 200, "examples": ["demo"]}
"""Over Kafka `model` may be left out, here it may not."""

# --- answers --------------------------------------------------------------------------------------

_STRING: JsonObject = {"type": "string"}
_COUNT: JsonObject = {"type": "integer", "minimum": 0}
_ERROR = _object(
    error=_object(message=_STRING, type=_STRING, param={"type": ["string", "null"]}, code=_STRING)
)
_MESSAGE_ERROR = _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING))
_USAGE: JsonObject = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "additionalProperties": True,
}


def _listing(name: str, **fields: JsonObject) -> JsonObject:
    """An object whose `object` has a name."""
    return _object(object={"const": name}, **fields)


_MODEL = _listing("model", id=_STRING, created=_COUNT, owned_by=_STRING)
_CHOICES: JsonObject = {"type": "array", "items": {"type": "object", "required": ["index"]}}
_HEAD: Mapping[str, JsonObject] = {
    "id": _STRING, "created": _COUNT, "model": _STRING, "choices": _CHOICES, "usage": _USAGE,
}  # fmt: skip
_CHAT = _listing("chat.completion", **_HEAD)
_COMPLETION = _listing("text_completion", **_HEAD)
_EMBEDDINGS = _listing(
    "list", data={"type": "array", "items": {"type": "object"}}, model=_STRING, usage={}
)
_MESSAGE: JsonObject = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    "properties": {
        "id": _STRING,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _STRING,
        "content": {"type": "array", "items": {"type": "object", "required": ["type"]}},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"type": "object", "required": ["input_tokens", "output_tokens"]},
    },
}
_COUNTED = _object(input_tokens=_COUNT)
_RESPONSE = _listing(
    "response", id=_STRING, created_at=_COUNT, model=_STRING, error=_nullable({"type": "object"}),
    status={"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
    output={"type": "array", "items": {"type": "object", "required": ["id", "type"]}},
    usage=_nullable({"type": "object"}),
)  # fmt: skip
_MODELS = _listing("list", data={"type": "array", "items": _MODEL})
_MESSAGE_MODEL: JsonObject = {
    "type": "object",
    "required": ["id", "type", "display_name", "created_at"],
    "properties": {"type": {"const": "model"}, "created_at": _STRING},
}
_MESSAGE_MODELS: JsonObject = {
    "type": "object",
    "required": ["data", "has_more", "first_id", "last_id"],
    "properties": {"data": {"type": "array", "items": _MESSAGE_MODEL}},
}
_EVENTS: JsonObject = {
    "text/event-stream": {
        "schema": {
            "description": "Events: each `data` is a chunk as JSON, or an error; the last is [DONE]"
        }
    }
}
"""Without a type: tools differ in whether a schema is that of the text or of an event."""

_FAILURES = {
    "400": "The request is not valid, or the model does not support it",
    "401": "No valid API key (where keys are needed)",
    "403": "Not allowed for this key, or from a web page of another site",
    "404": "No such model, stream or URL",
    "408": "It did not end in its time",
    "413": "More than is taken at a time",
    "415": "The body is not sent as application/json, or a file not as multipart/form-data",
    "429": "A limit of the tenant is reached",
    "499": "It was cancelled",
    "500": "It failed",
    "503": "No worker serves the model at the moment, or the log does not answer",
    "529": "More to do than is taken on",
}
_REFUSALS = ("400", "401", "403", "404", "429", "503")
"""The failures of requests without a body."""


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


# --- operations -----------------------------------------------------------------------------------


def _parameter(name: str, place: str, about: str, schema: JsonObject) -> JsonObject:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "description": about, "schema": schema} | required


_POSITION: JsonObject = {"type": "string", "pattern": "^[0-9]{1,15}$"}
_POSITIONS: JsonObject = {"type": "string", "pattern": "^[0-9]{1,15}(,[0-9]{1,15})*$"}
"""Those of several answers."""
_SWITCH: JsonObject = {"type": "string", "enum": ["true", "false", "1", "0"]}
_ID = _parameter(
    "request_id", "path", "As in the header x-kvlane-id",
    {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARS},
)  # fmt: skip
_IDS = _parameter(
    "request_id", "path", "As in the header x-kvlane-id, also several",
    {"type": "string", "minLength": 1},
)  # fmt: skip
_ATTACHING = [
    _IDS,
    _parameter("Last-Event-ID", "header", "Id of the last event received", _POSITIONS),
    _parameter("from", "query", "The same, where headers cannot be set", _POSITIONS),
    _parameter(
        "form", "query", "Form of the answer", {"enum": [*get_args(EndpointKind), *ITEM_FORMS]}
    ),
    _parameter("stream", "query", "false: the whole answer at its end", _SWITCH),
    _parameter("include_usage", "query", "Whether token counts come at the end", _SWITCH),
]
_HEADERS_IN = [
    _parameter("x-request-id", "header", "Comes back with the answer", _STRING),
    _parameter(
        "x-kvlane-detach", "header", "true: it continues after its client has disconnected", _STRING
    ),
]
_VERSION = _parameter(
    VERSION_HEADER, "header", "With it the models have the form of Anthropic's API", _STRING
)
_WHOLE = "The answer; a stream of events with `stream`"

# --- files and batches ----------------------------------------------------------------------------

_FILE = _listing(
    "file", id=_STRING, bytes=_COUNT, created_at=_COUNT, expires_at=_COUNT, filename=_STRING,
    purpose={"enum": list(get_args(FilePurpose))}, status={"const": "processed"},
)  # fmt: skip
_FILE_ID = _parameter("file_id", "path", "As in the answer to its upload", _STRING)
_UPLOAD: JsonObject = {
    "multipart/form-data": {
        "schema": _object(
            file={"type": "string", "format": "binary", "description": "JSONL"},
            purpose={"const": "batch"},
        )
    }
}


_BATCH_ID = _parameter("batch_id", "path", "As in the answer to its creation", _STRING)
_TIME = _nullable(_COUNT)
_TEXT = _nullable(_STRING)
_BATCH = _listing(
    "batch", id=_STRING, endpoint=_STRING, errors=_nullable({"type": "object"}),
    input_file_id=_STRING, completion_window=_STRING,
    status={"enum": [*get_args(BatchStatus), "cancelling"]}, output_file_id=_TEXT,
    error_file_id=_TEXT, created_at=_COUNT, in_progress_at=_TIME, expires_at=_COUNT,
    finalizing_at=_TIME, completed_at=_TIME, failed_at=_TIME, expired_at=_TIME,
    cancelling_at=_TIME, cancelled_at=_TIME, metadata=_nullable({"type": "object"}),
    request_counts=_object(total=_COUNT, completed=_COUNT, failed=_COUNT),
)  # fmt: skip
_NEW_BATCH = msgspec.json.schema_components([NewBatch])[1]["NewBatch"]


def _page(entity: JsonObject) -> JsonObject:
    ends = {name: {"type": ["string", "null"]} for name in ("first_id", "last_id")}
    return _json(
        _listing("list", data={"type": "array", "items": entity}, has_more={"type": "boolean"})
        | ends
    )


def _paging(most: int) -> list[JsonObject]:
    count = {"type": "integer", "minimum": 1, "maximum": most}
    return [
        _parameter("limit", "query", "Most objects of a page", count),
        _parameter("after", "query", "The last id of the page before", _STRING),
        _parameter("order", "query", "By time", {"enum": ["asc", "desc"]}),
    ]


def _operation(
    about: str, content: JsonObject, *parameters: JsonObject, code: str = "200"
) -> JsonObject:
    """An operation with one answer beside its failures."""
    answer: JsonObject = {"responses": {code: (about, content)}}
    return answer | {"parameters": [*parameters]} if parameters else answer


def _probe(name: str) -> JsonObject:
    """An operation that answers yes or no, by its status too."""
    verdict = _json(_object(**{name: {"type": "boolean"}}))
    return {"responses": {"200": ("Yes", verdict), "503": ("No", verdict)}}


_OPERATIONS: Mapping[tuple[str, str], JsonObject] = {
    ("/v1/files", "post"): _operation("The file", _json(_FILE)),
    ("/v1/files", "get"): _operation(
        "The newest first", _page(_FILE),
        _parameter("purpose", "query", "Of this only", _STRING), *_paging(10_000),
    ),
    ("/v1/files/{file_id}", "get"): _operation("The file", _json(_FILE), _FILE_ID),
    ("/v1/files/{file_id}", "delete"): _operation(
        "It is deleted", _json(_listing("file", id=_STRING, deleted={"const": True})), _FILE_ID
    ),
    ("/v1/files/{file_id}/content", "get"): _operation(
        "The content", {"application/jsonl": {"schema": _STRING}}, _FILE_ID
    ),
    ("/v1/batches", "post"): _operation("The batch", _json(_BATCH)),
    ("/v1/batches", "get"): _operation("The newest first", _page(_BATCH), *_paging(100)),
    ("/v1/batches/{batch_id}", "get"): _operation("The batch", _json(_BATCH), _BATCH_ID),
    ("/v1/batches/{batch_id}/cancel", "post"): _operation("The batch", _json(_BATCH), _BATCH_ID),
    ("/v1/responses", "post"): _operation(_WHOLE, _json(_RESPONSE) | _EVENTS, *_HEADERS_IN),
    ("/v1/responses/{request_id}", "get"): _operation(
        "Its state", _json(_RESPONSE) | _EVENTS, _ID,
        _parameter("stream", "query", "true: its events", _SWITCH),
        _parameter("starting_after", "query", "Number of the last known event", _POSITION),
    ),
    ("/v1/responses/{request_id}", "delete"): _operation(
        "It is deleted", _json(_listing("response", id=_STRING, deleted={"const": True})), _ID
    ),
    ("/v1/responses/{request_id}/input_items", "get"): _operation(
        "The last first", _page({"type": "object", "required": ["id", "type"]}), _ID, *_paging(100)
    ),
    ("/v1/responses/{request_id}/cancel", "post"): _operation("Its state", _json(_RESPONSE), _ID),
    ("/v1/messages", "post"): _operation(_WHOLE, _json(_MESSAGE) | _EVENTS, *_HEADERS_IN),
    ("/v1/messages/count_tokens", "post"): _operation("The number of tokens", _json(_COUNTED)),
    ("/v1/chat/completions", "post"): _operation(_WHOLE, _json(_CHAT) | _EVENTS, *_HEADERS_IN),
    ("/v1/completions", "post"): _operation(_WHOLE, _json(_COMPLETION) | _EVENTS, *_HEADERS_IN),
    ("/v1/embeddings", "post"): _operation("The embeddings", _json(_EMBEDDINGS), *_HEADERS_IN),
    ("/v1/streams/{request_id}", "get"): _operation(
        "The rest of the stream, behind the position",
        _json({"anyOf": [_CHAT, _COMPLETION, _EMBEDDINGS, _MESSAGE, _RESPONSE]}) | _EVENTS,
        *_ATTACHING,
    ),
    ("/v1/streams/{request_id}", "delete"): _operation(
        "It ends shortly", _json(_listing("stream", id=_STRING, status={"const": "cancelling"})),
        _ID, code="202",
    ),
    ("/v1/models", "get"): _operation(
        "The models", _json({"anyOf": [_MODELS, _MESSAGE_MODELS]}), _VERSION
    ),
    ("/v1/models/{name}", "get"): _operation(
        "The model", _json({"anyOf": [_MODEL, _MESSAGE_MODEL]}),
        _parameter("name", "path", "As in the list", _STRING), _VERSION,
    ),
    ("/livez", "get"): _probe("alive"),
    ("/readyz", "get"): _probe("ready"),
    ("/metrics", "get"): _operation(
        "Prometheus' text format", {"text/plain": {"schema": _STRING}}
    ),
}  # fmt: skip


def openapi_of(api: FastAPI) -> Callable[[], JsonObject]:
    """The `openapi` method of an application; the description is built once."""

    def openapi() -> JsonObject:
        if api.openapi_schema is None:
            api.openapi_schema = _describe(api)
        return api.openapi_schema

    return openapi


def _describe(api: FastAPI) -> JsonObject:
    schema = get_openapi(
        title=api.title, version=version("kvlane"), description=_ABOUT, routes=api.routes
    )
    bodies, definitions = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template=_REF
    )
    schema["components"] = {
        "schemas": _widened(definitions["$defs"])
        | {"Error": _ERROR, "MessageError": _MESSAGE_ERROR},
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    schema["security"] = [{"key": []}, {"api_key": []}, {}]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            error = "MessageError" if is_messages_path(path) else "Error"
            _complete(operation, _OPERATIONS[path, method], error, has_body=method == "post")
    for path, content in (("/v1/files", _UPLOAD), ("/v1/batches", _json(_NEW_BATCH))):
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path, body in _BODIES.items():
        schema["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": bodies[body, "validation"]}},
        }
    return schema


def _widened(definitions: JsonObject) -> JsonObject:
    """Definitions of bodies with the types that their validators take."""
    for name, definition in definitions.items():
        properties = definition.get("properties", {})
        properties |= _WIDER.get(name, {})
        if "nvext" in properties:  # a body, not a part of one
            properties["model"] = _MODEL_NAME
            definition["required"] = ["model", *definition.get("required", ())]
    return definitions


def _complete(operation: JsonObject, known: JsonObject, error: str, *, has_body: bool) -> None:
    """Add the parameters and the answers of an operation."""
    if "parameters" in known:
        operation["parameters"] = known["parameters"]
    content = _json({"$ref": _REF.format(model=error)})
    failures = _FAILURES if has_body else {code: _FAILURES[code] for code in _REFUSALS}
    responses = {code: (about, content) for code, about in failures.items()} | known["responses"]
    responses["default"] = ("An error", content)
    operation["responses"] = {
        code: {"description": about, "content": kinds, "headers": _HEADERS}
        for code, (about, kinds) in responses.items()
    }


_HEADERS: JsonObject = {
    "x-request-id": {"description": "Names this response in error reports", "schema": _STRING}
}
