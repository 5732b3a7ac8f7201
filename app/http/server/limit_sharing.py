"""Shares of a gateway in the limits of tenants: gateways claim them on the topic `capacity`.

The order of the log decides. A claim has what its gateway holds of a limit, and what it wants. A
gateway may hold what it wants as far as the limit exceeds the claims of the others: what those
before its own claim want, and what those behind it hold, since each of them has counted this claim
in full. So shares together never exceed a limit, whatever each gateway has read so far. While more
than the limit is wanted, each gateway lowers its claim to what it uses.

A gateway has one record under way at a time, and increases no share of it before it has read the
record. A claim that is not renewed lapses after `CLAIM_TTL_S` for all others; its gateway keeps
that share and gets no more. Tenants without requests cost no records.

Of budgets gateways divide what is left after the usage that they have read. What a request was
billed leaves the share of its gateway, so that share and usage together stay the same. A claim says
which usage its gateway had read; a gateway that lacks some of it increases no share of a budget, so
no gateway takes tokens that were billed at another. If it lacks some for `CLAIM_TTL_S`, it goes on
by the usage that it has: the rest may exceed budgets then, and an outage refuses no request.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from kvlane.app.access.quota import BUDGETS, QuotaLease, QuotaRefusal, TenantLimit, TenantQuota
from kvlane.app.http.server.usage_follower import UsageFollower
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import BrokerClock
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.ports import Log, Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import LimitClaims, LogRecord
from kvlane.streams.topics import CAPACITY
from kvlane.streams.views.follower import Follower

log = logging.getLogger(__name__)

CLAIM_TTL_S = 15.0
RENEWAL_S = 5.0
"""Between two records of a claim: 10 s without a leader of the topic let no claim lapse."""
SHARE_WAIT_S = 1.0
"""Wait of a request for shares of other gateways, which take two appends and reads."""
READ_BACK_S = 10.0
"""Wait for a record of its own; past it the claims are written again."""
RETRY_S = 1.0
TENANTS_PER_RECORD = 100
FIRST_SHARE = 8
"""A claim is an eighth of the limit at least, while others leave so much: it is written once."""
_SOURCE = Partition(CAPACITY, 0)
_NOTHING = (0,) * len(TenantLimit)


class _Claim(NamedTuple):
    held: tuple[int, ...]
    wanted: tuple[int, ...]
    offset: int
    at_s: float
    """When it was read; when it was sent, for a claim of this gateway."""


class LimitSharing:
    """The shares of one gateway; a `FollowedView` of the claims of all gateways."""

    name = "limit claims"

    def __init__(
        self,
        log: Log,
        ctx: ProcessContext,
        broker_clock: BrokerClock,
        usage: UsageFollower | None = None,
    ) -> None:
        """Without `usage` tenants have no budgets."""
        self._log = log
        self._usage = usage
        if usage is not None:
            usage.on_billed = self._on_billed
        self._usage_read: tuple[int, ...] = ()
        """By lane, the most that a gateway has read with a claim."""
        self._lags_since_s: float | None = None
        """Since when this gateway lacks some of that."""
        self._ctx = ctx
        self._clock = ctx.clock
        self._broker_clock = broker_clock
        self._gateway = ""
        self._publisher = RecordPublisher(log, ctx.clock)
        self._follower = Follower(log, self, [_SOURCE], ctx.clock, start=self._recent)
        self._position: int | None = None
        self._numbers: dict[str, int] = {}
        self._claims: dict[str, dict[str, _Claim]] = {}
        self._quotas: dict[str, TenantQuota] = {}
        """Of the tenants with a claim of this gateway, or with requests that wait for one."""
        self._number = 0
        self._sent_s = 0.0
        self._due: dict[str, None] = {}
        """Tenants whose claim may have to change, in this order."""
        self._wake = asyncio.Event()
        self._more: dict[str, asyncio.Event] = {}
        """Set when a tenant may use more, if requests wait for that."""

    def start(self) -> None:
        if not self._gateway:
            self._gateway = f"{self._ctx.name}-{self._ctx.rng.getrandbits(64):016x}"
            self._ctx.spawn("limit claims", self._follower.run())
            self._ctx.spawn("limit shares", self._run())

    async def close(self) -> None:
        """Give all shares back, unless the log does not accept that at once."""
        tenants, self._quotas = list(self._quotas), {}
        with suppress(AppendFailed, BrokerUnavailable, TimeoutError):  # they lapse
            async with asyncio.timeout(RETRY_S):
                for n in range(0, len(tenants), TENANTS_PER_RECORD):
                    names = tenants[n : n + TENANTS_PER_RECORD]
                    await self._append(dict.fromkeys(names, _Claim(_NOTHING, _NOTHING, 0, 0.0)))

    async def add(
        self, tenant: str, lease: QuotaLease, amounts: Mapping[TenantLimit, int]
    ) -> QuotaRefusal | None:
        """Count all amounts, or none. Waits while other gateways may have the share for them."""
        quota, until_s = lease.quota, self._clock.now() + SHARE_WAIT_S
        while True:
            self._update(tenant, quota)
            refusal = lease.add(amounts, self._clock.now())
            left_s = until_s - self._clock.now()
            if refusal is None or not refusal.lacks_share or left_s <= 0:
                return refusal
            self.start()
            self._quotas[tenant] = quota
            more = self._more.setdefault(tenant, asyncio.Event())
            self._grant(tenant, quota)
            quota.wait(amounts, +1)
            self._check(tenant)
            try:
                async with asyncio.timeout(left_s):
                    await more.wait()
            except TimeoutError:
                until_s = -math.inf  # also where a timer fires a rounding error early
            finally:
                quota.wait(amounts, -1)
                self._check(tenant)

    def released(self, tenant: str) -> None:
        quota = self._quotas.get(tenant)
        if quota is None:
            return
        self._notify(tenant)
        own = self._own(tenant)
        for limit, most in quota.limited():
            wanted = own.wanted[limit]
            is_short = quota.used[limit] > wanted - quota.billed[limit]
            if is_short or quota.elsewhere[limit] + wanted > most:
                self._check(tenant)
                return

    def _update(self, tenant: str, quota: TenantQuota) -> None:
        if self._usage is not None and quota.has_budget:
            self._usage.update(tenant, quota)

    def _on_billed(self, tenants: Collection[str]) -> None:
        """Usage of tenants was read: shares of budgets may increase now."""
        for tenant in {*tenants, *self._more}:
            if (quota := self._quotas.get(tenant)) is not None:
                self._grant(tenant, quota)
                self.released(tenant)

    def _lags(self) -> bool:
        """Whether shares of budgets have to wait for usage before they increase."""
        now_s = self._clock.now()
        if self._usage is None or self._usage.view.has_read(self._usage_read):
            self._lags_since_s = None
            return False
        self._lags_since_s = now_s if self._lags_since_s is None else self._lags_since_s
        return now_s - self._lags_since_s < CLAIM_TTL_S

    def _check(self, tenant: str) -> None:
        self._due[tenant] = None
        self._wake.set()

    def _notify(self, tenant: str) -> None:
        if (more := self._more.pop(tenant, None)) is not None:
            more.set()

    def _own(self, tenant: str) -> _Claim:
        nothing = _Claim(_NOTHING, _NOTHING, 0, -math.inf)
        return self._claims.get(tenant, {}).get(self._gateway, nothing)

    # --- claims of this gateway -------------------------------------------------------------------

    async def _run(self) -> None:
        await self._follower.wait_caught_up()
        renewal_s = self._clock.now() + RENEWAL_S
        while True:
            if self._clock.now() >= renewal_s:
                self._renew()
                renewal_s = self._clock.now() + RENEWAL_S
            if claims := self._next_claims():
                await self._claim(claims)
                continue
            self._wake.clear()
            left_s = max(0.0, renewal_s - self._clock.now())
            try:
                async with asyncio.timeout(left_s if self._quotas or self._claims else None):
                    await self._wake.wait()
            except TimeoutError:
                renewal_s = self._clock.now()  # as above

    def _renew(self) -> None:
        """Forget what has lapsed, and look at all claims of this gateway."""
        now_s = self._clock.now()
        for tenant, claims in list(self._claims.items()):
            for gateway, claim in list(claims.items()):
                if gateway != self._gateway and now_s - claim.at_s >= CLAIM_TTL_S:
                    del claims[gateway]
            if not claims:
                del self._claims[tenant]
        known = {gateway for claims in self._claims.values() for gateway in claims}
        self._numbers = {name: n for name, n in self._numbers.items() if name in known}
        for tenant, quota in list(self._quotas.items()):
            if tenant not in self._claims and not any(quota.waiting.values()):
                del self._quotas[tenant]
                self._more.pop(tenant, None)
                continue
            self._grant(tenant, quota)
            self._due[tenant] = None

    def _next_claims(self) -> dict[str, _Claim]:
        found: dict[str, _Claim] = {}
        while self._due and len(found) < TENANTS_PER_RECORD:
            tenant = next(iter(self._due))
            del self._due[tenant]
            quota = self._quotas.get(tenant)
            if quota is not None and (claim := self._next_claim(tenant, quota)) is not None:
                found[tenant] = claim
        return found

    def _next_claim(self, tenant: str, quota: TenantQuota) -> _Claim | None:
        """The claim to write for a tenant; None if the one in the log stands."""
        now_s, own = self._clock.now(), self._own(tenant)
        quota.settle(now_s)
        self._update(tenant, quota)
        is_due = now_s - own.at_s >= RENEWAL_S - 1
        is_in_use = quota.is_active or any(quota.used.values()) or any(quota.waiting.values())
        wanted = list(_NOTHING)
        for limit, most in quota.limited():
            before, free = own.wanted[limit], most - quota.elsewhere[limit]
            need = min(most, math.ceil(quota.used[limit]) + quota.waiting[limit])
            ample = min(most, max(2 * need, most // FIRST_SHARE)) if is_in_use else 0
            wanted[limit] = max(need, min(ample, free))
            is_due |= need > before - quota.billed[limit] or before > max(free, wanted[limit])
        if not is_due or not (any(wanted) or any(own.wanted)):
            return None
        quota.is_active = False
        held = tuple(min(quota.held[limit], wanted[limit]) for limit in TenantLimit)
        return _Claim(held, tuple(wanted), 0, now_s)

    async def _claim(self, claims: Mapping[str, _Claim]) -> None:
        """Write claims, and read them back."""
        now_s = self._clock.now()
        for tenant, claim in claims.items():
            for limit in TenantLimit:
                self._quotas[tenant].hold(limit, claim.held[limit], now_s)
                self._quotas[tenant].billed[limit] = 0
            if self._gateway in (former := self._claims.get(tenant, {})):
                # Others may have read the new one: nothing is added by the former.
                former[self._gateway] = self._own(tenant)._replace(at_s=-math.inf)
        try:
            async with asyncio.timeout(READ_BACK_S):
                await self._follower.wait_for(_SOURCE, await self._append(claims) + 1)
        except (AppendFailed, BrokerUnavailable, TimeoutError) as e:
            log.warning("cannot share the limits of tenants with other gateways: %s", e)
            await self._clock.sleep(RETRY_S)
            self._due.update(dict.fromkeys(claims))

    async def _append(self, claims: Mapping[str, _Claim]) -> int:
        self._number += 1
        self._sent_s = self._clock.now()
        record = LimitClaims(
            self._gateway, self._number,
            {tenant: claim.held for tenant, claim in claims.items()},
            {tenant: claim.wanted for tenant, claim in claims.items()},
            () if self._usage is None else self._usage.view.offsets,
        )  # fmt: skip
        return (await self._publisher.publish_once(CAPACITY, self._gateway, record, 0)).offset

    def _grant(self, tenant: str, quota: TenantQuota) -> None:
        """Hold as much of what is wanted as the claims of other gateways leave."""
        self._update(tenant, quota)
        now_s, own = self._clock.now(), self._own(tenant)
        others = [claim for claim in self._others(tenant) if now_s - claim.at_s < CLAIM_TTL_S]
        is_valid = now_s - own.at_s < CLAIM_TTL_S - RENEWAL_S
        for limit in TenantLimit:
            quota.elsewhere[limit] = sum(each.wanted[limit] for each in others)
        for limit, most in quota.limited() if is_valid else ():
            if limit in BUDGETS and self._lags():
                continue
            room = most - sum(
                each.wanted[limit] if each.offset < own.offset else each.held[limit]
                for each in others
            )
            if (share := min(own.wanted[limit] - quota.billed[limit], room)) > quota.held[limit]:
                quota.hold(limit, share, now_s)
                self._notify(tenant)

    def _others(self, tenant: str) -> Iterator[_Claim]:
        claims = self._claims.get(tenant, {})
        return (claim for gateway, claim in claims.items() if gateway != self._gateway)

    # --- View -------------------------------------------------------------------------------------

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:  # noqa: ARG002
        self._position = position
        for log_record in log_records:
            record = log_record.record
            if isinstance(record, LimitClaims) and record.number > self._numbers.get(
                record.gateway, 0
            ):
                self._numbers[record.gateway] = record.number
                self._read(record, log_record.offset)

    def _read(self, record: LimitClaims, offset: int) -> None:
        at_s = self._clock.now()
        if record.gateway == self._gateway:
            at_s = self._sent_s if record.number == self._number else -math.inf
        offsets = zip_longest(self._usage_read, record.usage_offsets, fillvalue=0)
        self._usage_read = tuple(map(max, offsets))
        for tenant, wanted in record.wanted.items():
            held = record.held.get(tenant, ())
            claims = self._claims.setdefault(tenant, {})
            claims[record.gateway] = _Claim(_amounts(held), _amounts(wanted), offset, at_s)
            if not any(held) and not any(wanted):
                del claims[record.gateway]
            if not claims:
                del self._claims[tenant]
            if (quota := self._quotas.get(tenant)) is not None:
                self._grant(tenant, quota)
                self._check(tenant)

    async def _recent(self, source: Partition) -> int:
        """An offset before every claim that has not lapsed."""
        since_ms = (self._broker_clock.now_ms() or 0) - 2000 * CLAIM_TTL_S
        return await self._log.offset_at(source.topic, source.partition, max(0, int(since_ms)))

    def position(self, source: Partition) -> int | None:  # noqa: ARG002
        return self._position

    def forget(self, source: Partition) -> None:  # noqa: ARG002
        """Claims that the log has lost have lapsed, or are written again."""
        self._position = None
        self._claims.clear()


def _amounts(amounts: Sequence[int]) -> tuple[int, ...]:
    """Amounts of all limits, also from a version with more or fewer."""
    return tuple(max(0, amount) for amount in (*amounts, *_NOTHING)[: len(TenantLimit)])
