"""Fault injection into real processes under load, on Kafka: no token lost, none repeated.

    load (this process) ──HTTP──► gateways ─► requests ─► routers ─► workers ─► responses ─► load
                        ──────────────────► prompts, responses
    faults (this process): kill -9, SIGSTOP and SIGCONT, SIGTERM; kill or stop one of three brokers
    observer (this process): reads requests, ledger, responses, kv-events during the load

Timeouts are the defaults. The engine is slower than the hardware it simulates, so that answers take
seconds in few chunks, and a request may have more attempts (`ENGINE_SETTINGS`). Every round is a
line of a log, to which a later run may append: the report covers the whole log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvlane.app.demo.expected_answers import AnswerOracle
from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import free_port
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import JvmBroker
from kvlane.streams.client import Client
from kvlane.streams.records import Role
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.chaos import impact
from workbench.bench.chaos.agent_requests import AGENT_MODEL
from workbench.bench.chaos.fault_injection import (
    BROKER_FAULTS,
    FAULT_KINDS,
    FaultInjector,
    InjectedFault,
    draw_faults,
)
from workbench.bench.chaos.load_generator import Conversation, LoadGenerator
from workbench.bench.chaos.log_observer import LogObserver
from workbench.bench.process_group import PROCESS_KINDS as PARTS
from workbench.bench.process_group import ProcessGroup
from workbench.bench.report import Report

CLUSTER_BROKERS = 3
CLUSTER_LANES = 6
"""With three brokers. Followers fetch every append twice more, by partition: 32 lanes at 50
requests/s keep two cores busy before any fault."""
ENGINE_SETTINGS = {
    "engine_speedup": 0.07, "echo_itl_ms": 20, "max_attempts": 10, "results": "all",
}  # fmt: skip
"""About 60 ms per token, and a quarter of a second more for a prompt in between; the answers of
agents have 300 tokens, and take as long. A worker dies every few seconds: one answer in some
thousands meets three of them, the limit that stops a request which kills its workers. None does
here."""
KAFKA_REQUESTS_PER_EIGHT, BROKER_KAFKA_REQUESTS_PER_EIGHT = 1, 7
"""Number of requests in eight that are prompts on Kafka. HTTP is most of the cost of a short answer
for gateway and client: with broker faults at 50 requests/s, two cores have no time for it."""
MODEL_READY_TIMEOUT_S = 60.0
STEADY_STATE_S = 3.0
"""Load before the first fault."""
RECOVERY_S = 3.0
"""Between a recovery and the next fault: earlier requests have their first text by then."""
RESULTS_TIMEOUT_S = 30.0
"""Time until the last answers have their results, with a takeover by another collector."""
PROCESS_FAULTS = tuple(kind for kind in FAULT_KINDS if kind not in BROKER_FAULTS)
"""The default kinds of faults; broker faults need a cluster of three."""


class ChaosScale(NamedTuple):
    """Amount of work. `rate`: requests/s; `tokens`: per answer; `limit_s`: of the whole run.

    `prefill_workers`: of the workers; with them the others have the role decode. `batch`: batch
    prompts, of each eight requests. `agent_workers`: beside the workers; without them, and with
    faults of brokers, there are no requests of agents.
    """

    kills: int = 10
    seed: int = 1
    kinds: tuple[str, ...] = PROCESS_FAULTS
    rate: float = 4.0
    tokens: int = 90
    workers: int = 6
    limit_s: float = float("inf")
    prefill_workers: int = 0
    batch: int = 0
    agent_workers: int = 2

    @property
    def includes_brokers(self) -> bool:
        """Whether a cluster is needed."""
        return bool(BROKER_FAULTS & set(self.kinds))


class ChaosDeployment(NamedTuple):
    """A running deployment, its load generator and its observer."""

    environment: BenchEnvironment
    processes: ProcessGroup
    load: LoadGenerator
    observer: LogObserver


async def bench_chaos(
    settings: Settings,
    scale: ChaosScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
    rounds: list[dict[str, Any]],
    *,
    log_file: Path | None = None,
    output_folder: Path | None = None,
) -> Report:
    """Inject faults until there are `kills`. `rounds`: the rounds so far; grows, as does
    `log_file`.

    `output_folder`: a folder for the output of the processes. `progress` gets shares of the whole.
    Raises BenchFailed, BrokerUnavailable.
    """
    # Warnings of clients about injected broker faults are expected.
    logging.getLogger("kvlane.streams").setLevel(logging.ERROR)
    killed = sum(len(line.get("strikes", ())) for line in rounds)
    progress(min(1.0, killed / scale.kills))
    if killed < scale.kills:
        brokers = 0
        if scale.includes_brokers:
            brokers, settings = (
                CLUSTER_BROKERS,
                settings.model_copy(update={"lanes": CLUSTER_LANES}),
            )
        async with (
            bench_environment(settings, print_line, brokers=brokers) as on,
            chaos_deployment(on, scale, output_folder) as there,
        ):
            run = ChaosRun(there, scale, rounds, log_file, print_line)
            await run.run_rounds(killed, lambda: progress(1 / scale.kills))
    return impact.chaos_report(rounds, settings.worker_timeout_s)


def read_rounds(log_file: Path | None) -> list[dict[str, Any]]:
    """The rounds of a log; an incomplete last line is skipped."""
    lines: list[dict[str, Any]] = []
    if log_file is not None and log_file.exists():
        for line in log_file.read_bytes().splitlines():
            try:
                lines.append(msgspec.json.decode(line))
            except msgspec.DecodeError:
                continue
    return lines


@asynccontextmanager
async def chaos_deployment(
    environment: BenchEnvironment, scale: ChaosScale, output_folder: Path | None, **changes: Any
) -> AsyncIterator[ChaosDeployment]:
    """Start a deployment with `changes` to its settings, and its load. Raises BenchFailed."""
    copies = 1 if scale.includes_brokers else 2
    agent_workers = 0 if scale.includes_brokers else scale.agent_workers
    ports = {f"gateway-{n}": free_port() for n in range(1, copies + 1)}
    processes = environment.deployment(
        deployment_processes(
            scale.workers,
            ports,
            preprocessors=copies,
            collectors=copies,
            prefill_workers=scale.prefill_workers,
            agent_workers=agent_workers,
        ),
        {**ENGINE_SETTINGS, **changes},
    )
    await processes.start()
    await processes.wait_ready()
    settings = environment.settings
    judge, witness = (
        AnswerOracle(settings, environment.clock),
        LogObserver(environment.log, environment.clock),
    )
    await judge.load()
    positions = await witness.end_offsets()
    async with Client(environment.log, environment.clock) as client:
        load_generator = LoadGenerator(
            {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, client, judge,
            environment.clock, rate=scale.rate, tokens=scale.tokens, rng=random.Random(scale.seed),
            on_kafka=(
                BROKER_KAFKA_REQUESTS_PER_EIGHT
                if scale.includes_brokers
                else KAFKA_REQUESTS_PER_EIGHT
            ),
            batch=scale.batch, has_agents=agent_workers > 0,
        )  # fmt: skip
        watching = [
            asyncio.create_task(w) for w in (processes.restart_crashed(), witness.run(positions))
        ]
        try:
            await load_generator.wait_until_served(MODEL_READY_TIMEOUT_S)
            yield ChaosDeployment(environment, processes, load_generator, witness)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await load_generator.close()
            if output_folder is not None:
                _keep(environment.output_folder, output_folder)


def _keep(written: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in written.glob("*.log"):
        shutil.copy(log, logs)


def deployment_processes(
    workers: int, ports: dict[str, int], *, preprocessors: int = 2, collectors: int = 0,
    prefill_workers: int = 0, agent_workers: int = 0,
) -> list[DeploymentPart]:  # fmt: skip
    """The processes of a deployment with two routers and an indexer. `ports`: of the gateways.
    `agent_workers`: beside the others, for requests of agents."""

    def role_of(number: int) -> Role:
        if number <= prefill_workers:
            return "prefill"
        return "decode" if prefill_workers else "aggregated"

    return [
        *(
            DeploymentPart(
                name,
                "gateway",
                {"http_port": port, "gateway_count": len(ports), "gateway_index": number},
            )
            for number, (name, port) in enumerate(ports.items())
        ),
        *(DeploymentPart(f"router-{n}", "router") for n in (1, 2)),
        *(
            DeploymentPart(f"worker-{n}", "worker", {"worker_role": role_of(n)})
            for n in range(1, workers + 1)
        ),
        *(
            DeploymentPart(f"agent-worker-{n}", "worker", {"engine": "echo", "model": AGENT_MODEL})
            for n in range(1, agent_workers + 1)
        ),
        DeploymentPart("indexer-1", "indexer", {"indexer_port": free_port()}),
        *(DeploymentPart(f"preprocessor-{n}", "preprocessor") for n in range(1, preprocessors + 1)),
        *(DeploymentPart(f"collector-{n}", "collector") for n in range(1, collectors + 1)),
    ]


class FaultRound(NamedTuple):
    """A finished round that is not in the log yet."""

    number: int
    faults: list[InjectedFault]

    @property
    def start(self) -> float:
        """The time of its first fault."""
        return min(hit.at for hit in self.faults)

    @property
    def end(self) -> float:
        """The time after which no gap is attributed to it."""
        ready_at = max(hit.recovered_at for hit in self.faults)
        return max(self.start + impact.ROUND_S, ready_at + RECOVERY_S)


class ChaosRun:
    def __init__(
        self,
        there: ChaosDeployment,
        form: ChaosScale,
        lines: list[dict[str, Any]],
        log: Path | None,
        print_line: PrintLine,
    ) -> None:
        """`rounds` are those of the log so far; the run appends to them."""
        self._there = there
        self._form = form
        self._lines = lines
        self._log = log
        self._print_line = print_line
        self._clock = there.environment.clock
        self._open: list[FaultRound] = []
        self._hits: list[InjectedFault] = []
        self._reported_deaths = 0
        self._reported_crashes = 0
        self._answered: set[str] = set()
        """Ids of answers, each of which gets a result."""

    async def run_rounds(self, injected: int, done: Callable[[], None]) -> None:
        """Run rounds up to the number of kills or the time limit. Raises BenchFailed."""
        there, form = self._there, self._form
        broker = (
            there.environment.broker if isinstance(there.environment.broker, JvmBroker) else None
        )
        striker = FaultInjector(there.processes, broker, there.environment.log, self._clock)
        names = {kind: there.processes.names_of_kind(kind) for kind in PARTS}
        number = max((line["round"] for line in self._lines if "round" in line), default=-1) + 1
        until = self._clock.now() + form.limit_s
        sending = asyncio.create_task(there.load.run())
        try:
            await self._clock.sleep(STEADY_STATE_S)
            while injected < form.kills and self._clock.now() < until:
                strikes = draw_faults(form.seed, number, form.kinds, names, CLUSTER_BROKERS)
                strikes = strikes[: form.kills - injected]
                hits = await striker.inject(strikes, done)
                self._open.append(made := FaultRound(number, hits))
                self._hits += hits
                await self._clock.sleep(max(0.0, made.end - self._clock.now()))
                self._settle()
                injected += len(strikes)
                number += 1
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await there.load.drain()
        await self._clock.sleep(STEADY_STATE_S)
        self._settle()
        await self._end()

    def _settle(self) -> None:
        """Write the rounds whose interactive streams have all ended."""
        conversations = self._there.load.conversations
        while self._open:
            made = self._open[0]
            if any(
                chat.ended_at is None and chat.expected.sent_at <= made.end and not chat.is_batch
                for chat in conversations
            ):
                return
            self._open.pop(0)
            self._write(made)

    def _write(self, made: FaultRound) -> None:
        there = self._there
        load_generator, requests = there.load, there.observer.requests
        deaths = there.observer.losses[self._reported_deaths :]
        self._reported_deaths += len(deaths)
        false = impact.false_positives(deaths, self._hits)
        line = impact.round_line(
            made.number, made.faults, load_generator.conversations, requests, false
        )
        next_start = self._open[0].start if self._open else self._clock.now()
        over = [
            t
            for t in load_generator.conversations
            if t.ended_at is not None and t.ended_at < next_start
        ]
        line |= self._account(over)
        self._append(line)

    async def _end(self) -> None:
        """Write the last line: the last streams, requests in the log without an end, and answers
        without their one result."""
        load_generator = self._there.load
        line = self._account(load_generator.conversations) | {
            "requests": load_generator.request_count,
            "asking_s": load_generator.duration_s,
        }
        requests = self._there.observer.requests
        started = (observed for observed in requests.values() if observed.requested_at is not None)
        unended = [s.transcript.request_id for s in started if not s.transcript.is_over]
        line |= {"unended": len(unended), "unended_ids": unended[:20]}
        results = self._there.observer.results
        deadline = self._clock.now() + RESULTS_TIMEOUT_S
        while not self._answered <= results.keys() and self._clock.now() < deadline:
            await self._clock.sleep(RECOVERY_S / 10)
        await self._clock.sleep(RECOVERY_S)  # for a second one
        missing = sorted(self._answered - results.keys())
        repeated = sorted(name for name, count in results.items() if count > 1)
        handovers = self._there.observer.handovers
        if self._form.prefill_workers:
            line["handover_ms"] = handovers
        if self._form.batch:
            line["preemptions"] = self._there.observer.preemptions
        self._append({**line, "without_result": missing, "several_results": repeated})

    def _account(self, over: Sequence[Conversation]) -> dict[str, Any]:
        """The part of a line about completed requests, which are then forgotten."""
        there = self._there
        requests = there.observer.requests
        line = impact.completed_line(over, requests)
        for chat in over:
            observed = requests.get(chat.expected.id)
            if observed is not None and observed.transcript.is_over:
                del requests[chat.expected.id]
        self._answered.update(chat.expected.id for chat in over if chat.verdict == "right")
        ids = {id(chat) for chat in over}
        there.load.conversations[:] = [
            chat for chat in there.load.conversations if id(chat) not in ids
        ]
        fallen = there.processes.crashes[self._reported_crashes :]
        self._reported_crashes += len(fallen)
        line["fallen"] = [f._asdict() for f in fallen]
        line["load"] = round(os.getloadavg()[0], 1)
        line["late_ms"] = round(1000 * there.load.max_lateness_s)
        there.load.max_lateness_s = 0.0
        return line

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        for bad in line["bad"]:
            self._print_line(f"{bad['verdict']}: {msgspec.json.encode(bad).decode()}")
        for fallen in line["fallen"]:
            self._print_line(f"{fallen['name']} ended with {fallen['status']}:\n{fallen['tail']}")
        if self._log is not None:
            with self._log.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
