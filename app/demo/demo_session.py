"""The common parts of demo scenarios: a deployment, a client, the decisions of its routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from rich.console import Console

from kvlane.app.demo import policy_comparison
from kvlane.app.demo.demo_environment import DemoEnvironment
from kvlane.app.demo.ledger_reader import LedgerDecisions
from kvlane.app.demo.policy_comparison import PolicyRun, RunTraceRequest
from kvlane.app.demo.trace_prompts import TracePrompt
from kvlane.app.local.deployment import DemoFailed, count_workers, run_scenario
from kvlane.app.local.worker_observer import WorkerObserver
from kvlane.streams.client import Client

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
        """Start the deployment and run the steps. Raises DemoFailed when a process ends."""
        self._ctx.spawn("ledger", self._decisions.follow(await self._decisions.end_positions()))
        await self._fleet.start()
        self._since = self._fleet.next_epoch()
        async with self._client:
            await self._deployment.start()
            return await run_scenario(self._deployment, steps(), self._clock)

    async def wait_for_workers(self) -> None:
        if not await self._fleet.wait_ready(self._workers, self.ready_timeout_s, self._since):
            raise DemoFailed(f"not all workers accept requests after {self.ready_timeout_s:g} s")
        await self._deployment.wait_ready(timeout_s=self.ready_timeout_s)

    async def replay(
        self, policy: str, trace: Sequence[TracePrompt], run_request: RunTraceRequest, speed: float
    ) -> PolicyRun:
        return await policy_comparison.replay_trace(
            policy, trace, run_request, self._decisions, self._clock, self._console, speed
        )

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
        """Wait for the end of a request in the ledger, at most `OUTCOME_TIMEOUT_S`."""
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
