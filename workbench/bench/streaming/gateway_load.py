"""Throughput of a gateway, and the event loop delay from prompts.

Throughput: CONNECTIONS connections in a closed loop, one token per request, and of a bare FastAPI
server that renders and tokenizes the same bodies (`baseline_http.py`). Event loop: streams run at a
fixed rate while prompts of one length arrive at fixed times; the delay of timers is the gateway's
own metric. A run without prompts shows the delay from the machine itself. There is no router and no
engine: `token_feeder.py` answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from kvlane.app.local.processes import ManagedProcess, free_port
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import publish_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import ThreadPool
from kvlane.app.settings import Settings
from kvlane.streams.topics import REGISTRY
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.report import Report, at_least, at_most
from workbench.bench.statistics import histogram_quantile, loop_delay_buckets, percentile, spread
from workbench.bench.streaming.raw_http import (
    HttpConnection,
    http_request,
    metrics_page,
    read_stream,
    wait_listening,
)

MODEL = "bench"
CONTEXT_LENGTH = 131_072
CONNECTIONS = 64
STREAMS = 50
STEPS_PER_S = 20
PROMPT_RATES = {100: 20.0, 4_000: 5.0, 100_000: 1.0}
"""Prompts per second during the streams, by prompt length in tokens."""
THROUGHPUT_LENGTHS = (100, 4_000)
"""Prompt lengths of the throughput measurement."""
PROMPTS_PER_LENGTH = {100: 256, 4_000: 64, 100_000: 8}
"""Number of different prompts of each length. Text that was tokenised before is not tokenised
again, as in the turns of a chat."""
DELAY_LIMIT_MS = 20.0
THROUGHPUT_LIMIT = 1500
"""Requests/s of the shortest prompts."""
WARM_S = 3.0


class GatewayScale(NamedTuple):
    """Amount of work: rounds, and seconds per round."""

    rounds: int
    round_s: float


QUICK = GatewayScale(rounds=2, round_s=5.0)
FULL = GatewayScale(rounds=5, round_s=20.0)


class PromptTexts:
    """Generator of prompts of a given number of tokens, of random words."""

    def __init__(self) -> None:
        self._rng = random.Random(5)
        self._tokenizer = Tokenizer(
            (DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes(), ThreadPool()
        )

    async def prompt_of(self, tokens: int) -> str:
        """A text of about this number of tokens."""
        words = [self._word() for _ in range(tokens)]
        counted = len(await self._tokenizer.encode(" ".join(words)))
        return " ".join(words[: max(1, tokens * len(words) // counted)])

    def _word(self) -> str:
        return "".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz", k=self._rng.randint(2, 8)))


async def bench_gateway(
    settings: Settings,
    scale: GatewayScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    texts = PromptTexts()
    print_line("making prompts")
    prompts = {
        n: [await texts.prompt_of(n) for _ in range(count)]
        for n, count in PROMPTS_PER_LENGTH.items()
    }
    async with bench_environment(settings, print_line) as on:
        bare_port = free_port()
        artifacts = ArtifactStore(on.log, on.clock, ThreadPool(), None)
        card = await publish_files(
            MODEL, read_folder(DEMO_MODEL_FOLDER), artifacts, context_length=CONTEXT_LENGTH
        )
        await on.publisher.publish(REGISTRY, f"model/{MODEL}", card)
        gateway = await on.start_gateway(MODEL, CONTEXT_LENGTH)
        bare = on.launch(
            "bare", "workbench.bench.streaming.baseline_http", str(bare_port), "1", "1", "1", "1"
        )
        await on.start_feeder(100_000, 1, STEPS_PER_S, 0)
        await wait_listening(bare_port, on.clock, bare.check)
        bench = GatewayLoad(on, prompts, {"gateway": gateway, "bare": (bare, bare_port)})
        await bench.closed_loop(THROUGHPUT_LENGTHS[0], "gateway", WARM_S)
        shares = 1 / (scale.rounds * (2 * len(THROUGHPUT_LENGTHS) + 1 + len(PROMPT_RATES)))
        for _ in range(scale.rounds):
            for length in THROUGHPUT_LENGTHS:
                for side in ("bare", "gateway"):
                    await bench.closed_loop(length, side, scale.round_s, record=True)
                    progress(shares)
            for beside in (0, *PROMPT_RATES):
                await bench.loop_delay(beside, scale.round_s)
                progress(shares)
        return bench.report()


class GatewayLoad:
    def __init__(
        self,
        on: BenchEnvironment,
        prompts: dict[int, list[str]],
        servers: dict[str, tuple[ManagedProcess, int]],
    ) -> None:
        """`servers`: processes and ports of the sides."""
        self._on = on
        self._processes = {side: process for side, (process, _) in servers.items()}
        self._ports = {side: port for side, (_, port) in servers.items()}
        self._bodies = {n: [_body(text) for text in texts] for n, texts in prompts.items()}
        self._per_s: dict[tuple[int, str], list[float]] = {}
        self._took_ms: dict[tuple[int, str], list[float]] = {}
        self._cpu_us: dict[tuple[int, str], list[float]] = {}
        self._delays: dict[int, list[list[float]]] = {}

    async def closed_loop(
        self, length: int, side: str, seconds: float, *, record: bool = False
    ) -> None:
        """Send requests on some connections, one after the other on each."""
        path = "/prompt" if side == "bare" else "/v1/chat/completions"
        requests = [http_request(path, body) for body in self._bodies[length]]
        clock = self._on.clock
        cpu_s = cpu_time_s(self._processes[side])
        until = clock.now() + seconds
        took_s: list[float] = []

        async def publish(number: int) -> None:
            caller = await HttpConnection.connect(self._ports[side])
            while (began := clock.now()) < until:
                status = await caller.request(requests[number % len(requests)])
                if status != 200:
                    raise BenchFailed(f"{side} answered {status}")
                took_s.append(clock.now() - began)
                number += 1
            caller.close()

        async with asyncio.timeout(seconds + 60):
            await asyncio.gather(*(publish(number) for number in range(CONNECTIONS)))
        if record:
            self._per_s.setdefault((length, side), []).append(len(took_s) / seconds)
            cpu_us = (cpu_time_s(self._processes[side]) - cpu_s) / len(took_s) * 1e6
            self._cpu_us.setdefault((length, side), []).append(cpu_us)
            took_ms = 1000 * percentile(took_s, 0.5)
            self._took_ms.setdefault((length, side), []).append(took_ms)

    async def loop_delay(self, length: int, seconds: float) -> None:
        """Run streams while prompts of a length arrive (0: none), and read the loop delay
        metric."""
        port, clock = self._ports["gateway"], self._on.clock
        body = _body("hi", int(STEPS_PER_S * (seconds + 2)), stream=True)
        stream = http_request("/v1/chat/completions", body)
        streams = [asyncio.create_task(read_stream(port, stream, clock)) for _ in range(STREAMS)]
        await clock.sleep(1)
        before = await self._buckets()
        publishes = []
        began = clock.now()
        rate = PROMPT_RATES.get(length, 0.0)
        for number in range(int(rate * seconds)):
            await clock.sleep(max(0.0, began + number / rate - clock.now()))
            request = http_request(
                "/v1/chat/completions", self._bodies[length][number % PROMPTS_PER_LENGTH[length]]
            )
            publishes.append(asyncio.create_task(self._once(port, request)))
        await clock.sleep(max(0.0, began + seconds - clock.now()))
        after = await self._buckets()
        async with asyncio.timeout(60):
            statuses = await asyncio.gather(*publishes)
            streams_read = await asyncio.gather(*streams)
        if any(status != 200 for status in statuses) or not all(
            one.is_complete for one in streams_read
        ):
            raise BenchFailed(f"prompts of {length} tokens were not all answered: {statuses}")
        counts = [(bound, after[bound] - before[bound]) for bound in sorted(after)]
        figures = [1000 * histogram_quantile(counts, share) for share in (0.5, 0.99)]
        late = [late for one in streams_read for late in one.latencies_s]
        self._delays.setdefault(length, []).append([*figures, 1000 * percentile(late, 0.99)])

    async def _once(self, port: int, request: bytes) -> int:
        caller = await HttpConnection.connect(port)
        try:
            return await caller.request(request)
        finally:
            caller.close()

    async def _buckets(self) -> dict[float, float]:
        self._processes["gateway"].check()
        return loop_delay_buckets(await metrics_page(self._ports["gateway"]))

    def report(self) -> Report:
        rows: list[dict[str, Any]] = [
            {
                "prompt": f"{length} tokens, {CONNECTIONS} connections",
                "side": side,
                "requests/s": str(spread(per_s)),
                "p50 ms": str(spread(self._took_ms[length, side])),
                "CPU us/req": str(spread(self._cpu_us[length, side])),
                "delay p50 ms": "",
                "delay p99 ms": "",
                "token p99 ms": "",
                "rounds": len(per_s),
            }
            for (length, side), per_s in self._per_s.items()
        ]
        shortest = THROUGHPUT_LENGTHS[0]
        per_s = spread(self._per_s[shortest, "gateway"]).median
        name = f"requests of {shortest} tokens, {CONNECTIONS} connections"
        thresholds = [at_least(name, per_s, "requests/s", THROUGHPUT_LIMIT)]
        for length, rounds in self._delays.items():
            p50, p99, late = (spread(figures) for figures in zip(*rounds, strict=True))
            beside = f"{PROMPT_RATES[length]:g}/s of {length} tokens" if length else "none"
            rows.append(
                {
                    "prompt": f"{beside} beside {STREAMS} streams",
                    "side": "gateway",
                    "requests/s": "",
                    "p50 ms": "",
                    "CPU us/req": "",
                    "delay p50 ms": f"<= {p50.median:g}",
                    "delay p99 ms": f"<= {p99.median:g} ({p99.low:g}-{p99.high:g})",
                    "token p99 ms": str(late),
                    "rounds": len(rounds),
                }
            )
            if length:
                name = f"loop delay p99 beside {length} tokens"
                thresholds.append(at_most(name, p99.median, "ms", DELAY_LIMIT_MS))
        return Report("gateway", rows, thresholds)


def _body(text: str, max_tokens: int = 1, *, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}
