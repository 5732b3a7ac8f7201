"""Authentication of HTTP requests by API keys, and the rights and limits of their tenants.

    Authorization: Bearer kvl_… ──► ApiKeyStore ──► Caller (tenant, role, lease) ──► endpoint
    x-api-key: kvl_…      ─────────────┘

A request is refused from its head alone, and passed on without its key, so no log line and no
record can hold one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlane.app.access.key_file import ApiKey, KeyFileError, KeyRing, KeyRole, Tenant, read_key_file
from kvlane.app.access.quota import (
    BUDGETS,
    LIMIT_NAMES,
    CountedAnswer,
    QuotaLease,
    RequestTokens,
    TenantLimit,
    TenantQuota,
)
from kvlane.app.http.api_errors import ApiError
from kvlane.app.http.server.limit_sharing import LimitSharing
from kvlane.app.http.server.usage_follower import UsageFollower
from kvlane.app.metrics.metric_set import Counter
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams import request as prepared
from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.ids import TenantTag
from kvlane.streams.ports import Log

log = logging.getLogger(__name__)

KEY_FILE_POLL_S = 1.0
REFUSAL_LOG_S = 60.0
MONTH_S = 32 * 86_400
"""The longest month, with a margin for clocks."""
AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
"""The header of Anthropic's clients; Authorization counts more."""
_SCHEME = "bearer"
_PROBES = frozenset({"/livez", "/readyz"})
_METRICS = "/metrics"
_CALLER = "kvlane.caller"


class ApiKeyStore:
    """API keys of a file that is reloaded on change, and quotas of tenants."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        assert settings.api_keys_file is not None
        self._path = settings.api_keys_file
        self._clock = clock
        self._usage_retention_s = settings.usage_retention_s
        self._ring = self._read()
        self._seen = self._signature()
        self.quotas: dict[str, TenantQuota] = {}
        self.is_shared = False
        """Whether gateways divide the limits."""

    def __len__(self) -> int:
        return len(self._ring)

    def find(self, token: str) -> ApiKey | None:
        return self._ring.find(token, self._clock.wall_ms() / 1000)

    def tenant(self, name: str) -> Tenant:
        """The terms of a tenant; one without an entry has no limits."""
        return self._ring.tenants.get(name) or Tenant()

    @property
    def has_limits(self) -> bool:
        tenants = self._ring.tenants.values()
        return any(any(TenantQuota(each, 0.0).limited()) for each in tenants)

    @property
    def has_budgets(self) -> bool:
        return any(TenantQuota(each, 0.0).has_budget for each in self._ring.tenants.values())

    def is_tenant(self, name: str) -> bool:
        return name in self._ring.tenants

    def quota(self, name: str) -> TenantQuota:
        """The quota of a tenant. Bound: the tenants of the file and those with requests."""
        quota = self.quotas.get(name)
        if quota is None:
            quota = self.quotas[name] = TenantQuota(
                self.tenant(name), self._clock.now(), is_shared=self.is_shared
            )
        return quota

    async def watch(self) -> None:
        """Follow the file, until cancelled. One that cannot be read changes nothing."""
        while True:
            await self._clock.sleep(KEY_FILE_POLL_S)
            signature = self._signature()
            if signature == self._seen:
                continue
            self._seen = signature
            try:
                ring = self._read()
            except KeyFileError as e:
                log.error("keeping the previous API keys: %s", e)  # noqa: TRY400 - no traceback
                continue
            self._take(ring)
            log.info("%s has changed: %d API keys", self._path, len(ring))

    def _read(self) -> KeyRing:
        """Raises KeyFileError."""
        ring = KeyRing(read_key_file(self._path))
        has_months = any(each.tokens_per_month is not None for each in ring.tenants.values())
        if has_months and self._usage_retention_s < MONTH_S:
            raise KeyFileError(
                f"{self._path}: tokens_per_month needs the usage of a month: set "
                f"KVLANE_USAGE_RETENTION_S to {MONTH_S} at least"
            )
        return ring

    def _take(self, ring: KeyRing) -> None:
        self._ring = ring
        now = self._clock.now()
        for name, quota in list(self.quotas.items()):
            if name in ring.tenants or not quota.is_idle:
                quota.set_limits(self.tenant(name), now)
            else:
                del self.quotas[name]

    def _signature(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Caller:
    """Sender of an HTTP request: tenant, role, and its share of the limits."""

    def __init__(
        self, tenant: str = "", role: KeyRole = "operator", lease: QuotaLease | None = None,
        terms: Tenant | None = None, clock: Clock | None = None,
        sharing: LimitSharing | None = None, refusals: Counter | None = None, key_id: str = "",
    ) -> None:  # fmt: skip
        """Without arguments: any sender where there are no keys."""
        self.tenant = tenant
        self.role = role
        self.key_id = key_id
        self.terms = terms or Tenant()
        self._lease = lease
        self._clock = clock
        self._sharing = sharing
        self._refusals = refusals

    @property
    def is_counted(self) -> bool:
        """Whether its requests count towards limits until they end, without a client too."""
        terms, lease = self.terms, self._lease
        limits = (terms.requests, terms.tokens, terms.tokens_per_minute)
        is_limited = any(limit is not None for limit in limits)
        return lease is not None and (is_limited or lease.quota.has_budget)

    def require_operator(self, what: str) -> None:
        """Raises ApiError, 403, unless it is an operator."""
        if self.role != "operator":
            raise _forbidden(f"{what} need a key of the role operator")

    async def count_request(self) -> None:
        """Count a request whose body was not read yet. Raises ApiError, 429."""
        await self._count({TenantLimit.REQUESTS: 1, TenantLimit.REQUEST_RATE: 1})

    async def count_answers(
        self, requests: Sequence[prepared.Request], n: int, answers: Sequence[CountedAnswer],
        context: int | None = None,
    ) -> None:  # fmt: skip
        """Count requests, each with its answer, of which `n` after each other have one prompt.
        Raises ApiError, 429. `context`: the longest prompt and answer of the model; answers without
        a limit fill it."""
        lease = self._lease
        if lease is None:
            return
        counted = [
            RequestTokens(each.id, each.prompt_tokens, _most_tokens(each, context or 0))
            for each in requests
        ]
        most_tokens = sum(each.most_tokens for each in counted)
        amounts = {
            TenantLimit.REQUESTS: len(counted) - 1,
            TenantLimit.REQUEST_RATE: len(counted) - 1,
            TenantLimit.TOKENS: most_tokens,
            TenantLimit.TOKEN_RATE: sum(each.prompt_tokens for each in counted[::n]),
        }
        has_budget = lease.quota.has_budget and not requests[0].is_query
        await self._count(amounts | dict.fromkeys(BUDGETS if has_budget else (), most_tokens))
        lease.answers = answers
        if has_budget:
            lease.requests = counted
            lease.quota.reserve(counted)

    async def require_budget(self) -> None:
        """Raises ApiError, 429, if a budget is used up."""
        await self._count(dict.fromkeys(BUDGETS, 0))

    async def count_reader(self) -> None:
        """Count a reader of a stream that exists. Raises ApiError, 429."""
        await self._count({TenantLimit.READERS: 1, TenantLimit.REQUEST_RATE: 1})

    async def _count(self, amounts: Mapping[TenantLimit, int]) -> None:
        lease = self._lease
        if lease is None or self._clock is None:
            return
        if self._sharing is None:
            refusal = lease.add(amounts, self._clock.now())
        else:
            refusal = await self._sharing.add(self.tenant, lease, amounts)
        if refusal is not None:
            code = "insufficient_quota" if refusal.is_used_up else "rate_limit_exceeded"
            name = LIMIT_NAMES[refusal.limit]
            raise self.refused(name, refusal.message, code, refusal.retry_after_s)

    def refused(
        self, limit: str, message: str, code: str, retry_after_s: float | None = None
    ) -> ApiError:
        """The error of a request beyond a limit, 429; it is counted, and logged at times."""
        if self._refusals is not None:
            self._refusals.labels(limit).inc()
        if self._lease is not None and self._clock is not None:
            quota, now = self._lease.quota, self._clock.now()
            if now - quota.logged_s >= REFUSAL_LOG_S:
                quota.logged_s = now
                log.warning("refused a request of tenant %s, limit %s: %s; further ones are logged "
                            "after a minute", self.tenant, limit, message)  # fmt: skip
        return ApiError(
            HTTPStatus.TOO_MANY_REQUESTS, message, code=code, retry_after_s=retry_after_s
        )

    @property
    def cache_tenant(self) -> str:
        """The tenant whose cached texts and blocks a request may find; "" for the shared ones."""
        return "" if self.terms.share_cache else self.tenant

    def with_tenant(self, request: prepared.Request, seal: TenantTag) -> prepared.Request:
        """The request as its tenant's: with its cache salt, its sessions and its class. Raises
        ApiError, 403, for the class of others."""
        tenant, terms, hints = self.tenant, self.terms, request.hints
        if not tenant:
            return request
        changes: dict[str, object] = {}
        if hints.session_control is not None:
            session = f"{tenant}/{hints.session_control.session_id}"
            changes["session_control"] = replace(hints.session_control, session_id=session)
        named = hints.queue_class
        if named is not None and named != terms.queue_class and self.role != "operator":
            raise _forbidden("this key's requests have the class that its tenant is given")
        if named is None and terms.queue_class:
            changes["queue_class"] = terms.queue_class
        salt = (
            request.cache_salt if terms.share_cache else seal.cache_salt(tenant, request.cache_salt)
        )
        hints = replace(hints, **changes) if changes else hints
        return replace(request, tenant=tenant, key_id=self.key_id, cache_salt=salt, hints=hints)

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self._lease is None or self._clock is None:
            return []
        limits = self._lease.quota.headers(self._clock.now())
        return [(name.encode(), value.encode()) for name, value in limits]

    def release(self) -> None:
        if self._lease is not None and self._clock is not None:
            self._lease.release(self._clock.now())
            if self._sharing is not None:
                self._sharing.released(self.tenant)


ANYONE = Caller()
_READER = Caller(role="user")
"""Any reader of open files."""


def caller_of(request: Request) -> Caller:
    """The sender of a request that came through `Authentication`."""
    caller = request.scope[_CALLER]
    assert isinstance(caller, Caller)
    return caller


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
            raise _forbidden(f"this needs a key of the role {needs}, not {key.role}")
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
        passed = {**scope, "headers": bare, _CALLER: caller}

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


def _most_tokens(request: prepared.Request, context: int) -> int:
    prompt = request.prompt_tokens
    if request.kind == "embedding":
        return prompt
    limit = request.stop.max_tokens
    return max(prompt, context) if limit is None else prompt + limit


def _forbidden(message: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code="permission_denied")
