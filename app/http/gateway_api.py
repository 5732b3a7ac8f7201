"""HTTP routes of a gateway. Every error is sent in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from kvlane.app.http.api_errors import ApiError, error_of_prompt, error_of_stream
from kvlane.app.http.batches.batches_endpoint import BatchesEndpoint
from kvlane.app.http.batches.files_endpoint import FilesEndpoint
from kvlane.app.http.openai.completions import Completions
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.openai.openapi import openapi_of
from kvlane.app.http.openai.served_models import ServedModel
from kvlane.app.http.openai.stream_resume import StreamResume
from kvlane.app.http.server.authentication import Authentication
from kvlane.app.http.server.middleware import RequestIdMiddleware
from kvlane.app.http.server.origin_guard import OriginGuard
from kvlane.app.http.server.probes import JSON
from kvlane.app.http.unknown_urls import unknown_url
from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt, PreprocessorOverloaded

_STREAM = "/v1/streams/{request_id:path}"
_FILE = "/v1/files/{file_id}"
_BATCH = "/v1/batches/{batch_id}"


def build_app(parts: GatewayDeps) -> FastAPI:
    """The application of one gateway."""
    api = FastAPI(title="kvlane", docs_url=None, redoc_url=None)
    generation, attachment, plain = Completions(parts), StreamResume(parts), ModelsEndpoint(parts)
    files, batches, probes = FilesEndpoint(parts), BatchesEndpoint(parts), parts.probes
    for method, path, handler, meaning in (
        ("POST", "/v1/chat/completions", generation.create_chat_completion, "Answer a chat"),
        ("POST", "/v1/completions", generation.create_completion, "Complete a text"),
        ("POST", "/v1/embeddings", generation.create_embeddings, "Embed texts"),
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
    answer_errors(api)
    for kind in (InvalidPrompt, PreprocessorOverloaded, BadModel):
        api.add_exception_handler(kind, _preprocess_error)
    api.add_middleware(Authentication, access=parts.access)
    settings = parts.settings
    api.add_middleware(OriginGuard, host=settings.http_host, origins=settings.allowed_origins)
    api.add_middleware(RequestIdMiddleware, metrics=parts.metrics)
    api.openapi = openapi_of(api)  # type: ignore[method-assign]
    return api


def answer_errors(api: FastAPI) -> None:
    """Send every error of an application in OpenAI's form."""
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(ClientDisconnect, _left)
    api.add_exception_handler(Exception, _unforeseen)


class PlainRoute(APIRoute):
    """A route whose handler takes the request and nothing else.

    FastAPI's own handler looks for parameters and dependencies first: 6 % of a short request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler


class ModelsEndpoint:
    """The list of models."""

    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts

    async def models(self) -> Response:
        """The models that have a live worker."""
        models = [_model(served) for served in self._parts.served_models.models()]
        return _json({"object": "list", "data": models})

    async def model(self, name: str) -> Response:
        """One of them. Raises ApiError."""
        return _json(_model(self._parts.served_models.model(name)))


def _model(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "kvlane",
        "max_model_len": served.context_length,
    }


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _preprocess_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidPrompt | PreprocessorOverloaded | BadModel)
    return error_of_prompt(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """No such URL, or not with this method."""
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
    """The client disconnected while sending; the response is for the log only."""
    return ApiError(499, "the client left", code="left").response()


async def _unforeseen(_: Request, error: Exception) -> Response:
    """A server error, which the server logs with its traceback."""
    return error_of_stream(error).response()
