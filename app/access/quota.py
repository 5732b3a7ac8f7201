"""Limits of one tenant, requests and tokens in flight and per minute, and their use at one gateway.

Pure: the clock is passed in, in seconds. A gateway counts up to its share of each limit; where
gateways divide limits (`app/http/server/limit_sharing.py`) it holds nothing at first, else all. A
whole share of a limit per minute comes back in a minute. Tokens in flight are those of prompts and
of the longest answers; per minute, prompts count when they begin and answers when they end, so more
than the share may be used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, get_args

from kvlane.app.access.key_file import Tenant

MINUTE_S = 60.0
QUOTA_RETRY_S = 1.0
_ROUNDING = 1e-6

LimitKind = Literal["requests", "tokens"]
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in get_args(LimitKind)
    for what in ("limit", "remaining", "reset")
)


class TenantLimit(IntEnum):
    """A limit that gateways divide; its number is its place in records."""

    REQUESTS = 0
    READERS = 1
    """Clients that resume streams; as many as requests."""
    TOKENS = 2
    REQUEST_RATE = 3
    TOKEN_RATE = 4


LIMIT_NAMES = (
    "requests", "readers", "tokens", "requests_per_minute", "tokens_per_minute", "file_bytes",
    "batches",
)  # fmt: skip
"""By `TenantLimit`, as operators set them; the last two hold over all gateways."""


_RATES: dict[TenantLimit, LimitKind] = {
    TenantLimit.REQUEST_RATE: "requests",
    TenantLimit.TOKEN_RATE: "tokens",
}


class QuotaRefusal(NamedTuple):
    """A limit that is reached. Without `retry_after_s` the request can never be within it.
    `lacks_share`: other gateways may hold what is missing."""

    limit: TenantLimit
    message: str
    retry_after_s: float | None
    lacks_share: bool = False


class CountedAnswer(Protocol):
    @property
    def counted_tokens(self) -> int:
        """Number of tokens so far."""


class TenantQuota:
    def __init__(self, limits: Tenant, now_s: float, *, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        self.used = dict.fromkeys(TenantLimit, 0.0)
        """In flight, or of the last minute and not come back yet."""
        self.waiting = dict.fromkeys(TenantLimit, 0)
        """Asked for by requests that wait for a greater share."""
        self.held = dict.fromkeys(TenantLimit, 0)
        """The share; without meaning for limits that the tenant does not have."""
        self.elsewhere = dict.fromkeys(TenantLimit, 0)
        """Shares of other gateways."""
        self.is_active = False
        """Whether anything was counted since this was last set to False."""
        self.logged_s = -math.inf
        self._at_s = now_s
        self.set_limits(limits, now_s)

    @property
    def is_idle(self) -> bool:
        return not any(self.used[limit] for limit in TenantLimit if limit not in _RATES)

    def set_limits(self, limits: Tenant, now_s: float) -> None:
        """Change the limits; what is used stays used."""
        self.settle(now_s)
        self.limits = limits
        self.most = {
            TenantLimit.REQUESTS: limits.requests,
            TenantLimit.READERS: limits.requests,
            TenantLimit.TOKENS: limits.tokens,
            TenantLimit.REQUEST_RATE: limits.requests_per_minute,
            TenantLimit.TOKEN_RATE: limits.tokens_per_minute,
        }
        for limit, most in self.most.items():
            if not self.is_shared:
                self.held[limit] = most or 0
            if most is None and limit in _RATES:
                self.used[limit] = 0.0

    def limited(self) -> Iterator[tuple[TenantLimit, int]]:
        return ((limit, most) for limit, most in self.most.items() if most is not None)

    def wait(self, amounts: Mapping[TenantLimit, int], sign: int) -> None:
        """Count the amounts of a request that waits for a share; a negative sign: no longer."""
        for limit, amount in amounts.items():
            self.waiting[limit] += sign * amount

    def settle(self, now_s: float) -> None:
        """Let what was used of rates come back up to now."""
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        for limit in _RATES:
            back = passed_s * self.held[limit] / MINUTE_S
            self.used[limit] = max(0.0, self.used[limit] - back)

    def hold(self, limit: TenantLimit, share: int, now_s: float) -> None:
        self.settle(now_s)
        self.held[limit] = share

    def refusal(self, limit: TenantLimit, more: int, own: int = 0) -> QuotaRefusal | None:
        """Why the tenant may not use more of a limit now. `own`: what the asking request uses
        of it, which does not end while that waits."""
        most = self.most[limit]
        if most is None or not more:
            return None
        used, rate = self.used[limit], _RATES.get(limit)
        # A prompt above the tokens of a minute has to wait for all of them.
        need = used + (min(more, most) if rate is not None and most else more)
        if need <= min(self.held[limit], most) + _ROUNDING:
            return None
        lacks_share = need + self.waiting[limit] <= most + _ROUNDING
        in_use = used + self.elsewhere[limit]
        here = f"{used:.0f} here, {self.elsewhere[limit]} are shares of other gateways"
        if rate is not None:
            missing = need + self.elsewhere[limit] - most
            wait_s = missing * MINUTE_S / most if most else MINUTE_S
            message = f"the tenant may have {most} {rate} a minute: {here}"
            return QuotaRefusal(
                limit, message, wait_s if missing > 0 else QUOTA_RETRY_S, lacks_share
            )
        again_s = QUOTA_RETRY_S if own + more <= most else None
        if limit is TenantLimit.TOKENS:
            message = (
                f"prompts and longest answers have {more} tokens, {in_use:.0f} of the {most} that "
                "the tenant may have at a time are in use"
            )
            return QuotaRefusal(limit, message, again_s, lacks_share)
        what = "readers of streams" if limit is TenantLimit.READERS else "requests"
        message = f"the tenant may have {most} {what} at a time: {here}"
        return QuotaRefusal(limit, message, again_s, lacks_share)

    def headers(self, now_s: float) -> Iterable[tuple[str, str]]:
        self.settle(now_s)
        for limit, kind in _RATES.items():
            most = self.most[limit]
            if most is None:
                continue
            used = self.used[limit] + self.elsewhere[limit]
            yield f"x-ratelimit-limit-{kind}", str(most)
            yield f"x-ratelimit-remaining-{kind}", str(max(0, int(most - used)))
            full_s = used * MINUTE_S / most if most else MINUTE_S
            yield f"x-ratelimit-reset-{kind}", f"{full_s:.3f}s"


class QuotaLease:
    """Share of one HTTP request in its tenant's quota, until `release`."""

    def __init__(self, quota: TenantQuota) -> None:
        self.quota = quota
        self._used = dict.fromkeys(TenantLimit, 0)
        self.answers: Iterable[CountedAnswer] = ()
        """Their tokens are counted at the end."""

    def add(self, amounts: Mapping[TenantLimit, int], now_s: float) -> QuotaRefusal | None:
        """Count all amounts, or none if a limit is reached."""
        quota = self.quota
        quota.settle(now_s)
        quota.is_active = True
        for limit, more in amounts.items():
            refusal = quota.refusal(limit, more, self._used[limit])
            if refusal is not None:
                return refusal
        for limit, more in amounts.items():
            if limit not in _RATES:
                self._used[limit] += more
                quota.used[limit] += more
            elif quota.most[limit] is not None:
                quota.used[limit] += more
        return None

    def release(self, now_s: float) -> None:
        quota = self.quota
        for limit, used in self._used.items():
            quota.used[limit] -= used
        self._used = dict.fromkeys(TenantLimit, 0)
        if quota.most[TenantLimit.TOKEN_RATE] is not None:
            quota.settle(now_s)
            quota.used[TenantLimit.TOKEN_RATE] += sum(each.counted_tokens for each in self.answers)
        self.answers = ()
