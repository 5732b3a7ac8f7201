"""A whole deployment compared with SGLang's router: the same clients, the same model servers.

    clients (this process) ──► SGLang's router                       ──► mock servers
                           └─► gateway ──► router ──► worker (Kafka) ──► the same
                           └─► the servers themselves: the cost of client and servers

Bodies are forwarded unchanged by both. Requests: CONNECTIONS connections in a closed loop, one
token each, not streamed. Tokens: STREAMS streams at STEPS_PER_S tokens a second each; the latency
of a token counts from its creation in the server. CPU time is that of the processes between client
and servers; that of the broker is not in it. SGLang's router keeps no log: a stream ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from kvlane.app.local.processes import ManagedProcess, free_port, process_command
from kvlane.app.settings import Settings
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.report import Report
from workbench.bench.statistics import percentile, spread
from workbench.bench.streaming.mock_server import MODEL
from workbench.bench.streaming.peer_process import PEER_PYTHON
from workbench.bench.streaming.raw_http import (
    HttpConnection,
    http_request,
    read_stream,
    wait_listening,
)

SERVERS = 2
CONNECTIONS = 64
STREAMS, STEPS_PER_S = 50, 20.0
PATH = "/v1/chat/completions"
WARM_S = 5.0
READY_TIMEOUT_S = 60.0
DIRECT, PEER, KVLANE = "servers alone", "SGLang's router", "kvlane"


class PeerScale(NamedTuple):
    """Amount of work: rounds, and seconds of each measurement in a round."""

    rounds: int
    round_s: float


QUICK = PeerScale(rounds=2, round_s=6.0)
FULL = PeerScale(rounds=5, round_s=20.0)


class ServingSide(NamedTuple):
    """A side: the ports of its clients, and the processes between client and servers."""

    ports: list[int]
    processes: list[ManagedProcess]

    @property
    def cpu_s(self) -> float:
        return sum(map(cpu_time_s, self.processes))


class ServingFigures(NamedTuple):
    """Figures of one round: requests, then tokens. CPU in microseconds."""

    requests_per_s: float
    p50_ms: float
    request_us: float
    token_us: float
    token_p50_ms: float
    token_p99_ms: float


async def bench_peer_router(
    settings: Settings, scale: PeerScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    if not PEER_PYTHON.exists():
        raise BenchFailed(f"no {PEER_PYTHON}: run `workbench/peers/build.sh router`")
    async with bench_environment(settings, print_line) as on:
        sides = await _start(on)
        for side in sides.values():
            await _wait_serving(on, side)
            await _requests(on, side, WARM_S)
        rounds: dict[str, list[ServingFigures]] = {name: [] for name in sides}
        for number in range(scale.rounds):
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                requests = await _requests(on, sides[name], scale.round_s)
                tokens = await _tokens(on, sides[name], scale.round_s)
                rounds[name].append(ServingFigures(*requests, *tokens))
                progress(1 / (scale.rounds * len(sides)))
    return Report("peer-router", [_row(name, own) for name, own in rounds.items()], [])


async def _start(on: BenchEnvironment) -> dict[str, ServingSide]:
    ports = [free_port() for _ in range(SERVERS)]
    for port in ports:
        server = on.launch(
            f"server-{port}", "workbench.bench.streaming.mock_server", str(port), str(STEPS_PER_S)
        )
        await wait_listening(port, on.clock, server.check)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    peer_port, gateway_port = free_port(), free_port()
    peer = on.launch(
        "peer", "workbench.bench.streaming.peer_process", str(PEER_PYTHON.absolute()),
        str(peer_port), str(free_port()), *urls,
    )  # fmt: skip
    own = [
        on.launch("gateway", *process_command("gateway"), http_port=gateway_port),
        on.launch("router", *process_command("router")),
    ]
    for number, url in enumerate(urls):
        own.append(
            on.launch(
                f"worker-{number}", *process_command("worker"), worker_id=f"worker-{number}",
                engine="attached", attach_kind="chat", attach_url=url, attach_model=MODEL,
                model=MODEL, max_num_seqs=256,
            )
        )  # fmt: skip
    await wait_listening(peer_port, on.clock, peer.check)
    await wait_listening(gateway_port, on.clock, own[0].check)
    return {
        DIRECT: ServingSide(ports, []),
        PEER: ServingSide([peer_port], [peer]),
        KVLANE: ServingSide([gateway_port], own),
    }


def _chat(number: int, tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": f"{number}: tell me of the {number}th train. " * 8}]
    return http_request(
        PATH, {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}
    )


async def _wait_serving(on: BenchEnvironment, side: ServingSide) -> None:
    """Wait until a side answers a chat. Raises BenchFailed."""
    deadline, status = on.clock.now() + READY_TIMEOUT_S, 0
    while status != 200:
        if on.clock.now() > deadline:
            tails = "\n".join(process.tail for process in side.processes)
            raise BenchFailed(f"no answer but status {status}:\n{tails}")
        await on.clock.sleep(0.2)
        connection = await HttpConnection.connect(side.ports[0])
        status = await connection.request(_chat(0, 1, stream=False))
        connection.close()


async def _requests(
    on: BenchEnvironment, side: ServingSide, seconds: float
) -> tuple[float, float, float]:
    """Requests/s, median latency in ms, CPU time of a request in us, in a closed loop."""
    clock, took_s, cpu_s = on.clock, list[float](), side.cpu_s
    until = clock.now() + seconds

    async def publish(number: int) -> None:
        connection = await HttpConnection.connect(side.ports[number % len(side.ports)])
        while (began := clock.now()) < until:
            if (status := await connection.request(_chat(number, 1, stream=False))) != 200:
                raise BenchFailed(f"status {status}")
            took_s.append(clock.now() - began)
            number += CONNECTIONS
        connection.close()

    async with asyncio.timeout(seconds + 60):
        await asyncio.gather(*(publish(number) for number in range(CONNECTIONS)))
    used_us = (side.cpu_s - cpu_s) / len(took_s) * 1e6
    return len(took_s) / seconds, 1000 * percentile(took_s, 0.5), used_us


async def _tokens(
    on: BenchEnvironment, side: ServingSide, seconds: float
) -> tuple[float, float, float]:
    """CPU time of a token in us, and the latency of a token in ms: p50 and p99."""
    count, cpu_s = int(STEPS_PER_S * seconds), side.cpu_s
    async with asyncio.timeout(2 * seconds + 60):
        streams = await asyncio.gather(
            *(
                read_stream(side.ports[n % len(side.ports)], _chat(n, count, stream=True), on.clock)
                for n in range(STREAMS)
            )
        )
    late_ms = [1000 * late for stream in streams for late in stream.latencies_s]
    if len(late_ms) != STREAMS * count or not all(stream.is_complete for stream in streams):
        raise BenchFailed(f"{side.ports}: {len(late_ms)} of {STREAMS * count} tokens arrived")
    used_us = (side.cpu_s - cpu_s) / len(late_ms) * 1e6
    return used_us, percentile(late_ms, 0.5), percentile(late_ms, 0.99)


def _row(name: str, own: list[ServingFigures]) -> dict[str, Any]:
    shown = [str(spread(values)) for values in zip(*own, strict=True)]
    columns = ("requests/s", "p50 ms", "CPU us/req", "CPU us/token", "token p50 ms", "token p99 ms")
    return {"side": name, **dict(zip(columns, shown, strict=True)), "rounds": len(own)}
