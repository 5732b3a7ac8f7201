"""Soak: a constant load for minutes, without faults; nothing may grow or slow down.

The deployment of the fault benchmark, with its load and its check of every text. The first quarter
of the time is warm-up: caches fill, kernels are loaded, memory allocators reach their size. The
other three quarters are compared with each other: memory of every process, CPU time of a request,
time to first text. The CPU time of a fixed piece of work, once a second, shows how much of a change
is the machine's. Memory may grow by the state kept for each request until the windows of an hour
(request ids, streams that can be resumed) are full: a few KiB.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from kvlane.app.settings import Settings
from workbench.bench.bench_environment import PrintLine, bench_environment
from workbench.bench.chaos.chaos_run import ChaosDeployment, ChaosScale, chaos_deployment
from workbench.bench.process_group import ProcessGroup
from workbench.bench.process_usage import cpu_time_s
from workbench.bench.report import Report, Threshold, at_most, none_of
from workbench.bench.statistics import percentile

PARTS = 4
"""The time is divided into so many parts; the first one is warm-up."""
SAMPLE_INTERVAL_S = 1.0
FIXED_WORK_STEPS = 100_000
"""Additions in Python, a few milliseconds."""
ENGINE_SETTINGS = {"engine_speedup": 1.0}
RATE, TOKENS, WORKERS = 5.0, 30, 2
GROWTH_LIMIT_KIB, CPU_LIMIT_FACTOR, TTFT_LIMIT_FACTOR = 4.0, 1.1, 1.25
KIB, MB = 1024, 1024 * 1024


class SoakScale(NamedTuple):
    """Duration of the load in seconds."""

    seconds: float


QUICK, FULL = SoakScale(120.0), SoakScale(20 * 60.0)


class ProcessSample(NamedTuple):
    """Memory in bytes and CPU time in seconds of a process, by its name, at a time.

    `fixed_work_s`: the CPU time of a fixed piece of work then.
    """

    at: float
    rss_bytes: Mapping[str, int]
    cpu_s: Mapping[str, float]
    fixed_work_s: float


class SoakAnswer(NamedTuple):
    """An answer. `at`: when its request was sent, in seconds from the start of the load."""

    at: float
    ttft_s: float
    verdict: str


class SoakResult(NamedTuple):
    """All samples, with times in seconds from the start of the load. `crashes`: process names."""

    seconds: float
    answers: list[SoakAnswer]
    samples: list[ProcessSample]
    crashes: list[str]


async def bench_soak(
    settings: Settings, scale: SoakScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    load = ChaosScale(rate=RATE, tokens=TOKENS, workers=WORKERS, agent_workers=0)
    async with (
        bench_environment(settings, print_line) as on,
        chaos_deployment(on, load, None, **ENGINE_SETTINGS) as deployment,
    ):
        return soak_report(await _run(deployment, scale, progress))


async def _run(
    deployment: ChaosDeployment, scale: SoakScale, progress: Callable[[float], None]
) -> SoakResult:
    clock, load = deployment.environment.clock, deployment.load
    samples: list[ProcessSample] = []
    answers: list[SoakAnswer] = []
    began = clock.now()
    sending = asyncio.create_task(load.run())
    try:
        while (elapsed_s := clock.now() - began) < scale.seconds:
            samples.append(_sample(deployment.processes, elapsed_s))
            answers += _take_answers(deployment, began)
            progress(SAMPLE_INTERVAL_S / scale.seconds)
            await clock.sleep(SAMPLE_INTERVAL_S)
            if sending.done():
                sending.result()
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    await load.drain()
    answers += _take_answers(deployment, began)
    crashes = [crash.name for crash in deployment.processes.crashes]
    return SoakResult(scale.seconds, answers, samples, crashes)


def _sample(processes: ProcessGroup, at: float) -> ProcessSample:
    cpu_s = {name: cpu_time_s(process) for name, process in processes.processes.items()}
    return ProcessSample(at, processes.rss_bytes(), cpu_s, _fixed_work_s())


def _fixed_work_s() -> float:
    """The CPU time of the same work each time."""
    began = time.thread_time()
    total = 0
    for number in range(FIXED_WORK_STEPS):
        total += number
    return time.thread_time() - began


def _take_answers(deployment: ChaosDeployment, began: float) -> list[SoakAnswer]:
    """The answers that ended since the last call; their records are dropped here."""
    load, observed = deployment.load, deployment.observer.requests
    ended = [talk for talk in load.conversations if talk.ended_at is not None]
    load.conversations[:] = [talk for talk in load.conversations if talk.ended_at is None]
    for talk in ended:
        observed.pop(talk.expected.id, None)
    return [
        SoakAnswer(talk.expected.sent_at - began, talk.expected.ttft_s, talk.verdict)
        for talk in ended
    ]


def soak_report(result: SoakResult) -> Report:
    """A row for each part of the time, and the thresholds."""
    parts = [_part(result, number) for number in range(PARTS)]
    first, last = parts[1], parts[-1]
    requests = sum(len(part.answers) for part in parts[2:])
    growth = {
        name: last.rss_bytes[name] - first.rss_bytes[name]
        for name in last.rss_bytes.keys() & first.rss_bytes.keys()
    }
    grown, name = max((grown, name) for name, grown in growth.items())
    thresholds = [
        at_most(f"memory per request, most of all {name}", grown / KIB / max(1, requests), "KiB",
            GROWTH_LIMIT_KIB),
        at_most("CPU time of a request, last part to second", last.cpu_ms / first.cpu_ms, "x",
            CPU_LIMIT_FACTOR),
        at_most("time to first text, p50, last part to second", last.ttft_ms(0.5)
            / first.ttft_ms(0.5), "x", TTFT_LIMIT_FACTOR),
        *_correctness(result),
    ]  # fmt: skip
    return Report("soak", [part.row(n) for n, part in enumerate(parts, 1)], thresholds)


def _correctness(result: SoakResult) -> list[Threshold]:
    verdicts = Counter(answer.verdict for answer in result.answers)
    return [
        none_of("answers with lost text", verdicts["lost"]),
        none_of("answers with repeated or wrong text", verdicts["twice"] + verdicts["wrong"]),
        none_of("processes that ended", len(result.crashes)),
    ]


class SoakPart(NamedTuple):
    """A part of the time. `rss_bytes`: the median of each process; `cpu_ms_by_process`: of a
    request; `fixed_work_ms`: the median.
    """

    answers: Sequence[SoakAnswer]
    rss_bytes: Mapping[str, float]
    cpu_ms_by_process: Mapping[str, float]
    fixed_work_ms: float

    @property
    def cpu_ms(self) -> float:
        """CPU time of a request, of all processes."""
        return sum(self.cpu_ms_by_process.values())

    def ttft_ms(self, share: float) -> float:
        """A percentile of the time to first text."""
        return 1000 * percentile([answer.ttft_s for answer in self.answers], share)

    def row(self, number: int) -> dict[str, Any]:
        largest: dict[str, float] = {}
        for name, rss_bytes in self.rss_bytes.items():
            kind = name.partition("-")[0]
            largest[kind] = max(largest.get(kind, 0.0), rss_bytes / MB)
        cpu_ms: dict[str, float] = {}
        for name, used_ms in self.cpu_ms_by_process.items():
            kind = name.partition("-")[0]
            cpu_ms[kind] = cpu_ms.get(kind, 0.0) + used_ms
        return {
            "part": number,
            "requests": len(self.answers),
            "first text ms": {"p50": self.ttft_ms(0.5), "p99": self.ttft_ms(0.99)},
            "CPU ms a request": self.cpu_ms,
            "of these": ", ".join(f"{kind} {used_ms:.2f}" for kind, used_ms in cpu_ms.items()),
            "fixed work ms": self.fixed_work_ms,
            "MB": ", ".join(f"{kind} {mb:.1f}" for kind, mb in largest.items()),
        }


def _part(result: SoakResult, number: int) -> SoakPart:
    start, end = (result.seconds * n / PARTS for n in (number, number + 1))
    answers = [answer for answer in result.answers if start <= answer.at < end]
    samples = [sample for sample in result.samples if start <= sample.at < end]
    first, last = samples[0], samples[-1]
    names = last.rss_bytes
    return SoakPart(
        answers,
        {name: median(sample.rss_bytes.get(name, 0) for sample in samples) for name in names},
        {
            name: 1000 * (last.cpu_s[name] - first.cpu_s.get(name, 0.0)) / max(1, len(answers))
            for name in names
        },
        1000 * median(sample.fixed_work_s for sample in samples),
    )
