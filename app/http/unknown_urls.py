"""404 errors for unknown URLs, which name the endpoint to use instead.

Pure: a path in, an ApiError out.
"""

from __future__ import annotations

from http import HTTPStatus

from app.http.api_errors import ApiError

_NOT_OFFERED = (
    "assistants", "audio", "containers", "conversations", "edits", "engines", "evals",
    "fine_tuning", "images", "messages", "moderations", "realtime", "responses", "threads",
    "uploads", "vector_stores", "videos",
)  # fmt: skip
"""The first segments behind /v1 of the other endpoints that client libraries of OpenAI call."""
_OFFERED = ("chat/completions", "completions", "embeddings", "models", "files", "batches")
_BELOW = {
    "files": "/v1/files, /v1/files/FILE_ID and /v1/files/FILE_ID/content",
    "batches": "/v1/batches, /v1/batches/BATCH_ID and /v1/batches/BATCH_ID/cancel",
}
"""The URLs of the endpoints that have several."""


def unknown_url(path: str) -> ApiError:
    """The error for a path without an endpoint. An unknown path itself is not repeated."""
    _, _, rest = path.partition("/v1/")
    name = rest.split("/", 1)[0]
    message = "there is no such URL; GET /openapi.json lists those that there are"
    if name in _NOT_OFFERED:
        message = f"/v1/{name} is not offered; use /v1/chat/completions"
    elif name in _BELOW:
        message = f"there is no such URL; there are {_BELOW[name]}"
    elif (short := path.strip("/")) in _OFFERED:
        message = f"there is no /{short}; use /v1/{short}"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="unknown_url")
