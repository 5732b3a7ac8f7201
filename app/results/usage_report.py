"""Sums of the usage of a period, by tenant or other fields, and what is left of budgets, from the
topic `usage` alone.

The same period gives the same sums whenever it is read, while its records are kept: a record counts
in the period of its `ended_ms`, an append time of the ledger.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from kvlane.app.access.budgets import TenantUsage, period_at
from kvlane.app.access.key_file import Tenant
from kvlane.app.access.quota import LIMIT_NAMES, TenantLimit
from kvlane.app.http.api_errors import WHOLE_CODES
from kvlane.app.operator_error import OperatorError
from kvlane.streams.clock import CLOCK_SKEW_MS, Clock
from kvlane.streams.codecs import decode
from kvlane.streams.errors import Malformed
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.range_reader import Progress, read_range
from kvlane.streams.records import LogRecord, RequestUsage
from kvlane.streams.topics import USAGE

FIELDS = {
    "tenant": "tenant", "key": "key_id", "model": "model", "alias": "alias", "adapter": "adapter",
    "class": "service_class", "code": "code",
}  # fmt: skip
"""Names of groups, and the fields of `RequestUsage`."""
COUNTS = (
    "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "recomputed_tokens",
    "attempts", "prefill_ms", "decode_ms",
)  # fmt: skip


class UsageSum(msgspec.Struct):
    """The sums of one group. `completed`: requests with a whole answer; `incomplete`: requests of
    which a count is unknown."""

    requests: int = 0
    completed: int = 0
    incomplete: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    recomputed_tokens: int = 0
    attempts: int = 0
    prefill_ms: int = 0
    decode_ms: int = 0

    def add(self, usage: RequestUsage) -> None:
        self.requests += 1
        self.completed += usage.code in WHOLE_CODES
        self.incomplete += bool(usage.unknown)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(usage, name))


def parse_groups(text: str) -> list[str]:
    """The names of groups in a list with commas. Raises OperatorError for others."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in FIELDS]:
        raise OperatorError(
            f"usage has no group {', '.join(unknown)}: choose among {', '.join(FIELDS)}"
        )
    return list(dict.fromkeys(names))


async def sum_usage(
    log: Log, clock: Clock, period: range, groups: Sequence[str], progress: Progress
) -> dict[tuple[str, ...], UsageSum]:
    """The sums by the values of `groups`, in their order. `period`: in ms since 1970. Raises
    BrokerUnavailable, PositionLost, AccessDenied, NewerRecord."""
    fields = [FIELDS[name] for name in groups]
    sums: dict[tuple[str, ...], UsageSum] = {}
    async with aclosing(_read_usage(log, clock, period.start, progress)) as batches:
        async for _, log_records in batches:
            for usage in (each.record for each in log_records):
                if isinstance(usage, RequestUsage) and usage.ended_ms in period:
                    key = tuple(getattr(usage, field) for field in fields)
                    sums.setdefault(key, UsageSum()).add(usage)
    return dict(sorted(sums.items()))


async def kept_from(log: Log, clock: Clock, since_ms: int) -> int | None:
    """The append time in ms from which on all usage is kept; None: since `since_ms` at least.
    Raises BrokerUnavailable, PositionLost."""
    numbers = list(range(await log.partitions(USAGE)))
    starts, ends = await log.start_offsets(USAGE, numbers), await log.end_offsets(USAGE, numbers)
    found: list[int] = []
    for n, start in starts.items():
        if not 0 < start < ends[n] or await log.offset_at(USAGE, n, max(0, since_ms)) > start:
            continue
        source = Partition(USAGE, n)
        async with aclosing(read_range(log, clock, {source: start}, {source: ends[n]})) as pieces:
            async for piece in pieces:
                if piece.records:
                    found.append(piece.records[0].timestamp)
                    break
    return max(found, default=None)


BUDGET_FIELDS = ("tenant", "limit", "budget", "used", "left", "begins_anew_ms")


async def budget_rows(
    log: Log, clock: Clock, tenants: Mapping[str, Tenant], progress: Progress
) -> list[dict[str, Any]]:
    """`BUDGET_FIELDS` of the budgets of tenants: tokens in the present period, and its end in ms
    since 1970. Raises as `sum_usage`."""
    now_ms = clock.wall_ms()
    view = TenantUsage(tenants.__contains__, now_ms)
    month = period_at(TenantLimit.MONTH_TOKENS, now_ms)
    async with aclosing(_read_usage(log, clock, month.start, progress)) as batches:
        async for source, log_records in batches:
            view.apply(source, log_records, log_records[-1].offset + 1)
    rows = []
    for name, terms in tenants.items():
        for limit, use in view.used(name, now_ms).items():
            if (budget := getattr(terms, LIMIT_NAMES[limit])) is not None:
                tokens = (budget, use.tokens, max(0, budget - use.tokens))
                values = (name, LIMIT_NAMES[limit], *tokens, use.until_ms)
                rows.append(dict(zip(BUDGET_FIELDS, values, strict=True)))
    return rows


async def _read_usage(
    log: Log, clock: Clock, since_ms: int, progress: Progress
) -> AsyncGenerator[tuple[Partition, list[LogRecord]], None]:
    """All that was written since a time, in batches that are not empty. Close it (`aclosing`)."""
    numbers = list(range(await log.partitions(USAGE)))
    ends = await log.end_offsets(USAGE, numbers)
    since_ms = max(0, since_ms - CLOCK_SKEW_MS)
    starts = {n: await log.offset_at(USAGE, n, since_ms) for n in numbers}
    pieces = read_range(
        log,
        clock,
        {Partition(USAGE, n): start for n, start in starts.items()},
        {Partition(USAGE, n): end for n, end in ends.items()},
        progress=progress,
    )
    async with aclosing(pieces):
        async for piece in pieces:
            log_records = []
            for record in piece.records:
                with suppress(Malformed):
                    decoded = decode(record)
                    log_records.append(LogRecord(record.offset, record.timestamp, decoded))
            if log_records:
                yield piece.source, log_records
