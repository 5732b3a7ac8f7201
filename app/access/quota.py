"""Limits of one tenant at one gateway: requests and tokens in flight, and per minute.

Pure: the clock is passed in, in seconds. Rates are token buckets of one minute. Tokens in flight
are those of prompts and of the longest answers; per minute, prompts count when they begin and
answers when they end, so the bucket may be in debt by the tokens in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol, get_args

from kvlane.app.access.key_file import Tenant

MINUTE_S = 60.0
QUOTA_RETRY_S = 1.0
"""Retry delay while waiting for another request to end, whose time is unknown."""


LimitKind = Literal["requests", "tokens"]
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in get_args(LimitKind)
    for what in ("limit", "remaining", "reset")
)
"""OpenAI's names of the headers about rates."""


class QuotaRefusal(NamedTuple):
    """A limit that is reached. Without `retry_after_s` the request can never be within it."""

    kind: LimitKind
    message: str
    retry_after_s: float | None


class CountedAnswer(Protocol):
    @property
    def counted_tokens(self) -> int:
        """Number of tokens so far."""


class TokenBucket:
    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        self._fill(now_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        if not self.per_minute:
            return MINUTE_S if amount else 0.0
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, even beyond the level."""
        self._fill(now_s)
        self._level -= amount

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change the rate; used tokens stay used."""
        taken = self.per_minute - self.level(now_s)
        self.per_minute = per_minute
        self._level = per_minute - taken

    def _fill(self, now_s: float) -> None:
        gained = max(0.0, now_s - self._at_s) * self.per_minute / MINUTE_S
        self._level = min(float(self.per_minute), self._level + gained)
        self._at_s = max(self._at_s, now_s)


class TenantQuota:
    def __init__(self, limits: Tenant, now_s: float) -> None:
        self.limits = limits
        self.requests = 0
        """In flight."""
        self.tokens = 0
        self.attached = 0
        """Clients that resume streams; bounded by the limit of requests."""
        self._rates: dict[LimitKind, TokenBucket] = {}
        self.set_limits(limits, now_s)

    @property
    def is_idle(self) -> bool:
        return not (self.requests or self.tokens or self.attached)

    def set_limits(self, limits: Tenant, now_s: float) -> None:
        self.limits = limits
        rates: dict[LimitKind, int | None] = {
            "requests": limits.requests_per_minute,
            "tokens": limits.tokens_per_minute,
        }
        for kind, rate in rates.items():
            if rate is None:
                self._rates.pop(kind, None)
            elif kind in self._rates:
                self._rates[kind].resize(rate, now_s)
            else:
                self._rates[kind] = TokenBucket(rate, now_s)

    def take(self, kind: LimitKind, amount: int, now_s: float) -> QuotaRefusal | None:
        """Count towards a rate, unless so much exceeds it now."""
        bucket = self._rates.get(kind)
        if bucket is None:
            return None
        if (wait_s := bucket.wait_s(amount, now_s)) > 0:
            message = f"the tenant may have {bucket.per_minute} {kind} a minute"
            return QuotaRefusal(kind, message, wait_s)
        bucket.take(amount, now_s)
        return None

    def spend(self, kind: LimitKind, amount: int, now_s: float) -> None:
        if (bucket := self._rates.get(kind)) is not None:
            bucket.take(amount, now_s)

    def headers(self, now_s: float) -> Iterable[tuple[str, str]]:
        """Rate limit headers, with OpenAI's names."""
        for kind, bucket in self._rates.items():
            level = bucket.level(now_s)
            yield f"x-ratelimit-limit-{kind}", str(bucket.per_minute)
            yield f"x-ratelimit-remaining-{kind}", str(max(0, int(level)))
            full_s = bucket.wait_s(bucket.per_minute, now_s)
            yield f"x-ratelimit-reset-{kind}", f"{full_s:.3f}s"


class QuotaLease:
    """Share of one HTTP request in its tenant's quota, until `release`."""

    def __init__(self, quota: TenantQuota) -> None:
        self.quota = quota
        self._requests = 0
        self._tokens = 0
        self._attached = 0
        self.answers: Iterable[CountedAnswer] = ()
        """Their tokens are counted at the end."""

    def add_request(self, now_s: float) -> QuotaRefusal | None:
        return self._more_requests(1, now_s)

    def add_answers(
        self, answers: int, prompt_tokens: int, most_tokens: int, now_s: float
    ) -> QuotaRefusal | None:
        """Count the answers, prompt tokens and maximal tokens of a parsed request."""
        quota, most = self.quota, self.quota.limits.tokens
        if answers > 1 and (refusal := self._more_requests(answers - 1, now_s)) is not None:
            return refusal
        if most is not None and quota.tokens + most_tokens > most:
            excess = f"prompts and longest answers have {most_tokens} tokens, "
            held = f"{quota.tokens} of the {most} that the tenant may have at a time are in use"
            return QuotaRefusal(
                "tokens", excess + held, QUOTA_RETRY_S if most_tokens <= most else None
            )
        if (refusal := quota.take("tokens", prompt_tokens, now_s)) is not None:
            return refusal
        quota.tokens += most_tokens
        self._tokens += most_tokens
        return None

    def add_reader(self, now_s: float) -> QuotaRefusal | None:
        if (refusal := self._refusal(self.quota.attached, 0, 1, now_s)) is not None:
            return refusal
        self.quota.attached += 1
        self._attached += 1
        return None

    def release(self, now_s: float) -> None:
        """Release everything. Idempotent."""
        quota = self.quota
        quota.requests -= self._requests
        quota.tokens -= self._tokens
        quota.attached -= self._attached
        self._requests = self._tokens = self._attached = 0
        quota.spend("tokens", sum(answer.counted_tokens for answer in self.answers), now_s)
        self.answers = ()

    def _more_requests(self, more: int, now_s: float) -> QuotaRefusal | None:
        if (refusal := self._refusal(self.quota.requests, self._requests, more, now_s)) is not None:
            return refusal
        self.quota.requests += more
        self._requests += more
        return None

    def _refusal(self, used: int, own: int, more: int, now_s: float) -> QuotaRefusal | None:
        """Why the tenant, with `used` at a time, may not have more; else they count in its rate.
        `own`: those of `used` that this lease has, which do not end while it waits."""
        most = self.quota.limits.requests
        if most is not None and used + more > most:
            again_s = QUOTA_RETRY_S if own + more <= most else None
            excess = f"the tenant may have {most} requests at a time"
            return QuotaRefusal("requests", excess, again_s)
        return self.quota.take("requests", more, now_s)
