"""Kills and stops of real processes under load, on a real Kafka: nothing lost, nothing twice.

    crowd (this process) ──HTTP──► gateways ─► requests ─► routers ─► workers ─► responses ─► crowd
                         ──────────────────► prompts, responses
    striker (this process): kill -9, SIGSTOP and SIGCONT, SIGTERM; kill or stop one of three brokers
    witness (this process): reads requests, ledger, responses, kv-events beside the crowd

Time-outs are the product's own. The engine is slower than its model, so that answers take seconds
in few pieces, and a request may go through more workers (`PACE`). Every round is a line of a log,
to which a later run may append: the report is about the whole log.
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

from app.bench import toll
from app.bench.crowd import Crowd
from app.bench.ground import Ground, Said, ground
from app.bench.herd import KINDS as PARTS
from app.bench.herd import Herd, Part
from app.bench.report import Report
from app.bench.sockets import free_port
from app.bench.strikes import KINDS, OF_BROKERS, Hit, Striker, drawn
from app.bench.witness import Witness
from app.demo.asked import Judge
from app.settings import Settings
from streams.brokers.local import JvmBroker
from streams.client import Client

BROKERS = 3
LANES = 6
"""With three brokers. Every append is fetched twice more there, by partition: 32 lanes at 50
requests a second keep two cores busy before anything is hit."""
PACE = {"engine_speedup": 0.07, "max_attempts": 10}
"""A token every 60 ms or so, and a quarter of a second whenever a prompt comes between. A worker
dies every few seconds: one answer in some thousands meets three that do, the limit that stops a
request which kills its workers. None does here."""
ON_KAFKA, ON_KAFKA_OF_BROKERS = 1, 7
"""Of eight requests, how many are prompts on Kafka. HTTP costs the gateway and the client most of
what a short answer does: where brokers are hurt at 50 requests a second, two cores have other work.
"""
SERVED_S = 60.0
CALM_S = 3.0
"""Load before the first strike."""
REST_S = 3.0
"""Between a return and the next strike: who asked before it has heard a first text by then."""
OF_PARTS = tuple(kind for kind in KINDS if kind not in OF_BROKERS)
"""What is hit unless brokers are asked for, which needs three of them."""


class Form(NamedTuple):
    """How much is done. `rate`: requests a second; `tokens`: an answer's; `limit_s`: the run's."""

    kills: int = 10
    seed: int = 1
    kinds: tuple[str, ...] = OF_PARTS
    rate: float = 4.0
    tokens: int = 90
    workers: int = 6
    limit_s: float = float("inf")

    @property
    def hurts_brokers(self) -> bool:
        """Whether it takes a cluster."""
        return bool(OF_BROKERS & set(self.kinds))


class Deployed(NamedTuple):
    """A deployment that serves, and those who ask it and read its log."""

    on: Ground
    herd: Herd
    crowd: Crowd
    witness: Witness


async def chaos(
    settings: Settings,
    form: Form,
    said: Said,
    progress: Callable[[float], None],
    lines: list[dict[str, Any]],
    *,
    log: Path | None = None,
    logs: Path | None = None,
) -> Report:
    """Strike until there are so many kills. `lines`: the rounds so far; they grow, as does `log`.

    `logs`: a directory for what the processes wrote. `progress` hears of shares of the whole.
    Raises BenchFailed, BrokerUnavailable.
    """
    # What a client writes about brokers that are hurt on purpose is nothing to read here.
    logging.getLogger("streams").setLevel(logging.ERROR)
    killed = sum(len(line.get("strikes", ())) for line in lines)
    progress(min(1.0, killed / form.kills))
    if killed < form.kills:
        brokers = 0
        if form.hurts_brokers:
            brokers, settings = BROKERS, settings.model_copy(update={"lanes": LANES})
        async with (
            ground(settings, said, brokers=brokers) as on,
            deployed(on, form, logs) as there,
        ):
            run = Run(there, form, lines, log, said)
            await run.go_on(killed, lambda: progress(1 / form.kills))
    return toll.report(lines, settings.worker_timeout_s)


def read(log: Path | None) -> list[dict[str, Any]]:
    """The rounds of a log; a last line that was broken off is left out."""
    lines: list[dict[str, Any]] = []
    if log is not None and log.exists():
        for line in log.read_bytes().splitlines():
            try:
                lines.append(msgspec.json.decode(line))
            except msgspec.DecodeError:
                continue
    return lines


@asynccontextmanager
async def deployed(
    on: Ground, form: Form, logs: Path | None, **changes: Any
) -> AsyncIterator[Deployed]:
    """Start a deployment, and those who ask; `changes` are to its settings. Raises BenchFailed."""
    copies = 1 if form.hurts_brokers else 2
    ports = {f"gateway-{n}": free_port() for n in range(1, copies + 1)}
    herd = Herd(on, parts(form.workers, ports, preprocessors=copies), {**PACE, **changes})
    herd.start()
    await herd.ready()
    settings = on.settings
    judge, witness = Judge(settings, on.clock), Witness(on.log, on.clock)
    await judge.open()
    positions = await witness.ends()
    async with Client(on.log, on.clock) as client:
        crowd = Crowd(
            {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, client, judge,
            on.clock, rate=form.rate, tokens=form.tokens, rng=random.Random(form.seed),
            on_kafka=ON_KAFKA_OF_BROKERS if form.hurts_brokers else ON_KAFKA,
        )  # fmt: skip
        watching = [asyncio.create_task(w) for w in (herd.watch(), witness.run(positions))]
        try:
            await crowd.served(SERVED_S)
            yield Deployed(on, herd, crowd, witness)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await crowd.close()
            if logs is not None:
                _keep(on.logs, logs)


def _keep(written: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in written.glob("*.log"):
        shutil.copy(log, logs)


def parts(workers: int, ports: dict[str, int], *, preprocessors: int = 2) -> list[Part]:
    """A deployment with two routers and one indexer. `ports`: of the gateways."""
    return [
        *(
            Part(
                name,
                "gateway",
                {"http_port": port, "gateways": len(ports), "gateway_number": number},
            )
            for number, (name, port) in enumerate(ports.items())
        ),
        *(Part(f"router-{n}", "router") for n in (1, 2)),
        *(Part(f"worker-{n}", "worker") for n in range(1, workers + 1)),
        Part("indexer-1", "indexer", {"indexer_port": free_port()}),
        *(Part(f"preprocessor-{n}", "preprocessor") for n in range(1, preprocessors + 1)),
    ]


class Round(NamedTuple):
    """A round that was made, and is not in the log yet."""

    number: int
    hits: list[Hit]

    @property
    def start(self) -> float:
        """When it began."""
        return min(hit.at for hit in self.hits)

    @property
    def end(self) -> float:
        """From when on nothing is blamed on it."""
        ready_at = max(hit.ready_at for hit in self.hits)
        return max(self.start + toll.REACH_S, ready_at + REST_S)


class Run:
    """Rounds, one after the other, and the lines that they leave."""

    def __init__(
        self,
        there: Deployed,
        form: Form,
        lines: list[dict[str, Any]],
        log: Path | None,
        said: Said,
    ) -> None:
        """`lines` are those of the log so far, and grow."""
        self._there = there
        self._form = form
        self._lines = lines
        self._log = log
        self._said = said
        self._clock = there.on.clock
        self._open: list[Round] = []
        self._hits: list[Hit] = []
        self._deaths_told = 0
        self._fallen_told = 0

    async def go_on(self, killed: int, done: Callable[[], None]) -> None:
        """Rounds until there are enough kills, or until the time is over. Raises BenchFailed."""
        there, form = self._there, self._form
        broker = there.on.broker if isinstance(there.on.broker, JvmBroker) else None
        striker = Striker(there.herd, broker, there.on.log, self._clock)
        names = {kind: there.herd.names(kind) for kind in PARTS}
        number = max((line["round"] for line in self._lines if "round" in line), default=-1) + 1
        until = self._clock.now() + form.limit_s
        asking = asyncio.create_task(there.crowd.run())
        try:
            await self._clock.sleep(CALM_S)
            while killed < form.kills and self._clock.now() < until:
                strikes = drawn(form.seed, number, form.kinds, names, BROKERS)
                strikes = strikes[: form.kills - killed]
                hits = await striker.strike(strikes, done)
                self._open.append(made := Round(number, hits))
                self._hits += hits
                await self._clock.sleep(max(0.0, made.end - self._clock.now()))
                self._settle()
                killed += len(strikes)
                number += 1
            if asking.done():
                asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await there.crowd.drained()
        await self._clock.sleep(CALM_S)
        self._settle()
        self._end()

    def _settle(self) -> None:
        """Write the rounds whose streams are all over."""
        talks = self._there.crowd.talks
        while self._open:
            made = self._open[0]
            if any(talk.over_at is None and talk.asked.at <= made.end for talk in talks):
                return
            self._open.pop(0)
            self._write(made)

    def _write(self, made: Round) -> None:
        there = self._there
        crowd, stories = there.crowd, there.witness.stories
        deaths = there.witness.deaths[self._deaths_told :]
        self._deaths_told += len(deaths)
        false = toll.false_deaths(deaths, self._hits)
        line = toll.row_of(made.number, made.hits, crowd.talks, stories, false)
        next_start = self._open[0].start if self._open else self._clock.now()
        over = [t for t in crowd.talks if t.over_at is not None and t.over_at < next_start]
        line |= self._account(over)
        self._append(line)

    def _end(self) -> None:
        """What is left: the last streams, and requests on the log that nobody listens to."""
        crowd = self._there.crowd
        line = self._account(crowd.talks) | {"requests": crowd.asked, "asking_s": crowd.asking_s}
        stories = self._there.witness.stories
        asked = (story for story in stories.values() if story.asked_at is not None)
        unended = [s.transcript.request_id for s in asked if not s.transcript.over]
        self._append({**line, "unended": len(unended), "unended_ids": unended[:20]})

    def _account(self, over: Sequence[Any]) -> dict[str, Any]:
        """Take account of talks that are over, and forget them."""
        there = self._there
        stories = there.witness.stories
        line = toll.account(over, stories)
        for talk in over:
            story = stories.get(talk.asked.id)
            if story is not None and story.transcript.over:
                del stories[talk.asked.id]
        ids = {id(talk) for talk in over}
        there.crowd.talks[:] = [talk for talk in there.crowd.talks if id(talk) not in ids]
        fallen = there.herd.fallen[self._fallen_told :]
        self._fallen_told += len(fallen)
        line["fallen"] = [f._asdict() for f in fallen]
        line["load"] = round(os.getloadavg()[0], 1)
        line["late_ms"] = round(1000 * there.crowd.late_s)
        there.crowd.late_s = 0.0
        return line

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        for bad in line["bad"]:
            self._said(f"{bad['verdict']}: {msgspec.json.encode(bad).decode()}")
        for fallen in line["fallen"]:
            self._said(f"{fallen['name']} ended with {fallen['status']}:\n{fallen['tail']}")
        if self._log is not None:
            with self._log.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
