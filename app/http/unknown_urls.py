"""404 errors for unknown URLs, which name the endpoint to use instead.

Pure: a path in, an ApiError out.
"""

from __future__ import annotations

from http import HTTPStatus

from kvlane.app.http.api_errors import ApiError

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
    segments = [segment for segment in path.split("/") if segment]
    short = "/".join(segment for segment in segments if segment != "v1")
    name = short.partition("/")[0] if "v1" in segments else ""
    message = "there is no such URL; GET /openapi.json lists those that there are"
    if offered := next((each for each in _OFFERED if f"/{short}".endswith(f"/{each}")), ""):
        message = f"there is no such URL; use /v1/{offered}"
    elif name in _NOT_OFFERED:
        message = f"/v1/{name} is not offered; use /v1/chat/completions"
    elif name in _BELOW:
        message = f"there is no such URL; there are {_BELOW[name]}"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="unknown_url")
