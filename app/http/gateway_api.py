"""HTTP routes of a gateway. Every error is sent in the form of its endpoint."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from kvlane.app.http.anthropic.message_requests import VERSION_HEADER
from kvlane.app.http.anthropic.messages_endpoint import MessagesEndpoint, model_of
from kvlane.app.http.api_errors import MESSAGES_PATH, ApiError, error_of_prompt, error_of_stream
from kvlane.app.http.batches.batches_endpoint import BatchesEndpoint
from kvlane.app.http.batches.files_endpoint import FilesEndpoint
from kvlane.app.http.batches.listing import json_response, list_response
from kvlane.app.http.console.console_endpoint import ConsoleEndpoint
from kvlane.app.http.docs_page import OPEN_PATHS, add_docs
from kvlane.app.http.openai.completions import Completions
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.openai.served_models import ServedModel
from kvlane.app.http.openai.stream_resume import StreamResume
from kvlane.app.http.openapi import ITEM_FORMS, openapi_of
from kvlane.app.http.responses.responses_endpoint import ResponsesEndpoint
from kvlane.app.http.server.authentication import Authentication
from kvlane.app.http.server.middleware import RequestIdMiddleware
from kvlane.app.http.server.origin_guard import OriginGuard
from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt, PreprocessorOverloaded

_NOT_OFFERED = (
    "assistants", "audio", "containers", "conversations", "edits", "engines", "evals",
    "fine_tuning", "images", "moderations", "realtime", "threads", "uploads",
     "vector_stores", "videos",
)  # fmt: skip
"""The first segments behind /v1 of the other endpoints that client libraries of OpenAI call."""
_OFFERED = (
    "chat/completions", "completions", "embeddings", "messages", "messages/count_tokens", "models",
    "responses", "files", "batches",
)  # fmt: skip
_BELOW = {
    "files": "/v1/files, /v1/files/FILE_ID and /v1/files/FILE_ID/content",
    "batches": "/v1/batches, /v1/batches/BATCH_ID and /v1/batches/BATCH_ID/cancel",
    "messages": "/v1/messages and /v1/messages/count_tokens",
}
"""The URLs of the endpoints that have several."""


def unknown_url(path: str) -> ApiError:
    """The error for a path without an endpoint. An unknown path itself is not repeated."""
    segments = [segment for segment in path.split("/") if segment]
    short = "/".join(segment for segment in segments if segment != "v1")
    name = short.partition("/")[0] if "v1" in segments else ""
    message = "there is no such URL; GET /openapi.json lists those that there are"
    if name in _BELOW and "/" in short:
        message = f"there is no such URL; there are {_BELOW[name]}"
    elif offered := next((each for each in _OFFERED if f"/{short}".endswith(f"/{each}")), ""):
        message = f"there is no such URL; use /v1/{offered}"
    elif name in _NOT_OFFERED:
        message = f"/v1/{name} is not offered; use /v1/chat/completions"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="unknown_url")


_STREAM = "/v1/streams/{request_id:path}"
_RESPONSE = "/v1/responses/{request_id}"
_FILE = "/v1/files/{file_id}"
_BATCH = "/v1/batches/{batch_id}"


def build_app(parts: GatewayDeps, console: ConsoleEndpoint | None = None) -> FastAPI:
    api = FastAPI(title="kvlane", docs_url=None, redoc_url=None)
    generation, plain = Completions(parts), ModelsEndpoint(parts)
    messages, attachment = MessagesEndpoint(generation), StreamResume(parts, ITEM_FORMS)
    responses = ResponsesEndpoint(parts, generation, attachment)
    files, batches, probes = FilesEndpoint(parts), BatchesEndpoint(parts), parts.probes
    for method, path, handler, meaning in (
        ("POST", "/v1/chat/completions", generation.create_chat_completion, "Answer a chat"),
        ("POST", "/v1/completions", generation.create_completion, "Complete a text"),
        ("POST", "/v1/embeddings", generation.create_embeddings, "Embed texts"),
        ("POST", MESSAGES_PATH, messages.create, "Answer a chat, as Anthropic's API does"),
        (
            "POST",
            f"{MESSAGES_PATH}/count_tokens",
            messages.count_tokens,
            "The number of tokens of a chat",
        ),
        ("POST", "/v1/responses", responses.create, "Answer a chat, as items"),
        ("GET", _RESPONSE, responses.retrieve, "The state of a response, or its events"),
        ("DELETE", _RESPONSE, responses.delete, "Delete a stored response"),
        ("GET", f"{_RESPONSE}/input_items", responses.input_items, "The items of its input"),
        ("POST", f"{_RESPONSE}/cancel", responses.cancel, "Cancel a response"),
        ("GET", _STREAM, attachment.resume, "Go on with a stream: from, form, stream"),
        ("DELETE", _STREAM, attachment.cancel, "End a stream"),
        ("GET", "/v1/models", plain.models, "The models that are served"),
        ("GET", "/v1/models/{name:path}", plain.model, "One of the models that are served"),
        ("POST", "/v1/files", files.create, "Upload a file"),
        ("GET", "/v1/files", files.list, "The files of the key's tenant"),
        ("GET", _FILE, files.retrieve, "One file"),
        ("DELETE", _FILE, files.delete, "Delete a file"),
        ("GET", f"{_FILE}/content", files.content, "The content of a file"),
        ("POST", "/v1/batches", batches.create, "Run the lines of a file as requests"),
        ("GET", "/v1/batches", batches.list, "The batches of the key's tenant"),
        ("GET", _BATCH, batches.retrieve, "One batch"),
        ("POST", f"{_BATCH}/cancel", batches.cancel, "Cancel a batch"),
        ("GET", "/livez", probes.livez, "Whether this process is worth keeping"),
        ("GET", "/readyz", probes.readyz, "Whether requests should be sent here"),
        ("GET", "/metrics", probes.metrics, "Figures for Prometheus"),
    ):
        route_class = PlainRoute if method == "POST" else None
        api.router.add_api_route(
            path, handler, methods=[method], summary=meaning, description=meaning,
            route_class_override=route_class,
        )  # fmt: skip
        if method == "GET":
            api.router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
    add_docs(api)
    open_paths = OPEN_PATHS
    if console is not None:
        console.add_to(api)
        open_paths |= console.open_paths
    answer_errors(api)
    for kind in (InvalidPrompt, PreprocessorOverloaded, BadModel):
        api.add_exception_handler(kind, _preprocess_error)
    api.add_middleware(Authentication, access=parts.access, open_paths=open_paths)
    settings = parts.settings
    api.add_middleware(OriginGuard, host=settings.http_host, origins=settings.allowed_origins)
    api.add_middleware(RequestIdMiddleware, metrics=parts.metrics)
    api.openapi = openapi_of(api)  # type: ignore[method-assign]
    return api


def answer_errors(api: FastAPI) -> None:
    """Send every error of an application in the form of its endpoint."""
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(ClientDisconnect, _left)
    api.add_exception_handler(Exception, _unforeseen)


class PlainRoute(APIRoute):
    """A route whose handler takes the request alone, without FastAPI's search for parameters."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


class ModelsEndpoint:
    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts

    async def models(self, request: Request) -> Response:
        """The models that have a live worker, in the form of the client's API."""
        served = self._parts.served_models.models()
        if VERSION_HEADER in request.headers:
            return list_response([model_of(each) for each in served], has_more=False)
        return json_response({"object": "list", "data": list(map(_model, served))})

    async def model(self, request: Request) -> Response:
        served = self._parts.served_models.listed(request.path_params["name"])
        form = model_of if VERSION_HEADER in request.headers else _model
        return json_response(form(served))


def _model(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "kvlane",
        "max_model_len": served.context_length,
    }


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _preprocess_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidPrompt | PreprocessorOverloaded | BadModel)
    return error_of_prompt(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return unknown_url(request.url.path).response(error.headers)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = ", ".join(_methods(request))
    return ApiError(error.status_code, error.detail, code="invalid_request").response(headers)


def _methods(request: Request) -> list[str]:
    """The methods of a URL over all its routes; starlette names those of the first only."""
    routes = (r for r in request.app.routes if isinstance(r, Route))
    found = (r.methods for r in routes if r.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for methods in found for method in methods or ()})


async def _left(_: Request, __: Exception) -> Response:
    return ApiError(499, "the client left", code="left").response()


async def _unforeseen(_: Request, error: Exception) -> Response:
    return error_of_stream(error).response()
