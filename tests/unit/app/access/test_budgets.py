"""Tests of budgets: the fold of the topic `usage`, and admission by one gateway. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.access.budgets import MAX_OTHERS, TenantUsage, period_at
from kvlane.app.access.key_file import Tenant
from kvlane.app.access.quota import (
    BUDGETS,
    MAX_RESERVATIONS,
    UNBILLED_S,
    QuotaLease,
    QuotaRefusal,
    RequestTokens,
    TenantLimit,
    TenantQuota,
)
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, RequestUsage
from kvlane.streams.topics import DAY_MS, USAGE

DAY, MONTH = TenantLimit.DAY_TOKENS, TenantLimit.MONTH_TOKENS


def at_ms(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp() * 1000)  # type: ignore[arg-type, misc]


NOW_MS = at_ms(2026, 2, 27, 12)


def usage(tenant: str, tokens: int, ended_ms: int = NOW_MS, request_id: str = "r") -> RequestUsage:
    return RequestUsage(
        id=request_id, code="stop", ended_ms=ended_ms, tenant=tenant,
        prompt_tokens=tokens // 3, output_tokens=tokens - tokens // 3,
    )  # fmt: skip


def view() -> TenantUsage:
    return TenantUsage({"acme", "globex"}.__contains__, NOW_MS)


def tokens(of: TenantUsage, tenant: str, now_ms: int) -> dict[TenantLimit, int]:
    return {limit: use.tokens for limit, use in of.used(tenant, now_ms).items()}


@pytest.mark.parametrize(
    ("limit", "at", "first", "after"),
    [
        (DAY, (2026, 2, 28, 23, 59), (2026, 2, 28), (2026, 3, 1)),
        (MONTH, (2026, 2, 28, 23, 59), (2026, 2, 1), (2026, 3, 1)),
        (MONTH, (2026, 12, 31), (2026, 12, 1), (2027, 1, 1)),
        (MONTH, (2028, 2, 1), (2028, 2, 1), (2028, 3, 1)),
    ],
)
def test_periods_are_those_of_the_calendar(
    limit: TenantLimit, at: tuple[int, ...], first: tuple[int, ...], after: tuple[int, ...]
) -> None:
    assert period_at(limit, at_ms(*at)) == range(at_ms(*first), at_ms(*after))


Given = tuple[int, str, int, int]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["acme", "globex", "late", ""]), st.integers(0, 99),
            st.integers(-3 * 24, 3 * 24),
        )
    ),
    st.integers(0, 3 * 24),
    st.integers(0, 2**32),
)  # fmt: skip
def test_used_tokens_are_the_sum_of_the_present_periods(
    given_usage: list[Given], hours: int, seed: int
) -> None:
    """Whatever the order of lanes, and when a part of a lane is read once more."""
    of, rng = view(), Random(seed)
    lanes: dict[Partition, list[RequestUsage]] = {Partition(USAGE, n): [] for n in range(3)}
    for lane, tenant, count, hour in given_usage:
        lanes[Partition(USAGE, lane)].append(usage(tenant, count, NOW_MS + hour * 3_600_000))
    now_ms = max(NOW_MS + hours * 3_600_000, *(e.ended_ms for es in lanes.values() for e in es), 0)
    for source in lanes:
        of.apply(source, (), 0)
    left = dict.fromkeys(lanes, 0)
    while left:
        source = rng.choice(list(left))
        start, records = left[source], lanes[source]
        end = rng.randint(start, len(records))
        part = [LogRecord(n, records[n].ended_ms, records[n]) for n in range(start, end)]
        of.apply(source, part, end)
        left[source] = end
        if end == len(records):
            del left[source]
        elif rng.random() < 0.2:
            of.forget(source)
            left[source] = rng.choice((0, end))
            of.apply(source, (), left[source])
    for tenant in ("acme", "globex", "late", ""):
        expected = {
            limit: sum(
                each.prompt_tokens + each.output_tokens
                for records in lanes.values()
                for each in records
                if each.tenant == tenant != "" and each.ended_ms in period_at(limit, now_ms)
            )
            for limit in BUDGETS
        }
        assert tokens(of, tenant, now_ms) == expected


def test_sums_of_a_lane_stay_while_it_is_not_read() -> None:
    of, lane = view(), Partition(USAGE, 0)
    of.apply(lane, (), 5)
    of.apply(lane, [LogRecord(5, 0, usage("acme", 7))], 6)
    of.forget(lane)
    assert tokens(of, "acme", NOW_MS)[DAY] == 7
    of.apply(lane, (), 9)  # those before are no longer kept
    assert tokens(of, "acme", NOW_MS)[DAY] == 7
    of.forget(lane)
    of.apply(lane, (), 5)
    assert tokens(of, "acme", NOW_MS)[DAY] == 0


def test_usage_before_the_key_of_a_tenant_counts() -> None:
    """Its requests came from Kafka, or its key was missing in the file for a while."""
    tenants = {"acme"}
    of, lane = TenantUsage(tenants.__contains__, NOW_MS), Partition(USAGE, 0)
    of.apply(lane, (), 0)
    of.apply(lane, [LogRecord(0, NOW_MS, usage("late", 7))], 1)
    tenants.add("late")
    of.apply(lane, [LogRecord(1, NOW_MS, usage("late", 3))], 2)
    assert tokens(of, "late", NOW_MS)[MONTH] == 10


def test_names_of_other_tenants_are_bounded() -> None:
    of, lane = view(), Partition(USAGE, 0)
    names = [*(f"t{n}" for n in range(MAX_OTHERS + 9)), "acme"]
    records = [LogRecord(n, NOW_MS, usage(name, 2)) for n, name in enumerate(names)]
    of.apply(lane, records, len(records))
    counted = [name for name in names if tokens(of, name, NOW_MS)[DAY]]
    assert counted == [*names[:MAX_OTHERS], "acme"]


@pytest.mark.parametrize("ended_ms", [10**18, at_ms(2999, 1, 1), -1])
def test_odd_end_of_a_request_begins_no_period(ended_ms: int) -> None:
    of, lane = view(), Partition(USAGE, 0)
    of.apply(lane, [LogRecord(0, NOW_MS, usage("acme", 7, ended_ms))], 1)
    of.apply(lane, [LogRecord(1, NOW_MS, usage("acme", 3))], 2)
    assert tokens(of, "acme", NOW_MS) == {DAY: 3, MONTH: 3}


def test_view_has_read_what_another_has() -> None:
    one, other, lane = view(), view(), Partition(USAGE, 0)
    for each in (one, other):
        each.apply(lane, (), 5)
    assert other.has_read(one.offsets)
    one.apply(lane, [LogRecord(5, 0, usage("acme", 7))], 6)
    assert not other.has_read(one.offsets)
    late = view()
    late.apply(lane, (), 8)
    assert late.has_read(one.offsets)
    assert one.has_read(late.offsets)
    one.apply(Partition(USAGE, 1), (), 0)
    one.forget(lane)
    assert one.offsets == (6, 0)


class Answer:
    def __init__(self, counted_tokens: int, *, has_ended: bool = True) -> None:
        self.counted_tokens = counted_tokens
        self.has_ended = has_ended


class Gateway:
    """Requests of one tenant at the only gateway."""

    def __init__(self, **budgets: int) -> None:
        self.quota = TenantQuota(Tenant(**budgets), 0.0)
        self.view = view()
        self.view.apply(Partition(USAGE, 0), (), 0)
        self.offset = 0
        self.update(NOW_MS)

    def update(self, now_ms: int) -> None:
        self.quota.set_budget_use(self.view.used("acme", now_ms))

    def begin(self, name: str, most: int) -> QuotaLease | None:
        lease = QuotaLease(self.quota)
        if lease.add(dict.fromkeys(BUDGETS, most), 0.0) is not None:
            return None
        lease.requests = [RequestTokens(name, 1, most)]
        self.quota.reserve(lease.requests)
        return lease

    def used_up(self) -> QuotaRefusal | None:
        refusal = QuotaLease(self.quota).add(dict.fromkeys(BUDGETS, 0), 0.0)
        assert refusal is None or refusal.is_used_up
        return refusal

    def bill(self, name: str, count: int) -> None:
        record = usage("acme", count, request_id=name)
        self.view.apply(Partition(USAGE, 0), [LogRecord(self.offset, 0, record)], self.offset + 1)
        self.offset += 1
        self.quota.bill(name, count, self.view.present_limits(record))
        self.update(NOW_MS)


@given(st.integers(0, 500), st.integers(0, 2**32))
def test_budget_is_exceeded_by_one_request_at_most(budget: int, seed: int) -> None:
    """Whenever usage is read: before the end of an answer, late, or after its client has left."""
    rng, gateway = Random(seed), Gateway(tokens_per_day=budget)
    under_way: dict[str, tuple[QuotaLease, int, int]] = {}
    to_bill: dict[str, int] = {}
    exact = 0
    for n in range(60):
        step = rng.random()
        if step < 0.5:
            name, most = f"r{n}", rng.randint(1, 120)
            running = [each[1] for key, each in under_way.items() if key in to_bill]
            lease = gateway.begin(name, most)
            if lease is not None:
                actual = rng.randint(1, most)
                assert exact < budget
                assert exact + sum(running) + most <= budget or not running
                under_way[name] = lease, most, actual
                to_bill[name] = actual
        elif under_way and step < 0.8:
            name = rng.choice(list(under_way))
            lease, _, actual = under_way.pop(name)
            exact += actual if name in to_bill else 0
            if rng.random() < 0.2:
                lease.answers = [Answer(0, has_ended=False)]
            else:
                lease.answers = [Answer(actual - 1)]
            lease.release(0.0)
        elif to_bill:
            name = rng.choice(list(to_bill))
            if name not in under_way or rng.random() < 0.3:
                exact += to_bill[name] if name in under_way else 0
                gateway.bill(name, to_bill.pop(name))
    for lease, _, actual in under_way.values():
        lease.answers = [Answer(actual - 1)]
        lease.release(0.0)
    for name, actual in to_bill.items():
        gateway.bill(name, actual)
    assert gateway.quota.is_idle
    assert gateway.quota.most[DAY] == max(0, budget - tokens(gateway.view, "acme", NOW_MS)[DAY])


def test_used_up_budget_names_its_next_begin() -> None:
    gateway = Gateway(tokens_per_day=50, tokens_per_month=100)
    assert gateway.used_up() is None
    gateway.bill("other", 50)
    refusal = gateway.used_up()
    assert refusal is not None
    assert refusal.limit is DAY
    assert refusal.retry_after_s == 12 * 3600
    assert "50 tokens a day (tokens_per_day): they begin anew at 2026-02-28 00:00 UTC" in (
        refusal.message
    )
    gateway.update(NOW_MS + DAY_MS // 2)
    assert gateway.used_up() is None
    lease = gateway.begin("r", 50)
    assert lease is not None
    lease.answers = [Answer(49)]
    lease.release(0.0)
    both = gateway.used_up()
    assert both is not None
    assert both.limit is DAY


def test_request_that_is_not_billed_counts_until_the_end_of_a_period() -> None:
    """Its usage may never be written: collectors were away for longer than the ledger is kept."""
    gateway = Gateway(tokens_per_day=50, tokens_per_month=50)
    lease = gateway.begin("r", 50)
    assert lease is not None
    lease.answers = [Answer(49)]
    lease.release(0.0)
    next_day = NOW_MS + DAY_MS
    gateway.update(next_day)
    refusal = gateway.used_up()
    assert refusal is not None
    assert refusal.limit is MONTH
    next_month = NOW_MS + 3 * DAY_MS
    gateway.update(next_month)
    assert gateway.used_up() is None
    assert gateway.quota.is_idle
    late = gateway.begin("s", 20)
    assert late is not None
    gateway.quota.bill("r", 50, [])
    late.answers = [Answer(19)]
    late.release(0.0)
    assert gateway.quota.used[DAY] == gateway.quota.used[MONTH] == 20


def test_request_without_usage_counts_for_a_minute() -> None:
    gateway = Gateway(tokens_per_day=50)
    lease = gateway.begin("r", 50)
    assert lease is not None
    lease.answers = [Answer(0, has_ended=False)]
    lease.release(0.0)
    assert gateway.begin("s", 1) is None
    gateway.quota.settle(UNBILLED_S)
    assert gateway.begin("s", 1) is not None


def test_requests_that_are_not_billed_for_long_still_count() -> None:
    budget = 2 * (MAX_RESERVATIONS + 100)
    gateway = Gateway(tokens_per_day=budget, tokens_per_month=budget)
    for n in range(budget // 2):
        lease = gateway.begin(str(n), 2)
        assert lease is not None
        lease.answers = [Answer(1)]
        lease.release(0.0)
    assert gateway.used_up() is not None
    gateway.update(NOW_MS + DAY_MS)
    assert gateway.quota.used[DAY] == 0
    assert gateway.quota.used[MONTH] == budget
    for n in range(budget // 2):
        gateway.quota.bill(str(n), 2, [DAY, MONTH])
    assert gateway.quota.is_idle
