"""Twice as many requests as there is room for: refused early and clearly, or served as if alone.

Real processes on a real Kafka. What the workers can do is measured first, with as many requests at
a time as they take; then a quarter of that comes for the figures of a deployment without load, then
more than they can do for minutes, then a quarter again. Open loop, HTTP streams, every text held
against the engine's answer; memory of every process once a second.

The bounds are those of a deployment that would rather refuse than let wait: a worker keeps nothing
waiting beyond its batch and gets no prompt while it computes another, a router holds nothing. With
the defaults a burst waits instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from app.bench.chaos import parts
from app.bench.ground import Ground, Said, ground
from app.bench.herd import Herd
from app.bench.report import Bar, Report
from app.bench.samples import percentile
from app.bench.sockets import free_port, listening, request_of
from app.demo.asked import Asked, Judge
from app.settings import Settings
from streams.clock import Clock

WORKERS, SEQS = 2, 12
TOKENS = 150
"""Long answers: whoever is let in waits for the prompts of others, as in every engine that batches,
and with short answers there are always some."""
SETTINGS: dict[str, Any] = {
    "engine_speedup": 0.15,
    "max_num_seqs": SEQS,
    "worker_queue": 0,
    "held_requests": 0,
    "busy_prefill_tokens": 1,
}
UNLOADED = 0.25
"""Of what the workers can do."""
CALIBRATE_S, WARM_S = 20.0, 5.0
CALM_S = 45.0
"""How long is looked for a return to normal."""
ANSWER_S = 60.0
WINDOW_S = 2.0
GROWTH_MB, REFUSAL_MS, TTFT_FACTOR, NORMAL_S = 100.0, 50.0, 2.0, 30.0
MB = 1024 * 1024


class Form(NamedTuple):
    """How long overload lasts, how much of it, and how long the deployment is looked at before."""

    overload_s: float = 60.0
    factor: float = 2.0
    unloaded_s: float = 20.0


class Answer(NamedTuple):
    """What became of a request. Seconds of the clock; `ttft_s` to the first text, or the status."""

    phase: str
    at: float
    status: int
    ttft_s: float
    retry_after: bool
    is_right: bool


class Sample(NamedTuple):
    """Memory of a process at a moment, in bytes."""

    phase: str
    at: float
    part: str
    rss_bytes: int


class Found(NamedTuple):
    """All that was seen. `capacity`: requests a second."""

    capacity: float
    factor: float
    answers: list[Answer]
    samples: list[Sample]
    ended_at: float
    """When the overload did."""


async def overload(
    settings: Settings, form: Form, said: Said, progress: Callable[[float], None]
) -> tuple[Report, Found]:
    """Measure. `progress` hears of shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    whole_s = CALIBRATE_S + WARM_S + form.unloaded_s + form.overload_s + CALM_S
    async with ground(settings, said) as on:
        ports = {f"gateway-{n}": free_port() for n in (1, 2)}
        herd = Herd(on, parts(WORKERS, ports), SETTINGS)
        herd.start()
        await herd.ready()
        for name, port in ports.items():
            await listening(port, on.clock, herd.children[name].check)
        judge = Judge(on.settings, on.clock)
        await judge.open()
        bench = Bench(on, herd, judge, list(ports.values()))
        watching = asyncio.create_task(bench.watch())
        try:
            await bench.offer("warm", 2.0, WARM_S)
            progress(WARM_S / whole_s)
            capacity = await bench.capacity(CALIBRATE_S)
            said(f"the workers can do {capacity:.1f} requests a second")
            progress(CALIBRATE_S / whole_s)
            phases = (
                ("unloaded", UNLOADED, form.unloaded_s),
                ("overload", form.factor, form.overload_s),
                ("afterwards", UNLOADED, CALM_S),
            )
            ended_at = 0.0
            for phase, share, seconds in phases:
                await bench.offer(phase, share * capacity, seconds)
                progress(seconds / whole_s)
                if phase == "overload":
                    ended_at = on.clock.now()
            await bench.drained()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    found = Found(capacity, form.factor, bench.answers, bench.samples, ended_at)
    return report(found), found


class Bench:
    """Asks at a pace, and looks at the processes."""

    def __init__(self, on: Ground, herd: Herd, judge: Judge, ports: Sequence[int]) -> None:
        self._clock: Clock = on.clock
        self._herd = herd
        self._judge = judge
        self._ports = ports
        self._asking: set[asyncio.Task[None]] = set()
        self._phase = "warm"
        self._number = 0
        self.answers: list[Answer] = []
        self.samples: list[Sample] = []

    async def watch(self) -> None:
        """Note the memory of all processes once a second, until cancelled."""
        while True:
            now = self._clock.now()
            for part, rss_bytes in self._herd.rss_bytes().items():
                self.samples.append(Sample(self._phase, now, part, rss_bytes))
            await self._clock.sleep(1.0)

    async def capacity(self, seconds: float) -> float:
        """Requests a second that are answered when there are always as many as workers take."""
        began = self._clock.now()
        self._phase = "capacity"

        async def again() -> None:
            while self._clock.now() < began + seconds:
                await self._ask("capacity")

        before = len(self.answers)
        await asyncio.gather(*(again() for _ in range(WORKERS * SEQS)))
        whole = [a for a in self.answers[before:] if a.status == 200]
        return len(whole) / (self._clock.now() - began)

    async def offer(self, phase: str, rate: float, seconds: float) -> None:
        """Ask so many times a second, whatever becomes of it."""
        self._phase = phase
        began = self._clock.now()
        for number in range(int(rate * seconds)):
            await self._clock.sleep(max(0.0, began + number / rate - self._clock.now()))
            task = asyncio.create_task(self._ask(phase))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        await self._clock.sleep(max(0.0, began + seconds - self._clock.now()))

    async def drained(self) -> None:
        """Wait for the last answers."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=ANSWER_S)

    async def _ask(self, phase: str) -> None:
        number, self._number = self._number, self._number + 1
        body = {
            "model": "demo", "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"Tell me of the {number}th train."}],
        }  # fmt: skip
        asked = await self._judge.asked("", "chat", body)
        request = request_of("/v1/chat/completions", body)
        at = self._clock.now()
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self._hear(phase, self._ports[number % 2], request, asked)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            answer = Answer(phase, at, 0, self._clock.now() - at, False, False)
        self.answers.append(answer)

    async def _hear(self, phase: str, port: int, request: bytes, asked: Asked) -> Answer:
        at = self._clock.now()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 200:
                told_s = self._clock.now() - at
                return Answer(phase, at, status, told_s, b"retry-after:" in head.lower(), True)
            first_s, told = -1.0, b""
            while data := await reader.read(1 << 16):
                told += data
                if first_s < 0 and b"data: {" in data:
                    first_s = self._clock.now() - at
                if b"data: [DONE]" in told[-len(data) - 16 :]:
                    break
            return Answer(phase, at, status, first_s, False, text_of(told) == asked.due.text)
        finally:
            writer.close()


def text_of(told: bytes) -> str:
    """The text of a stream of events."""
    text = ""
    for line in told.splitlines():
        if line.startswith(b"data: {"):
            for choice in msgspec.json.decode(line[6:]).get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text


def report(found: Found) -> Report:
    """A row for each phase, and the bars."""
    rows = [_row(phase, found) for phase in ("unloaded", "overload", "afterwards")]
    unloaded, over = _served(found, "unloaded"), _served(found, "overload")
    refused = [a for a in found.answers if a.phase == "overload" and a.status == 529]
    failed = [a for a in found.answers if a.status not in (200, 529)]
    wrong = sum(not a.is_right for a in found.answers)
    refusal_ms = 1000 * percentile([a.ttft_s for a in refused], 0.5)
    p99 = percentile(over, 0.99) / percentile(unloaded, 0.99)
    grown, part = max(growth(found.samples))
    normal_s = normal_after(found)
    silent = sum(not a.retry_after for a in refused)
    bars = [
        Bar("refused, p50", refusal_ms, "ms", f"<= {REFUSAL_MS:g}", refusal_ms <= REFUSAL_MS),
        Bar("refused without a time to come back", silent, "", "0", not silent),
        Bar("p99 to the first text, of those served, to that without load", p99, "x",
            f"<= {TTFT_FACTOR:g}", p99 <= TTFT_FACTOR),
        Bar(f"memory grown under overload, most of all {part}", grown / MB, "MB",
            f"<= {GROWTH_MB:g}", grown <= GROWTH_MB * MB),
        Bar("normal again after", normal_s, "s", f"<= {NORMAL_S:g}", normal_s <= NORMAL_S),
        Bar("wrong texts", wrong, "", "0", not wrong),
        Bar("neither served nor refused", len(failed), "", "0", not failed),
    ]  # fmt: skip
    return Report("overload", rows, bars)


def _served(found: Found, phase: str) -> list[float]:
    return [a.ttft_s for a in found.answers if a.phase == phase and a.status == 200]


def _row(phase: str, found: Found) -> dict[str, Any]:
    own = [a for a in found.answers if a.phase == phase]
    seconds = max((a.at for a in own), default=1.0) - min((a.at for a in own), default=0.0)
    served = _served(found, phase)
    refused = [a.ttft_s for a in own if a.status == 529]
    memory = {s.part: s.rss_bytes for s in found.samples if s.phase == phase}
    kinds: dict[str, float] = {}
    for part, rss_bytes in memory.items():
        kind = part.partition("-")[0]
        kinds[kind] = max(kinds.get(kind, 0.0), rss_bytes / MB)
    return {
        "phase": phase,
        "asked/s": len(own) / seconds,
        "served/s": len(served) / seconds,
        "first text ms": {
            "p50": 1000 * percentile(served, 0.5), "p99": 1000 * percentile(served, 0.99)
        },
        "refused/s": len(refused) / seconds,
        "refusal ms": {
            "p50": 1000 * percentile(refused, 0.5), "p99": 1000 * percentile(refused, 0.99)
        },
        "MB at its end": ", ".join(f"{kind} {mb:.0f}" for kind, mb in kinds.items()),
    }  # fmt: skip


def growth(samples: Iterable[Sample]) -> list[tuple[int, str]]:
    """How much more memory each process had at most in the second half of the overload, than in
    the first: what is kept for every request shows, what a burst takes once does not."""
    by_part: dict[str, list[int]] = {}
    for sample in samples:
        if sample.phase == "overload":
            by_part.setdefault(sample.part, []).append(sample.rss_bytes)
    return [
        (max(seen[len(seen) // 2 :]) - max(seen[: len(seen) // 2 or 1]), part)
        for part, seen in by_part.items()
    ] or [(0, "")]


def normal_after(found: Found) -> float:
    """Seconds from the end of the overload until first texts come as before and nobody is refused.

    As before: no window of two seconds has twice the median of the time without load.
    """
    usual_s = TTFT_FACTOR * median(_served(found, "unloaded") or [0.0])
    after = [a for a in found.answers if a.phase == "afterwards"]
    normal_s = 0.0
    windows: dict[int, list[Answer]] = {}
    for answer in after:
        windows.setdefault(int((answer.at - found.ended_at) // WINDOW_S), []).append(answer)
    for window, answers in windows.items():
        served = [a.ttft_s for a in answers if a.status == 200]
        if len(served) < len(answers) or (served and median(served) > usual_s):
            normal_s = max(normal_s, WINDOW_S * (window + 1))
    return normal_s
