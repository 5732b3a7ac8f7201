"""The common parts of demo scenarios: a deployment on this machine, a client, and decisions."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvlane.app.demo import policy_comparison
from kvlane.app.demo.ledger_reader import LedgerDecisions
from kvlane.app.demo.policy_comparison import PolicyRun, RunTraceRequest, TracePrompt
from kvlane.app.local.deployment import (
    DeploymentPart,
    InProcessDeployment,
    LocalDeployment,
    ProcessDeployment,
    assign_ports,
    count_workers,
    part_url,
)
from kvlane.app.local.processes import DeploymentFailed
from kvlane.app.local.worker_observer import WorkerObserver
from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.settings import Settings
from kvlane.app.standalone import PROCESS_FACTORIES
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Log


class DemoEnvironment(NamedTuple):
    """A started connection to a log with topics, and processes that are not started yet."""

    log: Log
    deployment: LocalDeployment
    settings: Settings
    context: ProcessContext
    parts: Sequence[DeploymentPart]


@asynccontextmanager
async def demo_environment(
    settings: Settings,
    broker: Broker,
    *,
    parts: Sequence[DeploymentPart],
    changes: Mapping[str, Any],
) -> AsyncIterator[DemoEnvironment]:
    """Set up an environment on a running broker; removes everything but the broker at the end.
    `changes`: to the settings, also of the processes. Raises BrokerUnavailable, TopicMismatch."""
    changes = {**changes, "bootstrap_servers": broker.bootstrap_servers}
    settings = settings.model_copy(update=changes)
    context = ProcessContext("demo", SystemClock())
    clock = context.clock
    log: Log
    deployment: LocalDeployment
    with contextlib.ExitStack() as cleanup:
        if broker.kind == "memory":
            memory = MemoryBroker(clock, lanes=settings.lanes, partitions=settings.partitions)
            deployment = InProcessDeployment(
                parts, PROCESS_FACTORIES, settings, memory, random.Random()
            )
            log = MemoryLog(memory, "stage")
        else:
            guard = ProcessGuard()
            cleanup.callback(guard.close)
            parts = assign_ports(settings.model_copy(update={"status_port": None}), parts)
            urls = {part.name: part_url(settings, part) for part in parts}
            deployment = ProcessDeployment(parts, changes, guard, clock, status_urls=urls)
            log = open_log(settings, "stage")
        try:
            await log.start()
            if isinstance(log, KafkaLog):
                await create_topics(log, **settings.topic_options())
            yield DemoEnvironment(log, deployment, settings, context, parts)
        finally:
            await context.cancel_tasks()
            await deployment.stop()
            await log.close()


OUTCOME_TIMEOUT_S = 1.0
"""Time limit for the end of a run in the ledger, which follows the last text of its answer."""


class DemoSession:
    ready_timeout_s: float

    def __init__(self, on: DemoEnvironment, console: Console) -> None:
        log, self._deployment, self._settings, self._ctx, self._parts = on
        self._workers = sum(part.kind == "worker" for part in self._parts)
        self._workers_shown = count_workers(self._parts)
        self._is_disaggregated = any(part.role == "prefill" for part in self._parts)
        ctx = self._ctx
        self._clock = ctx.clock
        self._console = console
        self._client = Client(log, ctx.clock)
        self._decisions = LedgerDecisions(log)
        self._fleet = WorkerObserver(log, ctx, on.settings.heartbeat_interval_s)
        self._since = 0
        self._began = ctx.clock.now()

    @property
    def elapsed_s(self) -> float:
        return self._clock.now() - self._began

    async def play(self, steps: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Start the deployment and run the steps. Raises DeploymentFailed when a process ends."""
        self._ctx.spawn("ledger", self._decisions.follow(await self._decisions.end_positions()))
        await self._fleet.start()
        self._since = self._fleet.next_epoch()
        async with self._client:
            await self._deployment.start()
            playing = asyncio.create_task(steps())
            watching = asyncio.create_task(self._watch())
            try:
                await asyncio.wait([playing, watching], return_when=asyncio.FIRST_COMPLETED)
                return await (watching if watching.done() else playing)
            finally:
                playing.cancel()
                watching.cancel()
                await asyncio.gather(playing, watching, return_exceptions=True)

    async def _watch(self) -> bool:
        while True:
            self._deployment.check()
            await self._clock.sleep(0.5)

    async def wait_for_workers(self) -> None:
        if not await self._fleet.wait_ready(self._workers, self.ready_timeout_s, self._since):
            raise DeploymentFailed(
                f"not all workers accept requests after {self.ready_timeout_s:g} s"
            )
        await self._deployment.wait_ready(timeout_s=self.ready_timeout_s)

    async def replay(
        self, policy: str, trace: Sequence[TracePrompt], run_request: RunTraceRequest, speed: float
    ) -> PolicyRun:
        """Replay the trace once, with a progress bar, `speed` times as fast as recorded."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            bar = progress.add_task(f"{policy:12}", total=len(trace))
            async with asyncio.TaskGroup() as requests:
                began = self._clock.now()
                tasks = []
                for request in trace:
                    due = began + (request.arrival_s - trace[0].arrival_s) / speed
                    await self._clock.sleep(max(0.0, due - self._clock.now()))
                    task = requests.create_task(run_request(request))
                    task.add_done_callback(lambda _: progress.advance(bar))
                    tasks.append(task)
        answers = [task.result() for task in tasks]
        took_s = self._clock.now() - began
        found = [self._decisions.prediction_errors(a.id) for a in answers]
        errors = {
            "TTFT": [each.ttft for each in found if each.ttft is not None],
            "ITL": [each.itl for each in found if each.itl is not None],
        }
        cached = sum(self._decisions.cached_tokens(a.id) or 0 for a in answers)
        where = [self._decisions.workers_of(a.id)[-1:] for a in answers]
        busiest = max(where.count(w) for w in where)
        prompts = sum(a.prompt_tokens for a in answers)
        return PolicyRun(policy, answers, took_s, cached / prompts, busiest / len(answers), errors)

    async def restart_with_empty_caches(
        self, changes: Mapping[str, Any], warm_up: Callable[[], Awaitable[object]]
    ) -> None:
        """Restart workers and routers, with changed settings. `warm_up`: a request, after which
        every lane has an owner again."""
        self._since = self._fleet.next_epoch()
        await self._deployment.restart({"worker", "router"}, changes)
        await self.wait_for_workers()
        await warm_up()

    async def replay_in_round_robin(
        self,
        trace: Sequence[TracePrompt],
        run_request: RunTraceRequest,
        warm_up: Callable[[], Awaitable[object]],
        kv_aware_run: PolicyRun,
        speed: float,
    ) -> PolicyRun:
        """The trace once more with empty caches and in round robin, compared with the first run."""
        await self.restart_with_empty_caches({"policy": "round_robin"}, warm_up)
        in_turn = await self.replay("round robin", trace, run_request, speed)
        self.show_runs(in_turn, kv_aware_run)
        self._console.print("\nthree routing decisions explained (KV-aware):")
        for line in policy_comparison.explain_decisions(kv_aware_run, self._decisions):
            self._console.print(line, highlight=False, markup=False, style="dim")
        return in_turn

    def show_runs(self, *runs: PolicyRun) -> None:
        self._console.print()
        self.show(policy_comparison.comparison_table(runs))
        for line in policy_comparison.prediction_lines(runs):
            self._console.print(line, style="dim", highlight=False)

    async def wait_for_outcome(self, request_id: str) -> None:
        until = self._clock.now() + OUTCOME_TIMEOUT_S
        while self._decisions.cached_tokens(request_id) is None and self._clock.now() < until:
            await self._clock.sleep(0.01)

    def workers_of(self, request_id: str) -> str:
        """The workers of a request in words, with the phase where it is not all of the request."""
        shown = [
            d.worker if d.phase == "aggregated" else f"{d.worker} ({d.phase})"
            for d in self._decisions.decisions(request_id)
        ]
        return ", then ".join(shown) or "no worker"

    def show(self, shown: Any) -> None:
        self._console.print(shown, highlight=False)

    def show_title(self, text: str) -> None:
        self._console.rule(f"[bold]{text}[/]", align="left")
