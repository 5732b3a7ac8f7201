"""Overload: more requests than the capacity, either rejected early or served without slowdown.

Real processes on Kafka. The capacity of the workers is measured first, with as many requests at a
time as they take; then a quarter of it for the figures without load, then more than the capacity
for minutes, then a quarter again. Open loop, HTTP streams; every text is compared with the expected
text of the engine, and the memory of every process is sampled once a second.

The limits are those of a deployment that rejects requests instead of queueing them: a worker queues
nothing beyond its batch and gets no prompt during another prefill, a router queues nothing. With
the defaults a burst is queued instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from kvlane.app.demo.expected_answers import AnswerOracle, DemoAnswer
from kvlane.app.local.processes import free_port
from kvlane.app.settings import Settings
from kvlane.streams.clock import Clock
from workbench.bench.bench_environment import BenchEnvironment, PrintLine, bench_environment
from workbench.bench.chaos.chaos_run import deployment_processes
from workbench.bench.process_group import ProcessGroup
from workbench.bench.report import Report, Threshold, at_most, none_of
from workbench.bench.statistics import percentile
from workbench.bench.streaming.raw_http import http_request, wait_listening

WORKERS, MAX_SEQS = 2, 12
TOKENS = 150
"""Long answers: an admitted request waits for the prefill of others, as in every engine with
batching, and with short answers there is always one."""
PROCESS_SETTINGS: dict[str, Any] = {
    "engine_speedup": 0.15,
    "max_num_seqs": MAX_SEQS,
    "worker_max_waiting": 0,
    "max_queued_requests": 0,
    "max_pending_prefill_tokens": 1,
}
UNLOADED_SHARE = 0.25
"""The load without overload, as a share of the capacity."""
CALIBRATION_S, WARM_UP_S = 20.0, 5.0
RECOVERY_S = 45.0
"""Duration of the phase after the overload."""
REQUEST_TIMEOUT_S = 60.0
WINDOW_S = 2.0
GROWTH_LIMIT_MB, REJECTION_LIMIT_MS, TTFT_LIMIT_FACTOR, RECOVERY_LIMIT_S = 100.0, 50.0, 2.0, 30.0
MB = 1024 * 1024


class OverloadScale(NamedTuple):
    """Duration of the overload, load as a multiple of the capacity, and duration before it."""

    overload_s: float = 60.0
    factor: float = 2.0
    unloaded_s: float = 20.0


class OverloadOutcome(NamedTuple):
    """Outcome of a request. Seconds of the clock; `ttft_s`: to the first text, or to the status."""

    phase: str
    at: float
    status: int
    ttft_s: float
    retry_after: bool
    is_right: bool


class MemorySample(NamedTuple):
    """Memory of a process at a time, in bytes."""

    phase: str
    at: float
    process: str
    rss_bytes: int


class OverloadResult(NamedTuple):
    """All samples. `capacity`: requests/s."""

    capacity: float
    factor: float
    outcomes: list[OverloadOutcome]
    samples: list[MemorySample]
    ended_at: float
    """The end of the overload."""


async def bench_overload(
    settings: Settings,
    scale: OverloadScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    whole_s = CALIBRATION_S + WARM_UP_S + scale.unloaded_s + scale.overload_s + RECOVERY_S
    async with bench_environment(settings, print_line) as on:
        ports = {f"gateway-{n}": free_port() for n in (1, 2)}
        processes = on.deployment(deployment_processes(WORKERS, ports), PROCESS_SETTINGS)
        await processes.start()
        await processes.wait_ready()
        for name, port in ports.items():
            await wait_listening(port, on.clock, processes.processes[name].check)
        oracle = AnswerOracle(on.settings, on.clock)
        await oracle.load()
        bench = OverloadLoad(on, processes, oracle, list(ports.values()))
        watching = asyncio.create_task(bench.sample_memory())
        try:
            await bench.open_loop("warm", 2.0, WARM_UP_S)
            progress(WARM_UP_S / whole_s)
            capacity = await bench.capacity(CALIBRATION_S)
            print_line(f"capacity of the workers: {capacity:.1f} requests/s")
            progress(CALIBRATION_S / whole_s)
            phases = (
                ("unloaded", UNLOADED_SHARE, scale.unloaded_s),
                ("overload", scale.factor, scale.overload_s),
                ("afterwards", UNLOADED_SHARE, RECOVERY_S),
            )
            ended_at = 0.0
            for phase, share, seconds in phases:
                await bench.open_loop(phase, share * capacity, seconds)
                progress(seconds / whole_s)
                if phase == "overload":
                    ended_at = on.clock.now()
            await bench.drain()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
    return overload_report(
        OverloadResult(capacity, scale.factor, bench.outcomes, bench.samples, ended_at)
    )


class OverloadLoad:
    """Load generator, and sampler of the memory of the processes."""

    def __init__(
        self,
        on: BenchEnvironment,
        processes: ProcessGroup,
        oracle: AnswerOracle,
        ports: Sequence[int],
    ) -> None:
        self._clock: Clock = on.clock
        self._processes = processes
        self._oracle = oracle
        self._ports = ports
        self._open: set[asyncio.Task[None]] = set()
        self._phase = "warm"
        self._number = 0
        self.outcomes: list[OverloadOutcome] = []
        self.samples: list[MemorySample] = []

    async def sample_memory(self) -> None:
        """Sample the memory of all processes once a second, until cancelled."""
        while True:
            now = self._clock.now()
            for part, rss_bytes in self._processes.rss_bytes().items():
                self.samples.append(MemorySample(self._phase, now, part, rss_bytes))
            await self._clock.sleep(1.0)

    async def capacity(self, seconds: float) -> float:
        """Completed requests/s in a closed loop with as many requests as the workers take."""
        began = self._clock.now()
        self._phase = "capacity"

        async def again() -> None:
            while self._clock.now() < began + seconds:
                await self._start("capacity")

        before = len(self.outcomes)
        await asyncio.gather(*(again() for _ in range(WORKERS * MAX_SEQS)))
        whole = [a for a in self.outcomes[before:] if a.status == 200]
        return len(whole) / (self._clock.now() - began)

    async def open_loop(self, phase: str, rate: float, seconds: float) -> None:
        """Send requests at a rate, independently of the answers."""
        self._phase = phase
        began = self._clock.now()
        for number in range(int(rate * seconds)):
            await self._clock.sleep(max(0.0, began + number / rate - self._clock.now()))
            task = asyncio.create_task(self._start(phase))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        await self._clock.sleep(max(0.0, began + seconds - self._clock.now()))

    async def drain(self) -> None:
        if self._open:
            await asyncio.wait(self._open, timeout=REQUEST_TIMEOUT_S)

    async def _start(self, phase: str) -> None:
        number, self._number = self._number, self._number + 1
        body = {
            "model": "demo", "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"Tell me of the {number}th train."}],
        }  # fmt: skip
        expected = await self._oracle.expect_answer("", "chat", body)
        request = http_request("/v1/chat/completions", body)
        at = self._clock.now()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                answer = await self._receive(phase, self._ports[number % 2], request, expected)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            answer = OverloadOutcome(phase, at, 0, self._clock.now() - at, False, False)
        self.outcomes.append(answer)

    async def _receive(
        self, phase: str, port: int, request: bytes, expected: DemoAnswer
    ) -> OverloadOutcome:
        at = self._clock.now()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status != 200:
                rejected_s = self._clock.now() - at
                return OverloadOutcome(
                    phase, at, status, rejected_s, b"retry-after:" in head.lower(), True
                )
            first_s, received = -1.0, b""
            while data := await reader.read(1 << 16):
                received += data
                if first_s < 0 and b"data: {" in data:
                    first_s = self._clock.now() - at
                if b"data: [DONE]" in received[-len(data) - 16 :]:
                    break
            return OverloadOutcome(
                phase, at, status, first_s, False, sse_text(received) == expected.expected.text
            )
        finally:
            writer.close()


def sse_text(body: bytes) -> str:
    """The text of a stream of events."""
    text = ""
    for line in body.splitlines():
        if line.startswith(b"data: {"):
            for choice in msgspec.json.decode(line[6:]).get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text


def overload_report(result: OverloadResult) -> Report:
    """A row for each phase, and the thresholds."""
    rows = [_row(phase, result) for phase in ("unloaded", "overload", "afterwards")]
    unloaded, over = _served(result, "unloaded"), _served(result, "overload")
    refused = [a for a in result.outcomes if a.phase == "overload" and a.status == 529]
    failed = [a for a in result.outcomes if a.status not in (200, 529)]
    wrong = sum(not a.is_right for a in result.outcomes)
    refusal_ms = 1000 * percentile([a.ttft_s for a in refused], 0.5)
    p99 = percentile(over, 0.99) / percentile(unloaded, 0.99)
    grown, part = max(memory_growth(result.samples))
    normal_s = recovery_s(result)
    silent = sum(not a.retry_after for a in refused)
    thresholds = [
        at_most("refused, p50", refusal_ms, "ms", REJECTION_LIMIT_MS),
        none_of("refused without a time to come back", silent),
        at_most("p99 to the first text, of those served, to that without load", p99, "x",
            TTFT_LIMIT_FACTOR),
        Threshold(f"memory grown under overload, most of all {part}", grown / MB, "MB",
            f"<= {GROWTH_LIMIT_MB:g}", grown <= GROWTH_LIMIT_MB * MB),
        at_most("normal again after", normal_s, "s", RECOVERY_LIMIT_S),
        none_of("wrong texts", wrong),
        none_of("neither served nor refused", len(failed)),
    ]  # fmt: skip
    return Report("overload", rows, thresholds)


def _served(found: OverloadResult, phase: str) -> list[float]:
    return [a.ttft_s for a in found.outcomes if a.phase == phase and a.status == 200]


def _row(phase: str, found: OverloadResult) -> dict[str, Any]:
    own = [a for a in found.outcomes if a.phase == phase]
    seconds = max((a.at for a in own), default=1.0) - min((a.at for a in own), default=0.0)
    served = _served(found, phase)
    refused = [a.ttft_s for a in own if a.status == 529]
    memory = {s.process: s.rss_bytes for s in found.samples if s.phase == phase}
    kinds: dict[str, float] = {}
    for part, rss_bytes in memory.items():
        kind = part.partition("-")[0]
        kinds[kind] = max(kinds.get(kind, 0.0), rss_bytes / MB)
    return {
        "phase": phase,
        "asked/s": len(own) / seconds,
        "served/s": len(served) / seconds,
        "first text ms": {
            "p50": 1000 * percentile(served, 0.5),
            "p99": 1000 * percentile(served, 0.99),
        },
        "refused/s": len(refused) / seconds,
        "refusal ms": {
            "p50": 1000 * percentile(refused, 0.5),
            "p99": 1000 * percentile(refused, 0.99),
        },
        "MB at its end": ", ".join(f"{kind} {mb:.0f}" for kind, mb in kinds.items()),
    }


def memory_growth(samples: Iterable[MemorySample]) -> list[tuple[int, str]]:
    """Growth of each process's peak memory from the first half of the overload to the second:
    memory that is kept for every request shows, that of one burst does not."""
    by_part: dict[str, list[int]] = {}
    for sample in samples:
        if sample.phase == "overload":
            by_part.setdefault(sample.process, []).append(sample.rss_bytes)
    return [
        (max(seen[len(seen) // 2 :]) - max(seen[: len(seen) // 2 or 1]), part)
        for part, seen in by_part.items()
    ] or [(0, "")]


def recovery_s(result: OverloadResult) -> float:
    """Seconds from the end of the overload to first texts as before, without a refused request.

    As before: no window of two seconds has twice the median of the time without load.
    """
    usual_s = TTFT_LIMIT_FACTOR * median(_served(result, "unloaded") or [0.0])
    after = [a for a in result.outcomes if a.phase == "afterwards"]
    normal_s = 0.0
    windows: dict[int, list[OverloadOutcome]] = {}
    for answer in after:
        windows.setdefault(int((answer.at - result.ended_at) // WINDOW_S), []).append(answer)
    for window, answers in windows.items():
        served = [a.ttft_s for a in answers if a.status == 200]
        if len(served) < len(answers) or (served and median(served) > usual_s):
            normal_s = max(normal_s, WINDOW_S * (window + 1))
    return normal_s
