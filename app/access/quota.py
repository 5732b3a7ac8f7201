"""Limits of one tenant, requests and tokens in flight and per minute, its budgets of tokens a day
and a month, and their use at one gateway.

Pure: the clock is passed in, in seconds. A gateway counts up to its share of each limit; where
gateways divide limits (`app/http/server/limit_sharing.py`) it holds nothing at first, else all. A
whole share of a limit per minute comes back in a minute. Tokens in flight are those of prompts and
of the longest answers; per minute, prompts count when they begin and answers when they end, so more
than the share may be used.

A request counts towards a budget with its prompt and its longest answer, once it has ended with the
answer that it had, and from its record of usage on by what was billed for (`budgets.py`): so what
gateways know counts while collectors are away, until the end of the period. A request that may
need more than is left of a budget runs alone: so a budget is exceeded by at most one request over
all gateways. Not counted before it is billed is what one gateway alone knew, and was killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, get_args

from kvlane.app.access.key_file import Tenant

MINUTE_S = 60.0
QUOTA_RETRY_S = 1.0
UNBILLED_S = 60.0
"""Time for the usage of a request whose client has left, or that was not published. Until then it
counts as its longest answer, and from then on once its usage is written."""
MAX_RESERVATIONS = 10_000
"""Requests of a tenant that are known by id; tokens of further ones count as one sum, which the
usage of others lowers."""
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
    DAY_TOKENS = 5
    MONTH_TOKENS = 6


LIMIT_NAMES = (
    "requests", "readers", "tokens", "requests_per_minute", "tokens_per_minute", "tokens_per_day",
    "tokens_per_month", "file_bytes", "batches",
)  # fmt: skip
"""By `TenantLimit`, as operators set them; the last two hold over all gateways."""


_RATES: dict[TenantLimit, LimitKind] = {
    TenantLimit.REQUEST_RATE: "requests",
    TenantLimit.TOKEN_RATE: "tokens",
}


BUDGETS = {TenantLimit.DAY_TOKENS: "day", TenantLimit.MONTH_TOKENS: "month"}
"""Limits of which also a request without tokens is refused once nothing is left."""


class BudgetUse(NamedTuple):
    """Tokens of a tenant that were billed in a period, which ends at `until_ms`, in `left_s`."""

    tokens: int
    until_ms: int
    left_s: float


_NO_USE = BudgetUse(0, 0, 0.0)


class QuotaRefusal(NamedTuple):
    """A limit that is reached. Without `retry_after_s` the request can never be within it.
    `lacks_share`: other gateways may hold what is missing. `is_used_up`: a budget."""

    limit: TenantLimit
    message: str
    retry_after_s: float | None
    lacks_share: bool = False
    is_used_up: bool = False


class CountedAnswer(Protocol):
    @property
    def counted_tokens(self) -> int:
        """Number of tokens so far."""

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete, with all its tokens."""


class RequestTokens(NamedTuple):
    """A request with one answer: tokens of its prompt, and with its longest answer."""

    id: str
    prompt_tokens: int
    most_tokens: int


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
        self.billed = dict.fromkeys(TenantLimit, 0)
        """Tokens that have left the share for the use of a budget since the last claim."""
        self._budget_use: Mapping[TenantLimit, BudgetUse] = {}
        self._reserved: dict[str, int] = {}
        """Tokens by the id of the request, until its usage is read."""
        self._ended: dict[str, set[TenantLimit]] = {}
        """Those with the tokens that they had, and the budgets that they count towards."""
        self._left_s: dict[str, float] = {}
        """Those of which no end is known, and since when."""
        self._ended_tokens = dict.fromkeys(BUDGETS, 0)
        """Of requests that have ended in the period, and are not billed."""
        self._unknown_tokens = dict.fromkeys(BUDGETS, 0)
        """Of those among them without an id."""
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
        self._budgets = {limit: getattr(limits, LIMIT_NAMES[limit]) for limit in BUDGETS}
        self.set_budget_use(self._budget_use)
        for limit, most in self.most.items():
            if not self.is_shared:
                self.held[limit] = most or 0
            if most is None and limit in _RATES:
                self.used[limit] = 0.0

    @property
    def has_budget(self) -> bool:
        return any(budget is not None for budget in self._budgets.values())

    def set_budget_use(self, used: Mapping[TenantLimit, BudgetUse]) -> None:
        """Set what was billed of the budgets; the rest is what gateways divide. What has ended in
        the period before counts no more, billed or not."""
        for limit, use in used.items():
            if use.until_ms > self._budget_use.get(limit, use).until_ms:
                self._begin_period(limit)
        self._budget_use = used
        for limit, budget in self._budgets.items():
            tokens = used.get(limit, _NO_USE).tokens
            self.most[limit] = None if budget is None else max(0, budget - tokens)

    def _begin_period(self, limit: TenantLimit) -> None:
        self.used[limit] -= self._ended_tokens[limit]
        self._ended_tokens[limit] = self._unknown_tokens[limit] = 0
        for request_id, limits in list(self._ended.items()):
            limits.discard(limit)
            if not limits:
                self._drop(request_id)

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
        while self._left_s and now_s >= (first := next(iter(self._left_s.items())))[1] + UNBILLED_S:
            self._drop(first[0])

    def hold(self, limit: TenantLimit, share: int, now_s: float) -> None:
        self.settle(now_s)
        self.held[limit] = share

    def refusal(self, limit: TenantLimit, more: int, own: int = 0) -> QuotaRefusal | None:
        """Why the tenant may not use more of a limit now. `own`: what the asking request uses
        of it, which does not end while that waits."""
        most = self.most[limit]
        if most is not None and limit in BUDGETS:
            return self._budget_refusal(limit, more, most)
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

    def _budget_refusal(self, limit: TenantLimit, more: int, most: int) -> QuotaRefusal | None:
        left, period = most - self._ended_tokens[limit], BUDGETS[limit]
        use = self._budget_use.get(limit, _NO_USE)
        if left <= 0:
            begin = datetime.fromtimestamp(use.until_ms / 1000, UTC).isoformat(" ", "minutes")[:16]
            message = (
                f"the tenant has used its {self._budgets[limit]} tokens a {period} "
                f"(tokens_per_{period}): they begin anew at {begin} UTC"
            )
            return QuotaRefusal(limit, message, use.left_s, is_used_up=True)
        need = self.used[limit] + min(more, left)
        if need <= min(self.held[limit], most) + _ROUNDING:
            return None
        message = (
            f"prompts and longest answers have {more} tokens, and requests under way may use those "
            f"that are left of the tenant's {self._budgets[limit]} a {period}, {left} at most"
        )
        lacks_share = need + self.waiting[limit] <= most + _ROUNDING
        return QuotaRefusal(limit, message, QUOTA_RETRY_S, lacks_share)

    def reserve(self, requests: Sequence[RequestTokens]) -> None:
        """Requests that `used` has been counted for, until `end_request` and `bill`."""
        self._reserved |= {request.id: request.most_tokens for request in requests}

    def end_request(self, request: RequestTokens, answer: CountedAnswer, now_s: float) -> None:
        """A request has ended, or its reader has left."""
        reserved = self._reserved.get(request.id)
        if reserved is None:
            return
        if not answer.has_ended:
            self._left_s[request.id] = now_s
            return
        tokens = request.prompt_tokens + answer.counted_tokens
        for limit in BUDGETS:
            self.used[limit] += tokens - reserved
            self._ended_tokens[limit] += tokens
        self._reserved[request.id] = tokens
        self._ended[request.id] = set(BUDGETS)
        if len(self._ended) > MAX_RESERVATIONS:
            first = next(iter(self._ended))
            tokens = self._reserved.pop(first)
            for limit in self._ended.pop(first):
                self._unknown_tokens[limit] += tokens

    def bill(self, request_id: str, tokens: int, limits: Sequence[TenantLimit]) -> None:
        """The usage of a request of any gateway was read. `limits`: the budgets that it counts
        towards."""
        counted = dict.fromkeys(BUDGETS, tokens)
        if request_id in self._reserved:
            self._drop(request_id)
        else:
            for limit, unknown in self._unknown_tokens.items():
                counted[limit] = min(tokens, unknown)
                self._unknown_tokens[limit] -= counted[limit]
                self._ended_tokens[limit] -= counted[limit]
                self.used[limit] -= counted[limit]
        for limit in limits:
            self.held[limit] = max(0, self.held[limit] - counted[limit])
            self.billed[limit] += counted[limit]

    def _drop(self, request_id: str) -> None:
        tokens, ended = self._reserved.pop(request_id), self._ended.pop(request_id, None)
        self._left_s.pop(request_id, None)
        for limit in BUDGETS if ended is None else ended:
            self.used[limit] -= tokens
            if ended is not None:
                self._ended_tokens[limit] -= tokens

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
        self.answers: Sequence[CountedAnswer] = ()
        """Their tokens are counted at the end."""
        self.requests: Sequence[RequestTokens] = ()
        """Those of `answers` that count towards a budget."""

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
                quota.used[limit] += more
                if limit not in BUDGETS:
                    self._used[limit] += more
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
        for request, answer in zip(self.requests, self.answers, strict=False):
            quota.end_request(request, answer, now_s)
        self.answers = self.requests = ()
