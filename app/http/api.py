"""The HTTP surface: which URL is answered by what. Every error leaves here in OpenAI's form."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.http.attachment import Attachment
from app.http.errors import ApiError, of_error, of_preprocess_error
from app.http.front import Front
from app.http.generation import Generation
from app.http.parts import Parts
from app.http.schema import described
from app.http.served import ServedModel
from app.preprocess.errors import BadModel, InvalidPrompt, Overloaded

JSON = "application/json"
_STREAM = "/v1/streams/{request_id:path}"


def build(parts: Parts) -> FastAPI:
    """The application of one gateway."""
    api = FastAPI(title="kvlane", docs_url=None, redoc_url=None)
    generation, attachment, plain = Generation(parts), Attachment(parts), Plain(parts)
    for method, path, handler, meaning in (
        ("POST", "/v1/chat/completions", generation.chat, "Answer a chat"),
        ("POST", "/v1/completions", generation.complete, "Complete a text"),
        ("POST", "/v1/embeddings", generation.embed, "Embed texts"),
        ("GET", _STREAM, attachment.attach, "Go on with a stream: from, form, stream"),
        ("DELETE", _STREAM, attachment.cancel, "End a stream"),
        ("GET", "/v1/models", plain.models, "The models that are served"),
        ("GET", "/v1/models/{name:path}", plain.model, "One of the models that are served"),
        ("GET", "/livez", plain.livez, "Whether this process is worth keeping"),
        ("GET", "/readyz", plain.readyz, "Whether requests should be sent here"),
        ("GET", "/metrics", plain.metrics, "Figures for Prometheus"),
    ):
        api.add_api_route(path, handler, methods=[method], summary=meaning, description=meaning)
    answer_errors(api)
    for kind in (InvalidPrompt, Overloaded, BadModel):
        api.add_exception_handler(kind, _preprocess_error)
    api.add_middleware(Front, metrics=parts.metrics)
    api.openapi = described(api)  # type: ignore[method-assign]
    return api


def answer_errors(api: FastAPI) -> None:
    """Let every error of an application leave in OpenAI's form."""
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(ClientDisconnect, _left)
    api.add_exception_handler(Exception, _unforeseen)


class Plain:
    """Endpoints that only look."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def models(self) -> Response:
        """The models that have a live worker."""
        models = [_model(served) for served in self._parts.served.models()]
        return _json({"object": "list", "data": models})

    async def model(self, name: str) -> Response:
        """One of them. Raises ApiError."""
        return _json(_model(self._parts.served.model(name)))

    async def livez(self) -> Response:
        """Whether this process is worth keeping."""
        alive = self._parts.health.is_alive
        return _json({"alive": alive}, HTTPStatus.OK if alive else HTTPStatus.SERVICE_UNAVAILABLE)

    async def readyz(self) -> Response:
        """Whether requests should be sent here."""
        ready, checks = self._parts.health.readiness()
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _json({"ready": ready} | checks, status)

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._parts.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})


def _model(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "kvlane",
        "max_model_len": served.context_length,
    }


def _json(told: object, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(told), status, media_type=JSON)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _preprocess_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidPrompt | Overloaded | BadModel)
    return of_preprocess_error(error).response()


async def _http_error(_: Request, error: Exception) -> Response:
    """No such URL, or not with this method."""
    assert isinstance(error, HTTPException)
    code = "unknown_url" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request"
    return ApiError(error.status_code, error.detail, code=code).response(error.headers)


async def _left(_: Request, __: Exception) -> Response:
    """The client left while it sent; nobody hears this."""
    return ApiError(499, "the client left", code="left").response()


async def _unforeseen(_: Request, error: Exception) -> Response:
    """An error of ours. It is logged by the server, with where it comes from."""
    return of_error(error).response()
