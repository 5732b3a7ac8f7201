"""Tests of a prefill and a decode worker with vLLM on Kafka, killed again and again: every
answer is that of one engine. A quarter of an hour: KVLANE_TEST_LONG=1 runs it."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from functools import partial

import pytest
from rich.console import Console

from kvlane.app.demo import demo_run, vllm_scenario
from kvlane.app.demo.demo_session import demo_environment
from kvlane.app.demo.policy_comparison import TracePrompt
from kvlane.app.demo.tiny_model import BLOCK_SIZE, VOCABULARY_SIZE
from kvlane.app.demo.vllm_scenario import MIN_COMPARED, MIN_HANDED_OVER, VllmScenario
from kvlane.app.local.deployment import deployment_parts
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import obtain_broker

REQUESTS, KILLS = 200, 20
RATE = 2.0
ROUND = 20
"""Requests between the first of two kills and its worker's return, at least."""
MOST_RUN_S = 2400

pytestmark = [
    pytest.mark.skipif("KVLANE_TEST_LONG" not in os.environ, reason="long: KVLANE_TEST_LONG=1"),
    pytest.mark.timeout(MOST_RUN_S),
]


def prompts() -> list[TracePrompt]:
    """Prompts shorter and longer than a block; half of them share a beginning with others."""
    rng = random.Random(3)

    def words(tokens: int) -> list[int]:
        return [rng.randrange(16, VOCABULARY_SIZE) for _ in range(tokens)]

    stems = [words(rng.randrange(1, 8) * BLOCK_SIZE) for _ in range(8)]
    return [
        TracePrompt(
            number / RATE,
            (rng.choice(stems) if number % 2 else []) + words(rng.randrange(1, 3 * BLOCK_SIZE)),
            rng.randrange(1, 13),
        )
        for number in range(REQUESTS)
    ]


class KillScenario(VllmScenario):
    """The prompts on one worker, then handed over, then handed over beside kills."""

    handed_over = 0

    async def _steps(self) -> bool:
        await self.wait_for_workers()
        sent = prompts()
        on_one = partial(self._run_request, worker="worker-2")
        due = [answer.tokens for answer in (await self.replay("one", sent, on_one, 1.0)).answers]
        enforced = {"enforce_disaggregation": True}
        await self.restart_with_empty_caches(enforced, partial(self._warm_up, sent))
        quiet = await self.replay("quiet", sent, self._run_request, 1.0)
        assert [answer.tokens for answer in quiet.answers] == due
        phases = [[d.phase for d in self._decisions.decisions(a.id)] for a in quiet.answers]
        assert sum("decode" in each for each in phases) >= MIN_HANDED_OVER * REQUESTS
        errors = self._errors(quiet)
        assert errors.requests >= MIN_COMPARED * REQUESTS
        assert errors.p95 <= 1, errors
        await self._deployment.restart({"router"}, {})  # whole, while one of both is away
        await self._deployment.wait_ready(timeout_s=self.ready_timeout_s)
        before = self._decisions.handed_over_requests
        killing = asyncio.ensure_future(self._kill_workers())
        while not killing.done():
            await self._check_round(sent, due)
        assert await killing == KILLS
        await self._check_round(sent, due)
        self.handed_over = self._decisions.handed_over_requests - before
        return True

    async def _check_round(self, sent: Sequence[TracePrompt], due: Sequence[object]) -> None:
        first = random.randrange(REQUESTS - ROUND)
        part = slice(first, first + ROUND)
        run = await self.replay("kills", sent[part], self._run_request, 1.0)
        assert [answer.tokens for answer in run.answers] == due[part]

    async def _kill_workers(self) -> int:
        rng, names = random.Random(5), ("worker-1", "worker-2")
        for _ in range(KILLS):
            await asyncio.sleep(rng.uniform(0.5, 5))
            since, name = self._fleet.next_epoch(), rng.choice(names)
            await self._deployment.kill(name)
            await self._deployment.start(name)
            assert await self._fleet.wait_ready(1, self.ready_timeout_s, since), name
        return KILLS


async def test_answers_are_those_of_one_engine_while_workers_are_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    settings = Settings(_env_file=None)
    with obtain_broker(settings.broker, bootstrap_servers="", report=print) as broker:
        changes = demo_run._changes(settings, broker)
        changes |= vllm_scenario.vllm_settings(folder, hands_over=True)
        async with demo_environment(
            settings, broker, parts=deployment_parts(2, 1), changes=changes,
        ) as on:  # fmt: skip
            scenario = KillScenario(on, Console())
            assert await scenario.run()
    scenario.show(f"{KILLS} kills, {scenario.handed_over} prompts handed over beside them")
    assert scenario.handed_over > KILLS
