"""Protection against cross-site requests: browsers reach any address, loopback too.

`Origin`, the page's server, must be this one or one of `KVLANE_HTTP_ALLOWED_ORIGINS`. `Host`, the
server that the browser looked up, must be on loopback an address or a local name, else a page could
point a name of its own there (DNS rebinding). Programs send no `Origin`, and the `Host` of their
base URL.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlane.app.access.quota import RATE_LIMIT_HEADERS
from kvlane.app.http.api_errors import ApiError

ANY_ORIGIN = "*"
_READ = frozenset({b"origin", b"host"})
_LOCAL_NAMES = (".localhost", ".internal")
"""Suffixes of names that are not in public DNS, such as `host.docker.internal`."""


class OriginGuard:
    """ASGI middleware: answers 403 to requests from pages of other origins."""

    def __init__(self, app: ASGIApp, *, host: str, origins: Sequence[str]) -> None:
        self._rules = OriginRules(host, origins)
        self._app = _with_cors(app, origins) if origins else app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (wrong := self._rules.violation(_headers(scope))):
            await wrong.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _headers(scope: Scope) -> dict[str, str]:
    """The two headers that the rules read; of several with one name the first."""
    given = reversed(scope["headers"])
    return {
        name.decode("latin-1"): value.decode("latin-1") for name, value in given if name in _READ
    }


class OriginRules:
    """Which origins and hosts are allowed. Pure."""

    def __init__(self, host: str, origins: Sequence[str]) -> None:
        self._origins = {origin.lower() for origin in origins}
        self._hosts = {host.lower(), *(urlsplit(origin).hostname for origin in self._origins)}
        self._on_loopback = host == "localhost" or _is_loopback(host)

    def violation(self, headers: Mapping[str, str]) -> ApiError | None:
        """The error for a request with these headers; None for one that is allowed."""
        if ANY_ORIGIN in self._origins:
            return None
        origin, host = headers.get("origin"), headers.get("host")
        if origin is not None and not self._is_origin(origin.lower(), host):
            return _refused(
                "the header origin names another site: pages of other sites are refused unless "
                "KVLANE_HTTP_ALLOWED_ORIGINS lists their origin",
                "origin_not_allowed",
            )
        if host is not None and self._on_loopback and not self._is_host(host.lower()):
            return _refused(
                "the header host names another machine than this one: use localhost or an address; "
                "behind a proxy, set KVLANE_HTTP_ALLOWED_ORIGINS to the proxy's http(s)://name",
                "host_not_allowed",
            )
        return None

    def _is_origin(self, origin: str, host: str | None) -> bool:
        """Whether it is allowed, or this server: a proxy may have taken TLS off, so no scheme."""
        if origin in self._origins:
            return True
        return bool(host) and origin.partition("://")[2] == (host or "").lower()

    def _is_host(self, host: str) -> bool:
        name = _hostname(host)
        return (
            name == "localhost"
            or name in self._hosts
            or name.endswith(_LOCAL_NAMES)
            or _is_address(name)
        )


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=[origin.lower() for origin in origins],
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "x-request-id",
            "x-kvlane-id",
            "x-kvlane-model",
            "retry-after",
            *RATE_LIMIT_HEADERS,
        ],
    )


def _refused(message: str, code: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code=code)


def _hostname(host: str) -> str:
    """A Host header without its port; "" for an invalid one."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback
