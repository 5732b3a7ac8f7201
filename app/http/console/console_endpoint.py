"""The operators' page (`/console`) of a gateway: its files, and the JSON that they poll.

It shows the traffic of all tenants, so there is none without `KVLANE_CONSOLE`; and it may not be on
an address that other machines reach without keys. The files of the page hold no data and are open;
all data need a key of the role operator, as the indexer does: a gateway has no port for operators
alone, and a key in a header, unlike a cookie, is sent by no other page. The page asks for the key
and keeps it for its tab. Answers to pages of other origins are refused, listed ones included.
Read-only. Never shows texts or tokens of prompts and answers.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from kvlane.app.http.api_errors import ApiError, invalid_request
from kvlane.app.http.batches.listing import translated
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.server.caller import caller_of
from kvlane.app.http.server.middleware import TenantSlots
from kvlane.app.http.server.probes import JSON
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.app.settings import SettingsError
from kvlane.streams.records import MAX_ID_CHARS

if TYPE_CHECKING:
    from kvlane.app.http.console.live_fleet import LiveFleet

ROOT = "/console"
_MEDIA_TYPES = {
    "html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml",
}  # fmt: skip
PAGE_HEADERS = {
    # Scripts, styles and connections of this server only; nothing may frame the page.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
MAX_TIMELINES = 2
"""Timelines that are read at a time: for an id without a time the whole lane is."""
TIMELINE_S = 20.0
_SHOWN = ("open", "ended", "slow", "failed")


def console_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type of the page's files, by name."""
    found = {}
    for file in files("kvlane.app").joinpath("data", "console").iterdir():
        _, _, ending = file.name.rpartition(".")
        if ending in _MEDIA_TYPES:
            found[file.name] = file.read_bytes(), _MEDIA_TYPES[ending]
    return found


class ConsoleEndpoint:
    def __init__(self, parts: GatewayDeps, pool: WorkPool) -> None:
        """Raises SettingsError on an address that other machines reach, without keys."""
        settings = parts.settings
        if not settings.is_on_loopback and settings.api_keys_file is None:
            raise SettingsError(
                f"KVLANE_CONSOLE=true shows the traffic of all tenants, and KVLANE_HTTP_HOST="
                f"{settings.http_host} is reached from other machines: set KVLANE_API_KEYS_FILE "
                "(`kvlane keys create --role operator` makes one)"
            )
        self._parts = parts
        self._pool = pool
        self._files = console_files()
        self._live: LiveFleet | None = None
        self._loading = asyncio.Lock()
        self._slots = TenantSlots(
            MAX_TIMELINES, MAX_TIMELINES, f"{MAX_TIMELINES} timelines are being read"
        )

    @property
    def open_paths(self) -> frozenset[str]:
        """The paths that need no key."""
        return frozenset({ROOT, f"{ROOT}/", *(f"{ROOT}/{name}" for name in self._files)})

    def add_to(self, api: Starlette) -> None:
        data = f"{ROOT}/api"
        for path, handler in (
            (ROOT, self.redirect),
            (f"{data}/fleet", self.fleet),
            (f"{data}/requests", self.requests),
            (f"{data}/requests/{{request_id:path}}", self.timeline),
            (f"{data}/decisions", self.decisions),
            (f"{data}/queue", self.queue),
            (f"{ROOT}/{{name:path}}", self.file),
        ):
            api.add_route(path, handler, methods=["GET"], include_in_schema=False)

    async def redirect(self, _: Request) -> Response:
        """To the folder of the page; relative, for proxies with a prefix."""
        return RedirectResponse("console/", headers=PAGE_HEADERS)

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"] or "index.html"
        if name not in self._files:
            message = "the console has no such file"
            raise ApiError(HTTPStatus.NOT_FOUND, message, code="unknown_url")
        content, media_type = self._files[name]
        return Response(
            content, media_type=media_type, headers=PAGE_HEADERS | {"cache-control": "no-cache"}
        )

    async def fleet(self, request: Request) -> Response:
        return _json((await self._allowed(request)).fleet())

    async def requests(self, request: Request) -> Response:
        query = request.query_params
        shown = query.get("shown", "open")
        if shown not in _SHOWN:
            raise invalid_request(f"give one of {', '.join(_SHOWN)}", "shown")
        live = await self._allowed(request)
        names = (query.get("model", ""), query.get("tenant", ""))
        return _json(live.requests(shown, *names))  # type: ignore[arg-type]

    async def queue(self, request: Request) -> Response:
        return _json((await self._allowed(request)).queue())

    async def decisions(self, request: Request) -> Response:
        given = request.query_params.get("after", "0")
        if not (given.isdecimal() and len(given) < 16):
            raise invalid_request("give the number of a decision", "after")
        live = await self._allowed(request)
        return _json(await live.decisions(int(given)))

    async def timeline(self, request: Request) -> Response:
        live = await self._allowed(request)
        request_id = request.path_params["request_id"]
        if len(request_id) > MAX_ID_CHARS:
            raise invalid_request(f"ids have at most {MAX_ID_CHARS} characters", "request_id")
        with self._slots.taken(""), translated():
            try:
                async with asyncio.timeout(TIMELINE_S):
                    return _json(await live.timeline(request_id))
            except TimeoutError:
                message = (
                    f"its records were not read within {TIMELINE_S:g} s: an id without a time is "
                    "looked for in its whole lane; use `kvlane explain`"
                )
                raise ApiError(
                    HTTPStatus.SERVICE_UNAVAILABLE, message, code="timeline_timeout"
                ) from None

    async def _allowed(self, request: Request) -> LiveFleet:
        """The fleet, for an operator's page of this server. Raises ApiError, 403."""
        caller_of(request).require_operator("the console's data")
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            message = "the console's data are for its own page, not for those of other origins"
            raise ApiError(HTTPStatus.FORBIDDEN, message, code="origin_not_allowed")
        async with self._loading:
            if self._live is None:
                self._live = await self._pool.run(self._load)
        return self._live

    def _load(self) -> LiveFleet:
        """Its import takes a second, so it is on a thread: it has compiled kernels."""
        from kvlane.app.http.console.live_fleet import LiveFleet

        parts = self._parts
        return LiveFleet(
            parts.log, parts.ctx, self._pool, parts.settings.worker_timeout_s,
            parts.batches.view.open_jobs,
        )  # fmt: skip


def _json(body: bytes) -> Response:
    return Response(body, media_type=JSON, headers=PAGE_HEADERS | {"cache-control": "no-store"})
