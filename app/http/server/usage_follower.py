"""The usage of tenants with budgets, followed by one gateway into its quotas (`budgets.py`).

Nothing is read before a tenant has a budget; then all usage of the present month, which `start`
waits for at most `START_WAIT_S`. A gateway that has read less than all admits by what it has read.
While the topic cannot be read, what is known stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kvlane.app.access.budgets import TenantUsage, billed_tokens, period_at
from kvlane.app.access.quota import TenantLimit, TenantQuota
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import CLOCK_SKEW_MS
from kvlane.streams.ports import Log, Partition
from kvlane.streams.records import LogRecord, RequestUsage
from kvlane.streams.topics import USAGE
from kvlane.streams.views.follower import Follower

log = logging.getLogger(__name__)

START_WAIT_S = 30.0


class UsageFollower:
    def __init__(
        self, log: Log, ctx: ProcessContext, is_tenant: Callable[[str], bool],
        quotas: Mapping[str, TenantQuota],
    ) -> None:  # fmt: skip
        """`is_tenant`: whether a tenant has a key; `quotas`: of tenants with requests."""
        self._log = log
        self._ctx = ctx
        self._quotas = quotas
        self.view = TenantUsage(is_tenant, ctx.clock.wall_ms())
        self._follower = Follower(
            log, self.view, [USAGE], ctx.clock, start=self._month_start, on_applied=self._applied
        )
        self._has_started = False
        self.on_billed: Callable[[Collection[str]], None] = lambda _: None
        """Called with the tenants whose usage was read."""

    async def start(self) -> None:
        """Begin to read, and wait for the usage that there is, for a time."""
        self._begin()
        try:
            async with asyncio.timeout(START_WAIT_S):
                await self._follower.wait_caught_up()
        except TimeoutError:
            log.warning(
                "%d records of usage are not read after %g s: until then tenants may exceed their "
                "budgets", self._follower.remaining_offsets, START_WAIT_S,
            )  # fmt: skip

    def update(self, tenant: str, quota: TenantQuota) -> None:
        """Tell a quota what was used until now."""
        self._begin()
        quota.set_budget_use(self.view.used(tenant, self._ctx.clock.wall_ms()))

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._ctx.spawn("usage", self._follower.run())

    async def _month_start(self, source: Partition) -> int:
        month = period_at(TenantLimit.MONTH_TOKENS, self._ctx.clock.wall_ms())
        since_ms = max(0, month.start - CLOCK_SKEW_MS)
        return await self._log.offset_at(source.topic, source.partition, since_ms)

    def _applied(self, _: Partition, log_records: Sequence[LogRecord]) -> None:
        tenants = set()
        for log_record in log_records:
            usage = log_record.record
            if isinstance(usage, RequestUsage) and usage.tenant:
                if (quota := self._quotas.get(usage.tenant)) is not None:
                    limits = self.view.present_limits(usage)
                    quota.bill(usage.id, billed_tokens(usage), limits)
                tenants.add(usage.tenant)
        self.on_billed(tenants)
