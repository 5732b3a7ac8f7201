"""Tests of the limits of a tenant over several gateways, which claim shares of them in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from kvlane.app.access.key_file import Tenant
from kvlane.app.access.quota import (
    BUDGETS,
    QuotaLease,
    QuotaRefusal,
    RequestTokens,
    TenantLimit,
    TenantQuota,
)
from kvlane.app.http.server.limit_sharing import CLAIM_TTL_S, RENEWAL_S, SHARE_WAIT_S, LimitSharing
from kvlane.app.http.server.usage_follower import UsageFollower
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import BrokerClock
from kvlane.streams.memory.memory_broker import AppendFate, MemoryBroker, Operation
from kvlane.streams.records import LimitClaims, RequestUsage
from kvlane.streams.topics import CAPACITY, USAGE
from tests.harness.memory_world import MemoryWorld, ScriptedFaults, run_scenario, scenario_test


class Answer(NamedTuple):
    counted_tokens: int
    has_ended: bool = True


REQUEST = {TenantLimit.REQUESTS: 1, TenantLimit.REQUEST_RATE: 1}


class Weather(ScriptedFaults):
    """Random latencies, and lost appends that may arrive late."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self.late = 3.0

    def latency_s(self, client: str, operation: Operation) -> float:
        return self._rng.choice((0.0, 0.002, 0.02, 0.3))

    def fate(self, client: str, topic: str, partition: int, entries: int) -> AppendFate:
        return self._rng.choice(list(AppendFate)) if self._rng.random() < 0.1 else AppendFate.KEPT


class Gateway:
    """The shares of one gateway in the limits of one tenant."""

    def __init__(self, world: MemoryWorld, name: str, limits: Tenant) -> None:
        self.world = world
        self.rng = Random(name)
        self.name = name
        self.ctx = ProcessContext(name, world.clock, Random(name))
        self.quota = TenantQuota(limits, world.clock.now(), is_shared=True)
        self.leases: list[QuotaLease] = []

    async def open(self) -> None:
        self.log = await self.world.connect(self.name)
        self.usage = UsageFollower(self.log, self.ctx, "acme".__eq__, {"acme": self.quota})
        self.sharing = LimitSharing(self.log, self.ctx, BrokerClock(self.world.clock), self.usage)
        self.sharing.start()

    async def begin(self, **amounts: int) -> bool:
        """Begin a request, if it is within the limits."""
        lease = QuotaLease(self.quota)
        wanted = {TenantLimit[name.upper()]: n for name, n in amounts.items()} or REQUEST
        if await self.sharing.add("acme", lease, wanted) is not None:
            return False
        self.leases.append(lease)
        return True

    async def ask(self, most: int, actual: int, running_s: float) -> QuotaRefusal | None:
        """A request whose longest answer has `most` tokens, and that uses `actual` ones."""
        lease, request_id = QuotaLease(self.quota), f"{self.name}-{self.rng.getrandbits(64)}"
        refusal = await self.sharing.add("acme", lease, dict.fromkeys(BUDGETS, most))
        if refusal is not None:
            return refusal
        lease.requests, lease.answers = [RequestTokens(request_id, 0, most)], [Answer(actual)]
        self.quota.reserve(lease.requests)
        self.on_begun(most)
        await self.world.sleep(running_s)
        self.on_ended(most, actual)
        usage = RequestUsage(
            id=request_id, code="stop", ended_ms=self.world.clock.wall_ms(), tenant="acme",
            output_tokens=actual,
        )  # fmt: skip
        asyncio.get_running_loop().call_later(
            3 * self.rng.random(), self.world.append, USAGE, self.rng.randrange(2), usage
        )
        await self.world.sleep(self.rng.choice((0.0, 5.0)))  # a slow reader
        lease.release(self.world.clock.now())
        self.sharing.released("acme")
        return None

    def on_begun(self, most: int) -> None:
        pass

    def on_ended(self, most: int, actual: int) -> None:
        pass

    def end(self) -> None:
        """End the oldest request."""
        self.leases.pop(0).release(self.world.clock.now())
        self.sharing.released("acme")


async def three_gateways(world: MemoryWorld, **limits: int) -> list[Gateway]:
    found = [Gateway(world, f"g{n}", Tenant(**limits)) for n in range(3)]
    for gateway in found:
        await gateway.open()
    return found


async def close(gateways: Sequence[Gateway]) -> None:
    for gateway in gateways:
        assert gateway.ctx.error is None
        await gateway.ctx.cancel_tasks()


@scenario_test
async def test_parallel_requests_over_gateways_are_within_the_limit(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=8)
    begun = await asyncio.gather(*(each.begin() for each in gateways for _ in range(12)))
    assert sum(begun) == 8
    await close(gateways)


@scenario_test
async def test_share_follows_the_requests_to_another_gateway(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=1, tokens=100)
    for n in range(30):
        gateway = gateways[n % 3]
        assert await gateway.begin(requests=1, tokens=90)
        assert not await gateways[(n + 1) % 3].begin(requests=1, tokens=90)
        gateway.end()
    await close(gateways)


@scenario_test
async def test_requests_a_minute_count_over_all_gateways(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests_per_minute=60)

    async def burst() -> int:
        begun = await asyncio.gather(*(each.begin() for each in gateways for _ in range(60)))
        return sum(begun)

    assert await burst() == 60
    await world.sleep(30)
    assert 20 <= await burst() <= 31 + SHARE_WAIT_S
    await world.sleep(120)
    assert await burst() == 60
    await close(gateways)


@scenario_test
async def test_debt_of_tokens_takes_the_share_of_other_gateways(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, tokens_per_minute=600)
    assert await gateways[1].begin(token_rate=1)
    assert await gateways[0].begin(token_rate=100)
    gateways[0].leases[0].answers = [Answer(1000)]
    gateways[0].end()
    await world.sleep(1)
    assert not await gateways[1].begin(token_rate=50)
    assert not await gateways[2].begin(token_rate=50)
    await world.sleep(120)
    assert await gateways[2].begin(token_rate=50)
    await close(gateways)


@scenario_test
async def test_share_of_a_dead_gateway_lapses(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=4)
    for _ in range(4):
        assert await gateways[0].begin()
    await gateways[0].ctx.cancel_tasks()
    gateways[0].log.kill()
    assert not await gateways[1].begin()
    await world.sleep(CLAIM_TTL_S + RENEWAL_S)
    begun = await asyncio.gather(*(each.begin() for each in gateways[1:] for _ in range(4)))
    assert sum(begun) == 4
    await close(gateways[1:])


@scenario_test
async def test_gateway_without_kafka_keeps_its_share_and_gets_no_more(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=8)
    assert await gateways[0].begin()
    assert await gateways[0].begin()
    held = gateways[0].quota.held[TenantLimit.REQUESTS]
    gateways[0].end()
    world.faults.next_fates(CAPACITY, *[AppendFate.LOST] * 100)
    begun = await asyncio.gather(*(gateways[0].begin() for _ in range(8)))
    assert sum(begun) == held - 1
    await close(gateways)


@scenario_test
async def test_shares_are_given_back_where_nothing_is_asked(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=8, requests_per_minute=60)
    for gateway in gateways:
        assert await gateway.begin()
        gateway.end()
    await world.sleep(120)
    count = len(world.all_records(CAPACITY))
    assert all(not any(each.quota.held.values()) for each in gateways)
    await world.sleep(600)
    assert len(world.all_records(CAPACITY)) == count
    await close(gateways)


@scenario_test
async def test_gateway_that_stops_gives_its_shares_back(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=1)
    assert await gateways[0].begin()
    await gateways[0].sharing.close()
    assert await gateways[1].begin()
    await close(gateways)


@scenario_test
async def test_tenant_without_limits_costs_no_record(world: MemoryWorld) -> None:
    gateways = await three_gateways(world)
    assert all([await gateway.begin(requests=50, tokens=10**9) for gateway in gateways])
    assert not world.all_records(CAPACITY)
    await close(gateways)


@scenario_test
async def test_lowered_limit_holds_for_all_gateways(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=9)
    begun = await asyncio.gather(*(each.begin() for each in gateways for _ in range(9)))
    assert sum(begun) == 9
    for gateway in gateways:
        gateway.quota.set_limits(Tenant(requests=2), world.clock.now())
        while gateway.leases:
            gateway.end()
    begun = await asyncio.gather(*(each.begin() for each in gateways for _ in range(9)))
    assert sum(begun) <= 2
    await close(gateways)


@scenario_test
async def test_limit_is_used_up_by_clients_that_ask_all_the_time(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, requests=8)
    rng, ended = Random(1), 0

    async def client() -> None:
        nonlocal ended
        while world.clock.now() < until_s:
            gateway = rng.choice(gateways)
            if await gateway.begin():
                await world.sleep(1 + rng.random())
                gateway.end()
                ended += 1
            else:
                await world.sleep(0.05)

    until_s = world.clock.now() + 60
    await asyncio.gather(*(client() for _ in range(30)))
    assert ended >= 0.9 * 8 * 60 / 1.5
    await close(gateways)


@pytest.mark.parametrize("seed", range(12))
def test_shares_never_exceed_the_limit(seed: int) -> None:
    """Whatever is slow or lost on the way to the log, and however the requests move."""

    async def scenario(world: MemoryWorld) -> None:
        rng = Random(seed)
        world.broker = MemoryBroker(world.clock, lanes=2, faults=Weather(rng))
        gateways = await three_gateways(world, requests=rng.choice((1, 3, 8)))
        begun = 0

        async def client() -> None:
            nonlocal begun
            for _ in range(20):
                gateway = rng.choice(gateways)
                if await gateway.begin():
                    begun += 1
                    check()
                    await world.sleep(rng.random())
                    gateway.end()
                check()
                await world.sleep(rng.random())

        def check() -> None:
            quotas = [gateway.quota for gateway in gateways]
            most = quotas[0].most[TenantLimit.REQUESTS]
            assert most is not None
            assert sum(quota.used[TenantLimit.REQUESTS] for quota in quotas) <= most
            assert sum(quota.held[TenantLimit.REQUESTS] for quota in quotas) <= most

        await asyncio.gather(*(client() for _ in range(10)))
        assert begun > 5
        await close(gateways)

    run_scenario(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_budget_over_gateways_is_exceeded_by_one_request_at_most(seed: int) -> None:
    """Whatever is slow or lost on the way to the log, and whenever each gateway reads usage."""

    async def scenario(world: MemoryWorld) -> None:
        rng = Random(seed)
        world.broker = MemoryBroker(world.clock, lanes=2, faults=Weather(rng))
        budget = rng.choice((500, 3000))
        gateways = await three_gateways(world, tokens_per_day=budget, tokens_per_month=10 * budget)
        running: list[int] = []
        exact = 0
        refusals: list[QuotaRefusal] = []

        def begun(most: int) -> None:
            assert exact < budget
            assert exact + sum(running) + most <= budget or not running
            running.append(most)

        def ended(most: int, actual: int) -> None:
            nonlocal exact
            running.remove(most)
            exact += actual

        for gateway in gateways:
            gateway.on_begun, gateway.on_ended = begun, ended  # type: ignore[method-assign]

        async def client() -> None:
            for _ in range(40):
                most = rng.randint(1, 100)
                asked = rng.choice(gateways).ask(most, rng.randint(1, most), rng.random())
                if (refusal := await asked) is not None:
                    refusals.append(refusal)
                await world.sleep(rng.random())

        await asyncio.gather(*(client() for _ in range(8)))
        await world.sleep(10)
        assert budget - 100 <= exact < budget + 100
        for gateway in gateways:
            refusal = await gateway.ask(0, 0, 0.0)
            assert (refusal is not None and refusal.is_used_up) == (exact >= budget)
            assert gateway.quota.is_idle
        await close(gateways)

    run_scenario(scenario)


@scenario_test
async def test_used_budget_is_read_from_the_beginning_of_the_month(world: MemoryWorld) -> None:
    now_ms = world.clock.wall_ms()
    for lane, tokens in enumerate((40, 50)):
        record = RequestUsage(
            id=f"r{lane}", code="stop", ended_ms=now_ms, tenant="acme", prompt_tokens=tokens
        )
        world.append(USAGE, lane, record)
    gateways = await three_gateways(world, tokens_per_day=100)
    for gateway in gateways:
        await gateway.usage.start()
    assert await gateways[0].ask(10, 10, 0.0) is None
    await world.sleep(5)
    refusal = await gateways[1].ask(1, 1, 0.0)
    assert refusal is not None
    assert refusal.is_used_up
    await close(gateways)


@scenario_test
async def test_budget_holds_without_records_of_usage(world: MemoryWorld) -> None:
    """Collectors are away: what gateways know counts."""
    gateways = await three_gateways(world, tokens_per_day=100)
    leases = 0
    for n in range(60):
        gateway = gateways[n % 3]
        lease = QuotaLease(gateway.quota)
        if await gateway.sharing.add("acme", lease, dict.fromkeys(BUDGETS, 20)) is not None:
            continue
        lease.requests, lease.answers = [RequestTokens(f"r{n}", 5, 20)], [Answer(5)]
        gateway.quota.reserve(lease.requests)
        lease.release(world.clock.now())
        gateway.sharing.released("acme")
        leases += 1
        await world.sleep(10)
    assert leases == 9
    await close(gateways)


@scenario_test
async def test_gateway_without_the_latest_usage_goes_on_after_a_time(world: MemoryWorld) -> None:
    gateways = await three_gateways(world, tokens_per_day=1000)
    assert await gateways[0].ask(10, 10, 0.0) is None
    claims = LimitClaims(
        gateway="other", number=1, held={"acme": (0,) * 7}, wanted={"acme": (0,) * 5 + (1, 1)},
        usage_offsets=(99, 99),
    )  # fmt: skip
    world.append(CAPACITY, 0, claims, key="other")
    refusal = await gateways[1].ask(10, 10, 0.0)
    assert refusal is not None
    assert not refusal.is_used_up
    for number in range(2, 7):
        await world.sleep(RENEWAL_S)
        world.append(CAPACITY, 0, msgspec.structs.replace(claims, number=number), key="other")
        await gateways[1].ask(10, 10, 0.0)
    assert await gateways[1].ask(10, 10, 0.0) is None
    await close(gateways)
