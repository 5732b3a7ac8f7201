"""Authentication of HTTP requests by API keys, and the rights and limits of their tenants.

    Authorization: Bearer kvl_… ──► ApiKeyStore ──► Caller (tenant, role, lease) ──► endpoint
    x-api-key: kvl_…      ─────────────┘

A request is refused from its head alone, and passed on without its key, so no log line and no
record can hold one.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlane.app.access.api_key_store import ApiKeyStore
from kvlane.app.access.key_file import KeyRole
from kvlane.app.access.quota import LIMIT_NAMES, QuotaLease
from kvlane.app.http.api_errors import ApiError
from kvlane.app.http.server.caller import SCOPE_KEY, Caller, forbidden
from kvlane.app.http.server.limit_sharing import LimitSharing
from kvlane.app.http.server.usage_follower import UsageFollower
from kvlane.app.metrics.metric_set import Counter
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.clock import BrokerClock
from kvlane.streams.ports import Log

log = logging.getLogger(__name__)

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
"""The header of Anthropic's clients; Authorization counts more."""
_SCHEME = "bearer"
_PROBES = frozenset({"/livez", "/readyz"})
_METRICS = "/metrics"
ANYONE = Caller()
_READER = Caller(role="user")
"""Any reader of open files."""


class AccessControl:
    """The API keys of one process, or none on loopback."""

    def __init__(self, settings: Settings, ctx: ProcessContext) -> None:
        """Raises SettingsError without keys where other machines ask, KeyFileError for bad ones."""
        settings.require_authentication()
        self._settings = settings
        self._ctx = ctx
        self.store = ApiKeyStore(settings, ctx.clock) if settings.api_keys_file else None
        self.sharing: LimitSharing | None = None
        self.usage: UsageFollower | None = None
        self._refusals: Counter | None = None

    def share_limits(self, kafka: Log, broker_clock: BrokerClock) -> None:
        """Divide the limits of tenants among gateways. To be called before `start`."""
        if self.store is not None:
            self.store.is_shared = True
            store = self.store
            self.usage = UsageFollower(kafka, self._ctx, store.is_tenant, store.quotas)
            self.sharing = LimitSharing(kafka, self._ctx, broker_clock, self.usage)

    def count_refusals(self, counter: Counter) -> None:
        self._refusals = counter
        for name in LIMIT_NAMES:
            counter.labels(name)

    async def read_usage(self) -> None:
        """Read what tenants have used of their budgets, if any has one."""
        if self.store is not None and self.store.has_budgets and self.usage is not None:
            await self.usage.start()

    def start(self) -> None:
        """Follow the file of keys, and log whether HTTP is open to all."""
        settings, store = self._settings, self.store
        if store is not None:
            self._ctx.spawn("api keys", store.watch())
            if self.sharing is not None and store.has_limits:
                self.sharing.start()
            log.info("%d API keys in %s", len(store), settings.api_keys_file)
            if not settings.is_on_loopback and settings.http_tls_cert is None:
                log.warning(
                    "keys are sent in clear text to %s unless something in front has TLS: set "
                    "KVLANE_HTTP_TLS_CERT and KVLANE_HTTP_TLS_KEY", settings.http_host,
                )  # fmt: skip
        elif settings.is_on_loopback:
            log.info("no API keys: HTTP is open to all on this machine (KVLANE_API_KEYS_FILE)")
        else:
            log.warning("no API keys: HTTP on %s is open to all", settings.http_host)

    def authenticate(self, scope: Scope, needs: KeyRole) -> Caller:
        """The sender of a request, if it has the right to its path. `needs`: the role for all paths
        but probes. Raises ApiError, 401 or 403."""
        path = scope["path"]
        if self.store is None or path in _PROBES:
            return ANYONE
        if path == _METRICS:
            if self._settings.metrics_allow_anonymous:
                return ANYONE
            needs = "metrics"
        key = self.store.find(_token(scope))
        if key is None:
            message = "no valid API key: send one as Authorization: Bearer KEY"
            raise ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")
        if key.role not in ("operator", needs):
            raise forbidden(f"this needs a key of the role {needs}, not {key.role}")
        tenant = key.tenant
        terms, lease = self.store.tenant(tenant), QuotaLease(self.store.quota(tenant))
        clock = self._ctx.clock
        return Caller(tenant, key.role, lease, terms, clock, self.sharing, self._refusals, key.id)


class Authentication:
    """ASGI middleware: lets requests with the right to their path through, as a `Caller`'s."""

    def __init__(
        self, app: ASGIApp, access: AccessControl, needs: KeyRole = "user",
        open_paths: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """`needs`: the role that requests need, but for probes and figures. `open_paths`: of files
        that need no key."""
        self._app = app
        self._access = access
        self._needs = needs
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] in self._open_paths:
                caller = _READER
            else:
                caller = self._access.authenticate(scope, self._needs)
        except ApiError as e:
            headers = {"www-authenticate": "Bearer"} if e.status == HTTPStatus.UNAUTHORIZED else {}
            await e.response(headers)(scope, receive, send)
            return
        bare = [each for each in scope["headers"] if each[0] not in (AUTHORIZATION, API_KEY)]
        passed = {**scope, "headers": bare, SCOPE_KEY: caller}

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *caller.headers()]
            await send(message)

        try:
            await self._app(passed, receive, send_on)
        finally:
            caller.release()


def _token(scope: Scope) -> str:
    """The key in the head of a request; empty without one, or with several."""
    headers = scope["headers"]
    given = [value for name, value in headers if name == AUTHORIZATION]
    if not given:
        keys = [value for name, value in headers if name == API_KEY]
        return keys[0].decode("latin-1").strip() if len(keys) == 1 else ""
    if len(given) != 1:
        return ""
    scheme, _, token = given[0].decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == _SCHEME else ""
