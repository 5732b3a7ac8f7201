"""The page `/docs`: the description of the API in a browser, by Swagger UI from the package
fastapi-swagger.

Its files and the description hold no data and are open; requests that the page sends need a key, as
any. URLs are relative, for proxies with a prefix, and nothing comes from another host.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from kvlane.app.http.console.console_endpoint import PAGE_HEADERS

ROOT = "/docs"
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>kvlane: HTTP API</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
_SCRIPT = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#ui", deepLinking: true, validatorUrl: null,
  defaultModelsExpandDepth: 0,
});
"""
_TEXTS = {ROOT: (_PAGE, "text/html"), f"{ROOT}/start.js": (_SCRIPT, "text/javascript")}
_FILES = {
    f"{ROOT}/swagger-ui-bundle.js": "text/javascript", f"{ROOT}/swagger-ui.css": "text/css",
    f"{ROOT}/favicon-32x32.png": "image/png",
}  # fmt: skip
OPEN_PATHS = frozenset({*_TEXTS, *_FILES, "/openapi.json"})
"""They need no key."""
_POLICY = "content-security-policy"
_HEADERS = PAGE_HEADERS | {
    # Swagger UI sets styles of elements, and has its icons in data URLs.
    _POLICY: f"{PAGE_HEADERS[_POLICY]}; style-src 'self' 'unsafe-inline'; img-src 'self' data:",
    "cache-control": "no-cache",
}


def add_docs(api: Starlette) -> None:
    for path in _TEXTS:
        api.add_route(path, _text, methods=["GET"], include_in_schema=False)
    for path in _FILES:
        api.add_route(path, _file, methods=["GET"], include_in_schema=False)


async def _text(request: Request) -> Response:
    content, media_type = _TEXTS[request.url.path]
    return Response(content, media_type=media_type, headers=_HEADERS)


async def _file(request: Request) -> Response:
    path = request.url.path
    file = files("fastapi_swagger").joinpath("resources", path.rpartition("/")[2])
    return FileResponse(str(file), media_type=_FILES[path], headers=_HEADERS)
