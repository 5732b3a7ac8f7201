"""Time from a client's request to its first token, beside a bare chain over Kafka.

    client (this process) ─► FastAPI ─► echo ─► echo ─► FastAPI ─► client      "bare chain"
                          └► gateway ─► router ─► worker ─► gateway ─► client

Over HTTP, chats of one sentence. Engines answer at once: one in the worker's process that repeats
the prompt, and a mock server that is attached by chat. Loads: one request at a time, then requests
at fixed times. The sides take turns, in the reverse order in each second round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvlane.app.local.processes import ManagedProcess, free_port, process_command
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.clock import Clock
from kvlane.streams.kafka.provision import create_topics
from kvlane.streams.topics import ASSIGNMENTS, REQUESTS, RESPONSES
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.statistics import percentile
from workbench.bench.streaming.mock_server import MODEL as SERVER_MODEL
from workbench.bench.streaming.raw_http import READ_BYTES, http_request, wait_listening

CHAIN, IN_PROCESS, ATTACHED = "bare chain", "engine in process", "attached by chat"
MODELS = {CHAIN: "chain", IN_PROCESS: "echo", ATTACHED: SERVER_MODEL}
PATH = "/v1/chat/completions"
RATES = (0.0, 50.0, 200.0)
"""Requests a second; 0: one at a time."""
LIMITS = {0.0: (2.0, 2.5), 200.0: (2.5, 4.0)}
"""Of p50 and p99 of the engine in process, as multiples of the chain's, by rate."""
SERVER_STEPS_PER_S = 1000.0
WARM_UP_S, READY_TIMEOUT_S, ANSWER_TIMEOUT_S = 4.0, 60.0, 30.0


class FirstTokenScale(NamedTuple):
    """Amount of work: rounds, and seconds of each load in a round."""

    rounds: int
    seconds: float


QUICK, FULL = FirstTokenScale(2, 4.0), FirstTokenScale(5, 12.0)


class ServedSide(NamedTuple):
    """A side: the port of its clients, its model, and the processes between client and engine."""

    port: int
    model: str
    processes: list[ManagedProcess]

    @property
    def cpu_s(self) -> float:
        return sum(map(cpu_time_s, self.processes))


class FirstTokens(NamedTuple):
    """Times to the first token of one load in ms, and CPU time of a request in ms."""

    took_ms: list[float]
    cpu_ms: float


async def bench_first_token(
    settings: Settings, scale: FirstTokenScale, print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:  # fmt: skip
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    found: dict[tuple[float, str], list[FirstTokens]] = {}
    async with bench_environment(settings, print_line) as on:
        sides = {CHAIN: await _start_chain(on), **await _start_kvlane(on)}
        for side in sides.values():
            await _wait_serving(on, side)
            await _measure(on, side, RATES[1], WARM_UP_S)
        for number in range(scale.rounds):
            for rate in RATES:
                for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                    got = await _measure(on, sides[name], rate, scale.seconds)
                    found.setdefault((rate, name), []).append(got)
                    progress(1 / (scale.rounds * len(RATES) * len(sides)))
    return _report(found)


async def _start_chain(on: BenchEnvironment) -> ServedSide:
    settings = on.settings.model_copy(update={"topic_prefix": f"{on.settings.topic_prefix}chain."})
    log = open_log(settings, "chain")
    await log.start()
    await create_topics(log, **settings.topic_options())
    await log.close()
    port, prefix = free_port(), settings.topic_prefix
    echo = "workbench.bench.streaming.baseline_kafka"
    processes = [
        on.launch("front", "workbench.bench.streaming.baseline_chain", str(port),
                  topic_prefix=prefix),
        on.launch("router-echo", echo, REQUESTS, ASSIGNMENTS, topic_prefix=prefix),
        on.launch("worker-echo", echo, ASSIGNMENTS, RESPONSES, topic_prefix=prefix),
    ]  # fmt: skip
    for process in processes:
        await on.wait_until(lambda child=process: "ready" in child.output, process)  # type: ignore[misc]
    return ServedSide(port, MODELS[CHAIN], processes)


async def _start_kvlane(on: BenchEnvironment) -> dict[str, ServedSide]:
    """A gateway and a router for both, and a worker for each kind of engine."""
    server_port, port = free_port(), free_port()
    server = on.launch(
        "server", "workbench.bench.streaming.mock_server", str(server_port), str(SERVER_STEPS_PER_S)
    )
    await wait_listening(server_port, on.clock, server.check)
    common = [
        on.launch("gateway", *process_command("gateway"), http_port=port),
        on.launch("router", *process_command("router")),
    ]
    engines: dict[str, dict[str, object]] = {
        IN_PROCESS: {"engine": "echo", "echo_itl_ms": 0},
        ATTACHED: {
            "engine": "attached", "attach_kind": "chat", "attach_model": SERVER_MODEL,
            "attach_url": f"http://127.0.0.1:{server_port}",
        },
    }  # fmt: skip
    sides = {}
    for name, changes in engines.items():
        model = MODELS[name]
        worker = on.launch(
            model, *process_command("worker"), worker_id=model, model=model, **changes
        )
        sides[name] = ServedSide(port, model, [*common, worker])
    await wait_listening(port, on.clock, common[0].check)
    return sides


def _chat(side: ServedSide) -> bytes:
    messages = [{"role": "user", "content": "Tell me of the train to Cologne, please."}]
    return http_request(
        PATH, {"model": side.model, "messages": messages, "max_tokens": 1, "stream": True}
    )


async def _wait_serving(on: BenchEnvironment, side: ServedSide) -> None:
    deadline = on.clock.now() + READY_TIMEOUT_S
    while True:
        try:
            await _first_token_ms(side, on.clock)
        except BenchFailed:
            if on.clock.now() > deadline:
                raise
            await on.clock.sleep(0.2)
        else:
            return


async def _first_token_ms(side: ServedSide, clock: Clock) -> float:
    """Send a chat and read its answer to the end; the time of the first token. Raises
    BenchFailed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", side.port)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            began, first, read = clock.now(), 0.0, b""
            writer.write(_chat(side))
            while b"[DONE]" not in read:
                if not (data := await reader.read(READ_BYTES)):
                    break
                read += data
                if not first and b'"content":"' in read:
                    first = clock.now()
    finally:
        writer.close()
    if not first or b"[DONE]" not in read:
        raise BenchFailed(f"{side.model}: no whole answer: {read.decode()[:500]}")
    return 1000 * (first - began)


async def _measure(
    on: BenchEnvironment, side: ServedSide, rate: float, seconds: float
) -> FirstTokens:
    clock, cpu_s, began = on.clock, side.cpu_s, on.clock.now()
    took_ms: list[float] = []
    if rate:
        tasks = []
        async with asyncio.TaskGroup() as group:
            for number in range(int(rate * seconds)):
                await clock.sleep(max(0.0, began + number / rate - clock.now()))
                tasks.append(group.create_task(_first_token_ms(side, clock)))
        took_ms += (task.result() for task in tasks)
    else:
        while clock.now() < began + seconds:
            took_ms.append(await _first_token_ms(side, clock))
    return FirstTokens(took_ms, 1000 * (side.cpu_s - cpu_s) / len(took_ms))


def _report(found: dict[tuple[float, str], list[FirstTokens]]) -> Report:
    rows, thresholds = list[dict[str, Any]](), list[Threshold]()
    percentiles: dict[tuple[float, str], list[float]] = {}
    for (rate, name), rounds in found.items():
        took_ms = [each for got in rounds for each in got.took_ms]
        own = percentiles[rate, name] = [percentile(took_ms, share) for share in (0.5, 0.99)]
        chain = percentiles.get((rate, CHAIN), own)
        rows.append({
            "load": f"{rate:g}/s" if rate else "one at a time", "side": name,
            "requests": len(took_ms), "p50 ms": round(own[0], 2), "p99 ms": round(own[1], 2),
            "p50 x chain": round(own[0] / chain[0], 2), "p99 x chain": round(own[1] / chain[1], 2),
            "CPU ms/req": round(_mean([got.cpu_ms for got in rounds]), 2),
        })  # fmt: skip
        if name == IN_PROCESS and rate in LIMITS:
            for what, value, base, limit in zip(
                ("p50", "p99"), own, chain, LIMITS[rate], strict=True
            ):
                row = f"{name}, {rows[-1]['load']}: {what} to the bare chain"
                thresholds.append(at_most(row, value / base, "x", limit))
    return Report("first-token", rows, thresholds)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
