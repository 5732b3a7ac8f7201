"""Tokens that tenants have used in the present day and month, by the topic `usage`: what counts
towards their budgets (`tokens_per_day`, `tokens_per_month`). Pure.

Days and months are those of the calendar in UTC. A request counts in the period of its end, by the
append time of the ledger, with all tokens of its prompt and its answer, from every source: HTTP,
Kafka, batches. Bound: one sum for each tenant with a key or among `MAX_OTHERS`, period and lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from kvlane.app.access.quota import BUDGETS, BudgetUse, TenantLimit
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, RequestUsage
from kvlane.streams.topics import DAY_MS

MAX_OTHERS = 1000
"""Tenants without a key whose usage is kept, since they may get one; clients of Kafka name any."""


def period_at(limit: TenantLimit, at_ms: int) -> range:
    """The day or month of a budget at a time, in ms since 1970."""
    if limit is TenantLimit.DAY_TOKENS:
        return range(start := at_ms // DAY_MS * DAY_MS, start + DAY_MS)
    day = datetime.fromtimestamp(at_ms / 1000, UTC)
    first = datetime(day.year, day.month, 1, tzinfo=UTC)
    after = datetime(day.year + day.month // 12, day.month % 12 + 1, 1, tzinfo=UTC)
    return range(int(first.timestamp() * 1000), int(after.timestamp() * 1000))


def billed_tokens(usage: RequestUsage) -> int:
    return usage.prompt_tokens + usage.output_tokens


class TenantUsage:
    """A `FollowedView` of `usage`. `has_key`: whether a tenant has one now."""

    name = "usage of tenants"

    def __init__(self, has_key: Callable[[str], bool], now_ms: int) -> None:
        self._has_key = has_key
        self._others: set[str] = set()
        self._positions: dict[Partition, int] = {}
        self._placed: dict[Partition, int] = {}
        self._read: dict[Partition, int] = {}
        """Offset after the last record that was read."""
        self._sums: dict[Partition, Counter[tuple[str, TenantLimit]]] = {}
        self._periods = {limit: period_at(limit, now_ms) for limit in BUDGETS}

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:
        if source not in self._positions:
            self._placed[source] = position
            if position < self._read.get(source, 0):  # its records are read once more
                self._sums.pop(source, None)
        self._positions[source] = position
        for log_record in log_records:
            self._read[source] = log_record.offset + 1
            usage = log_record.record
            if isinstance(usage, RequestUsage) and self._is_counted(usage.tenant):
                self.advance(min(usage.ended_ms, log_record.timestamp_ms + CLOCK_SKEW_MS))
                for limit in self.present_limits(usage):
                    sums = self._sums.setdefault(source, Counter())
                    sums[usage.tenant, limit] += billed_tokens(usage)

    def _is_counted(self, tenant: str) -> bool:
        if tenant in self._others or self._has_key(tenant):
            return True
        if not tenant or len(self._others) >= MAX_OTHERS:
            return False
        self._others.add(tenant)
        return True

    def advance(self, now_ms: int) -> None:
        """Begin the periods of a time anew, unless a later time was given or read before."""
        for limit, period in self._periods.items():
            if now_ms >= period.stop:
                self._periods[limit] = period_at(limit, now_ms)
                for sums in self._sums.values():
                    for key in [key for key in sums if key[1] is limit]:
                        del sums[key]

    def present_limits(self, usage: RequestUsage) -> list[TenantLimit]:
        """The budgets in whose present period a request has ended."""
        return [limit for limit, period in self._periods.items() if usage.ended_ms in period]

    def used(self, tenant: str, now_ms: int) -> dict[TenantLimit, BudgetUse]:
        """The tokens of a tenant in the periods of a time, of the records that were read."""
        self.advance(now_ms)
        return {
            limit: BudgetUse(
                sum(sums[tenant, limit] for sums in self._sums.values()),
                period.stop,
                max(0, period.stop - now_ms) / 1000,
            )
            for limit, period in self._periods.items()
        }

    @property
    def offsets(self) -> tuple[int, ...]:
        """By lane, the offset after the last record that was read; 0 without one."""
        return tuple(self._read.get(source, 0) for source in sorted(self._placed))

    def has_read(self, offsets: Sequence[int]) -> bool:
        """Whether this view has read as far as another one with these `offsets`."""
        own = [max(at, self._read.get(source, 0)) for source, at in sorted(self._placed.items())]
        return len(own) >= len(offsets) and all(map(int.__ge__, own, offsets))

    def position(self, source: Partition) -> int | None:
        return self._positions.get(source)

    def forget(self, source: Partition) -> None:
        """Its sums stay until its records are read once more."""
        self._positions.pop(source, None)
