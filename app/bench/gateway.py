"""What a gateway takes in: requests a second, and how long prompts hold its event loop.

Throughput: a few connections that ask again and again, one token each, beside a bare FastAPI server
that is sent the same bodies and sends them back. Event loop: streams are told at a steady pace
while prompts of one length come at fixed times; how late timers ran is the gateway's own metric.
Without any prompt it shows what the machine itself does to a loop. Nothing routes and nothing
computes: requests are answered by `feeder.py`.
"""

from __future__ import annotations

import asyncio
import random
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from app.bench.ground import BenchFailed, Child, Ground, Said, ground
from app.bench.report import Bar, Report
from app.bench.samples import histogram_quantile, loop_delays, percentile, spread
from app.bench.sockets import Caller, free_port, listen, listening, request_of
from app.preprocess.artifacts import Artifacts
from app.preprocess.loaded import publish
from app.preprocess.modelfolder import DEMO
from app.preprocess.pool import Threads
from app.preprocess.tokenizer import Tokenizer
from app.settings import Settings
from streams.records import EngineConfig
from streams.topics import REGISTRY

MODEL = "bench"
CONTEXT = 131_072
CONNECTIONS = 16
STREAMS = 50
STEPS_PER_S = 20
PROMPTS = {100: 20.0, 4_000: 5.0, 100_000: 1.0}
"""Prompt lengths in tokens, and how many a second come beside the streams."""
CLOSED = (100, 4_000)
"""The lengths whose throughput is measured."""
TEXTS = {100: 256, 4_000: 64, 100_000: 8}
"""How many prompts of each length take turns. Parts of a text that was seen before are not
tokenised again, as in the turns of a chat."""
DELAY_MS = 20.0
WARM_S = 3.0


class Form(NamedTuple):
    """How much is measured: rounds, and seconds of each."""

    rounds: int
    round_s: float


QUICK = Form(rounds=2, round_s=5.0)
FULL = Form(rounds=5, round_s=20.0)


class Texts:
    """Prompts of a wanted number of tokens, in words that nobody has seen in this order."""

    def __init__(self) -> None:
        self._rng = random.Random(5)
        self._tokenizer = Tokenizer((DEMO / "tokenizer.json").read_bytes(), Threads())

    async def of(self, tokens: int) -> str:
        """A text of about so many tokens."""
        words = [self._word() for _ in range(tokens)]
        counted = len(await self._tokenizer.encode(" ".join(words)))
        return " ".join(words[: max(1, tokens * len(words) // counted)])

    def _word(self) -> str:
        return "".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz", k=self._rng.randint(2, 8)))


async def gateway(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> Report:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    texts = Texts()
    said("making prompts")
    prompts = {n: [await texts.of(n) for _ in range(count)] for n, count in TEXTS.items()}
    async with ground(settings, said) as on:
        port, bare_port = free_port(), free_port()
        artifacts = Artifacts(on.log, on.clock, Threads(), None)
        card = await publish(MODEL, DEMO, artifacts, context_length=CONTEXT)
        await on.outbox.persist(REGISTRY, f"model/{MODEL}", card)
        await on.register("bench-1", EngineConfig(model=MODEL, context_length=CONTEXT))
        child = on.launch("gateway", "faststream", "run", "app.gateway:app", http_port=port)
        bare = on.launch("bare", "app.bench.bare", str(bare_port), "1", "1", "1", "1")
        feeder = on.launch("feeder", "app.bench.feeder", "100000", "1", str(STEPS_PER_S), "0")
        await on.until(lambda: "ready" in feeder.output, feeder)
        await listening(port, on.clock, child.check)
        await listening(bare_port, on.clock, bare.check)
        bench = Bench(on, prompts, child, port, bare_port)
        await bench.closed(CLOSED[0], "gateway", WARM_S)
        shares = 1 / (form.rounds * (2 * len(CLOSED) + 1 + len(PROMPTS)))
        for _ in range(form.rounds):
            for length in CLOSED:
                for side in ("bare", "gateway"):
                    await bench.closed(length, side, form.round_s, keep=True)
                    progress(shares)
            for beside in (0, *PROMPTS):
                await bench.delay(beside, form.round_s)
                progress(shares)
        return bench.report()


class Bench:
    """The measurements, and what they gave."""

    def __init__(
        self, on: Ground, prompts: dict[int, list[str]], child: Child, port: int, bare_port: int
    ) -> None:
        self._on = on
        self._child = child
        self._ports = {"gateway": port, "bare": bare_port}
        self._bodies = {n: [_body(text) for text in texts] for n, texts in prompts.items()}
        self._per_s: dict[tuple[int, str], list[float]] = {}
        self._took_ms: dict[tuple[int, str], list[float]] = {}
        self._delays: dict[int, list[list[float]]] = {}

    async def closed(self, length: int, side: str, seconds: float, *, keep: bool = False) -> None:
        """Ask on some connections, one request after the other on each."""
        path = "/echo" if side == "bare" else "/v1/chat/completions"
        requests = [request_of(path, body) for body in self._bodies[length]]
        clock = self._on.clock
        until = clock.now() + seconds
        took_s: list[float] = []

        async def ask(number: int) -> None:
            caller = await Caller.connect(self._ports[side])
            while (began := clock.now()) < until:
                status = await caller.ask(requests[number % len(requests)])
                if status != 200:
                    raise BenchFailed(f"{side} answered {status}")
                took_s.append(clock.now() - began)
                number += 1
            caller.close()

        async with asyncio.timeout(seconds + 60):
            await asyncio.gather(*(ask(number) for number in range(CONNECTIONS)))
        if keep:
            self._per_s.setdefault((length, side), []).append(len(took_s) / seconds)
            took_ms = 1000 * percentile(took_s, 0.5)
            self._took_ms.setdefault((length, side), []).append(took_ms)

    async def delay(self, length: int, seconds: float) -> None:
        """Tell streams, with prompts of a length beside them (0: none), and read the metric."""
        port, clock = self._ports["gateway"], self._on.clock
        said = _body("hi", int(STEPS_PER_S * (seconds + 2)), stream=True)
        stream = request_of("/v1/chat/completions", said)
        streams = [asyncio.create_task(listen(port, stream, clock)) for _ in range(STREAMS)]
        await clock.sleep(1)
        before = await self._buckets()
        asks = []
        began = clock.now()
        rate = PROMPTS.get(length, 0.0)
        for number in range(int(rate * seconds)):
            await clock.sleep(max(0.0, began + number / rate - clock.now()))
            request = request_of(
                "/v1/chat/completions", self._bodies[length][number % TEXTS[length]]
            )
            asks.append(asyncio.create_task(self._once(port, request)))
        await clock.sleep(max(0.0, began + seconds - clock.now()))
        after = await self._buckets()
        async with asyncio.timeout(60):
            statuses = await asyncio.gather(*asks)
            told = await asyncio.gather(*streams)
        if any(status != 200 for status in statuses) or not all(one.whole for one in told):
            raise BenchFailed(f"prompts of {length} tokens were not all answered: {statuses}")
        counts = [(bound, after[bound] - before[bound]) for bound in sorted(after)]
        figures = [1000 * histogram_quantile(counts, share) for share in (0.5, 0.99)]
        late = [late for one in told for late in one.late_s]
        self._delays.setdefault(length, []).append([*figures, 1000 * percentile(late, 0.99)])

    async def _once(self, port: int, request: bytes) -> int:
        caller = await Caller.connect(port)
        try:
            return await caller.ask(request)
        finally:
            caller.close()

    async def _buckets(self) -> dict[float, float]:
        self._child.check()
        url = f"http://127.0.0.1:{self._ports['gateway']}/metrics"
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
        return loop_delays(page.decode())

    def report(self) -> Report:
        """All of it."""
        rows: list[dict[str, Any]] = [
            {
                "prompt": f"{length} tokens, {CONNECTIONS} connections",
                "side": side,
                "requests/s": str(spread(per_s)),
                "p50 ms": str(spread(self._took_ms[length, side])),
                "delay p50 ms": "",
                "delay p99 ms": "",
                "token p99 ms": "",
                "rounds": len(per_s),
            }
            for (length, side), per_s in self._per_s.items()
        ]
        bars = []
        for length, rounds in self._delays.items():
            p50, p99, late = (spread(figures) for figures in zip(*rounds, strict=True))
            beside = f"{PROMPTS[length]:g}/s of {length} tokens" if length else "none"
            rows.append(
                {
                    "prompt": f"{beside} beside {STREAMS} streams",
                    "side": "gateway",
                    "requests/s": "",
                    "p50 ms": "",
                    "delay p50 ms": f"<= {p50.median:g}",
                    "delay p99 ms": f"<= {p99.median:g} ({p99.low:g}-{p99.high:g})",
                    "token p99 ms": str(late),
                    "rounds": len(rounds),
                }
            )
            if length:
                name = f"loop delay p99 beside {length} tokens"
                met = p99.median <= DELAY_MS
                bars.append(Bar(name, p99.median, "ms", f"<= {DELAY_MS:g}", met))
        return Report("gateway", rows, bars)


def _body(text: str, max_tokens: int = 1, *, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}
