"""Sender of an HTTP request: the rights of its key, and the limits of its tenant."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from msgspec.structs import replace
from starlette.requests import Request

from kvlane.app.access.key_file import KeyRole, Tenant
from kvlane.app.access.quota import (
    BUDGETS,
    LIMIT_NAMES,
    CountedAnswer,
    QuotaLease,
    RequestTokens,
    TenantLimit,
)
from kvlane.app.http.api_errors import ApiError
from kvlane.app.http.server.limit_sharing import LimitSharing
from kvlane.app.metrics.metric_set import Counter
from kvlane.streams import request as prepared
from kvlane.streams.clock import Clock
from kvlane.streams.ids import TenantTag

log = logging.getLogger(__name__)

REFUSAL_LOG_S = 60.0
SCOPE_KEY = "kvlane.caller"
"""The name of the caller in the scope of its request."""


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
            raise forbidden(f"{what} need a key of the role operator")

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
            raise forbidden("this key's requests have the class that its tenant is given")
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


def caller_of(request: Request) -> Caller:
    """The sender of a request that came through `Authentication`."""
    caller = request.scope[SCOPE_KEY]
    assert isinstance(caller, Caller)
    return caller


def _most_tokens(request: prepared.Request, context: int) -> int:
    prompt = request.prompt_tokens
    if request.kind == "embedding":
        return prompt
    limit = request.stop.max_tokens
    return max(prompt, context) if limit is None else prompt + limit


def forbidden(message: str) -> ApiError:
    return ApiError(HTTPStatus.FORBIDDEN, message, code="permission_denied")
