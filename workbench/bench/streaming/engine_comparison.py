"""Policies, and SGLang's router, on the same real engines: vLLM servers on this machine.

    client (this process) ─┬─► gateway ─► router ─► workers (Kafka) ─┬─► vLLM servers
                           └─► SGLang's router, cache_aware ─────────┘

The sides take turns, in the reverse order in each second round; each has new processes, in front of
servers with empty prefix caches. Records of turns before stay in the log, and routers read them. A
turn that is not measured warms up broker and servers, of which the first side would pay else: mean
TTFT 72 ms where the fourth one had 45. Requests are text completions at their times
(open loop), equal for all sides: the trace that ships with kvlane, short prompts, and bursts of
them. The servers are of a tiny model on this CPU, with prompts and answers of the trace shortened;
with `KVLANE_MODEL_PATH` and `KVLANE_ENGINE_ARGS` of another model, such as one on a GPU, at full
length.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from tokenizers import Tokenizer

from kvlane.app.demo import tiny_model
from kvlane.app.demo.demo_session import DemoEnvironment, demo_environment
from kvlane.app.demo.ledger_reader import LedgerDecisions, TimeErrors
from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import ManagedProcess, free_port, http_get, launch
from kvlane.app.settings import Settings
from kvlane.app.simulation.synthetic_traces import (
    SHORT_BURSTS,
    SHORT_PROMPTS,
    TraceSize,
    generate_trace,
)
from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, CHUNK_TOKENS, TraceRow, read_trace
from kvlane.streams.brokers.broker import LOOPBACK, free_ports
from kvlane.streams.brokers.broker_factory import obtain_broker
from kvlane.streams.brokers.watchdog import ProcessGuard
from kvlane.streams.clock import Clock
from workbench.bench.bench_environment import BenchFailed, PrintLine
from workbench.bench.report import Report, Threshold, at_most
from workbench.bench.statistics import percentile
from workbench.bench.streaming.raw_http import metrics_page

MODEL = "bench"
OWN_POLICY = "predictive"
POLICIES = (OWN_POLICY, "round_robin", "least_loaded", "dynamo")
PEER, PEER_PACKAGES = "SGLang's router", "sglang-router==0.3.2 orjson"
SIDES = (*POLICIES, PEER)
TRACE = "trace"
KINDS = (TRACE, SHORT_PROMPTS, SHORT_BURSTS)
SHRINK_FACTOR = CHUNK_TOKENS // tiny_model.BLOCK_SIZE
"""Of prompts and answers of the trace, for the tiny model: a chunk becomes a block."""
CONTEXT_LENGTH, CACHE_BLOCKS = 1024, 256
"""Of the tiny model's servers."""
MIN_ANSWER, WARM_UP_TOKENS = 4, 2
START_TIMEOUT_S, ANSWER_TIMEOUT_S, LEDGER_TIMEOUT_S = 400.0, 120.0, 2.0
ERROR_LIMITS = {"p50": 0.2, "p90": 0.6}
LIMIT = 1.05
"""Of the means of the default policy to the best other side, which differ from run to run."""
_SERVED = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.MULTILINE)


class EngineScale(NamedTuple):
    """Amount of work: rounds of all sides, and seconds of each kind of traffic."""

    rounds: int
    seconds: float


QUICK, FULL = EngineScale(2, 12.0), EngineScale(4, 60.0)


class TextRequest(NamedTuple):
    at_s: float
    text: str
    output_tokens: int


class EngineAnswer(NamedTuple):
    """An answered request; times in ms."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    itl_ms: float
    e2e_ms: float
    id: str
    errors: TimeErrors = TimeErrors()


class VllmServer(NamedTuple):
    """A server's process, and the ports of its API, its cache events and their replay."""

    process: ManagedProcess
    http: int
    events: int
    replay: int

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.http}"

    def worker(self, number: int, folder: Path) -> DeploymentPart:
        """A worker that is attached to it."""
        own = {
            "engine": "attached", "attach_url": self.url, "model_path": str(folder),
            "attach_events_endpoint": f"tcp://{LOOPBACK}:{self.events}",
            "attach_replay_endpoint": f"tcp://{LOOPBACK}:{self.replay}",
        }  # fmt: skip
        return DeploymentPart(f"worker-{number}", "worker", own)


Side = Callable[[], AbstractAsyncContextManager[str]]
"""Starts and stops what is between client and engines; the URL of its API."""
Traffic = Mapping[str, Sequence[TextRequest]]


async def bench_engines(
    settings: Settings,
    scale: EngineScale,
    servers: int,
    rate: float,
    print_line: PrintLine,
    progress: Callable[[float], None],
    sides: Collection[str] = SIDES,
    kinds: Collection[str] = KINDS,
) -> Report:
    """Run it with `servers` servers and `rate` requests a second. `sides`, `kinds`: those of
    `SIDES` and `KINDS` to run. Raises BenchFailed, BrokerUnavailable, DeploymentFailed."""
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-bench-")))
        guard = ProcessGuard()
        cleanup.callback(guard.close)
        folder, given = settings.model_path, settings.engine_args
        shrink, environment = 1, {"VLLM_SERVER_DEV_MODE": "1"}  # which can reset prefix caches
        if folder is None:
            folder, shrink = tiny_model.make_model(scratch / "model"), SHRINK_FACTOR
            given = tiny_model.engine_arguments(CACHE_BLOCKS, CONTEXT_LENGTH)
            environment |= tiny_model.environment()
        os.environ.update(environment)
        engines = [_launch_server(guard, n, folder, given) for n in range(servers)]
        broker = cleanup.enter_context(obtain_broker(
            "env" if settings.bootstrap_servers else "jvm", full_jit=True, report=print_line,
            bootstrap_servers=settings.bootstrap_servers,
        ))  # fmt: skip
        parts = [
            *(engine.worker(n, folder) for n, engine in enumerate(engines, 1)),
            DeploymentPart("router-1", "router"), DeploymentPart("gateway-1", "gateway"),
        ]  # fmt: skip
        changes = {"http_port": free_port(), "model": MODEL, "drain_grace_s": 0.5}
        async with demo_environment(settings, broker, parts=parts, changes=changes) as on:
            for engine in engines:
                await _wait_answering(f"{engine.url}/health", engine.process, on.context.clock)
            traffic = make_traffic(
                words_of(folder), scale.seconds, rate, given.get("max_model_len", 1 << 20), shrink
            )
            traffic = {kind: requests for kind, requests in traffic.items() if kind in kinds}
            comparison = EngineComparison(on, traffic, engines, progress)
            comparison.sides = {name: comparison.sides[name] for name in POLICIES if name in sides}
            if PEER in sides and find_spec("sglang_router") is not None:
                comparison.sides[PEER] = lambda: _peer_side(guard, engines, on.context.clock)
            elif PEER in sides:
                print_line(f"without {PEER}: pip install --no-deps {PEER_PACKAGES}")
            return await comparison.run(scale.rounds)


class EngineComparison:
    """The sides and their turns. Without `engines`, those of the deployment's own workers run."""

    def __init__(
        self,
        on: DemoEnvironment,
        traffic: Traffic,
        engines: Sequence[VllmServer],
        progress: Callable[[float], None],
    ) -> None:
        self._on = on
        self._clock = on.context.clock
        self._traffic = traffic
        self._engines = engines
        self._progress = progress
        self._decisions = LedgerDecisions(on.log)
        self._session: aiohttp.ClientSession
        self.sides: dict[str, Side] = {
            name: lambda name=name: self._policy_side(name)  # type: ignore[misc]
            for name in POLICIES
        }

    async def run(self, rounds: int) -> Report:
        """All sides and all traffic, in turns. Raises as `bench_engines` does."""
        found: dict[tuple[str, str], list[EngineAnswer]] = {}
        busiest: dict[tuple[str, str], Counter[str]] = {}
        spawned = self._decisions.follow(await self._decisions.end_positions())
        self._on.context.spawn("ledger", spawned)
        limit = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as self._session:
            async with next(iter(self.sides.values()))() as url:  # a turn that is not measured
                await self._replay(url, next(iter(self._traffic.values())))
            for number in range(rounds):
                for side in list(self.sides) if number % 2 == 0 else list(self.sides)[::-1]:
                    async with self.sides[side]() as url:
                        for kind, requests in self._traffic.items():
                            await self._empty_caches(url)
                            before = await self._served()
                            got = await self._replay(url, requests)
                            found.setdefault((kind, side), []).extend(got)
                            counts = busiest.setdefault((kind, side), Counter())
                            counts.update(await self._served_since(before, got))
                            self._progress(1 / (rounds * len(self.sides) * len(self._traffic)))
        rows = {
            key: _row(*key, found[key], busiest[key], len(self._engines) or len(busiest[key]))
            for key in sorted(found, key=lambda key: list(self._traffic).index(key[0]))
        }
        return Report("engines", [*rows.values()], [*_thresholds(self._traffic, found)])

    @asynccontextmanager
    async def _policy_side(self, policy: str) -> AsyncIterator[str]:
        deployment = self._on.deployment
        await deployment.restart({part.kind for part in self._on.parts}, {"policy": policy})
        await deployment.wait_ready(timeout_s=START_TIMEOUT_S)
        url = f"http://{self._on.settings.http_host}:{self._on.settings.http_port}"
        until = self._clock.now() + START_TIMEOUT_S
        while not ((await asyncio.to_thread(http_get, f"{url}/v1/models")).body or {}).get("data"):
            if self._clock.now() > until:
                raise BenchFailed(f"the gateway has no model after {START_TIMEOUT_S:g} s")
            await self._clock.sleep(0.1)
        try:
            yield url
        finally:
            await deployment.stop()

    async def _empty_caches(self, url: str) -> None:
        """Empty the servers' caches; the event of that comes with the next step of each."""
        for engine in self._engines:
            async with self._session.post(f"{engine.url}/reset_prefix_cache") as reply:
                if reply.status != HTTPStatus.OK:
                    raise BenchFailed(f"{engine.url} did not empty its cache: {reply.status}")
            await self._ask(engine.url, TextRequest(0.0, "warm", WARM_UP_TOKENS))
        await self._ask(url, TextRequest(0.0, "warm up", WARM_UP_TOKENS))

    async def _replay(self, url: str, requests: Sequence[TextRequest]) -> list[EngineAnswer]:
        began, tasks = self._clock.now(), []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                await self._clock.sleep(max(began + request.at_s - self._clock.now(), 0.0))
                tasks.append(group.create_task(self._ask(url, request)))
        got, known = [task.result() for task in tasks], self._decisions
        until = self._clock.now() + LEDGER_TIMEOUT_S
        while any(known.decisions(e.id) and known.cached_tokens(e.id) is None for e in got):
            if self._clock.now() > until:
                break
            await self._clock.sleep(0.01)
        return [each._replace(errors=known.prediction_errors(each.id)) for each in got]

    async def _ask(self, url: str, request: TextRequest) -> EngineAnswer:
        """Send a request and read its answer. Raises BenchFailed."""
        body = {
            "model": MODEL, "prompt": request.text, "max_tokens": request.output_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, times, usage, answer_id = self._clock.now(), list[float](), dict[str, Any](), ""
        async with self._session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != HTTPStatus.OK:
                raise BenchFailed(f"{url}: status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(line[6:], type=dict[str, Any])
                if "error" in event:
                    raise BenchFailed(f"{url}: {event['error']}")
                answer_id, usage = event["id"], event.get("usage") or usage
                if any(choice["text"] for choice in event["choices"]):
                    times.append(self._clock.now())
        if not times or not usage:
            raise BenchFailed(f"{url}: an answer without text or usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        gaps = max(usage["completion_tokens"] - 1, 1)
        return EngineAnswer(
            usage["prompt_tokens"], cached, 1000 * (times[0] - began),
            1000 * (times[-1] - times[0]) / gaps, 1000 * (times[-1] - began),
            answer_id.partition("-")[2] if answer_id.startswith("cmpl-") else answer_id,
        )  # fmt: skip

    async def _served(self) -> dict[str, float]:
        """Answers of each server so far."""
        pages = [(each.url, await metrics_page(each.http)) for each in self._engines]
        return {url: sum(map(float, _SERVED.findall(page))) for url, page in pages}

    async def _served_since(
        self, before: Mapping[str, float], got: Sequence[EngineAnswer]
    ) -> Mapping[str, int]:
        """Answers of each server since then; without servers, of each worker."""
        if not before:
            return Counter(w for each in got for w in self._decisions.answering_workers(each.id))
        return {url: int(count - before[url]) for url, count in (await self._served()).items()}


def make_traffic(
    words: Sequence[str], seconds: float, rate: float, longest: int, shrink: int = 1
) -> Traffic:
    """The kinds of traffic, each as many requests over `seconds`; `words` are tokens.

    `longest`: the most tokens of a prompt and its answer. `shrink`: divisor of the trace's lengths.
    """
    size = TraceSize(max(round(seconds * rate), 2), rate)
    kinds = {
        TRACE: (read_trace(BUNDLED_TRACE)[: size.requests], shrink),
        **{kind: (generate_trace(kind, size), 1) for kind in (SHORT_PROMPTS, SHORT_BURSTS)},
    }
    return {
        kind: [_request(row, rows, words, seconds, longest, factor) for row in rows]
        for kind, (rows, factor) in kinds.items()
    }


def _request(
    row: TraceRow,
    rows: Sequence[TraceRow],
    words: Sequence[str],
    seconds: float,
    longest: int,
    shrink: int,
) -> TextRequest:
    output = min(max(row.output_length // shrink, MIN_ANSWER), longest // 4)
    length = min(max(row.input_length // shrink, 1), longest - output - 1)
    text: list[str] = []
    for chunk in row.hash_ids[: length * shrink // CHUNK_TOKENS + 1]:
        text += random.Random(chunk).choices(words, k=CHUNK_TOKENS // shrink)
    span_ms = rows[-1].timestamp - rows[0].timestamp
    at_s = (row.timestamp - rows[0].timestamp) / max(span_ms, 1) * seconds
    return TextRequest(at_s, "".join(text[:length]), output)


def words_of(folder: Path) -> list[str]:
    """Words of a model that are one token each, with their space."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [f" {piece[1:]}" for piece in sorted(tokenizer.get_vocab())
             if re.fullmatch("Ġ[A-Za-z]+", piece)]  # fmt: skip
    return [w for w in words if len(tokenizer.encode(w, add_special_tokens=False).ids) == 1]


def _launch_server(
    guard: ProcessGuard, number: int, folder: Path, engine_arguments: Mapping[str, Any]
) -> VllmServer:
    http, events, replay = free_ports(3)
    published = {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    options = {
        "model": folder, "served-model-name": MODEL, "host": LOOPBACK, "port": http,
        "enable-prompt-tokens-details": True, "kv-events-config": published, **engine_arguments,
    }  # fmt: skip
    arguments: list[str] = []
    for name, value in options.items():
        shown = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [shown])]
    log = guard.directory / f"server-{number}.log"
    command = ("vllm.entrypoints.openai.api_server", *arguments)
    process = launch(guard, f"server {number}", command, {}, log)
    return VllmServer(process, http, events, replay)


async def _wait_answering(url: str, process: ManagedProcess, clock: Clock) -> None:
    until = clock.now() + START_TIMEOUT_S
    while (await asyncio.to_thread(http_get, url)).status != HTTPStatus.OK:
        process.check()
        if clock.now() > until:
            raise BenchFailed(f"{process.name} does not answer:\n{process.tail}")
        await clock.sleep(0.2)


@asynccontextmanager
async def _peer_side(
    guard: ProcessGuard, engines: Sequence[VllmServer], clock: Clock
) -> AsyncIterator[str]:
    port, metrics_port = free_ports(2)
    command = (
        "sglang_router.launch_router", "--host", LOOPBACK, "--port", str(port),
        "--prometheus-port", str(metrics_port), "--policy", "cache_aware", "--log-level", "error",
        "--worker-urls", *(engine.url for engine in engines),
    )  # fmt: skip
    process = launch(guard, PEER, command, {}, guard.directory / "peer.log")
    try:
        await _wait_answering(f"http://{LOOPBACK}:{port}/readiness", process, clock)
        yield f"http://{LOOPBACK}:{port}"
    finally:
        process.stop(10.0)


def _row(
    kind: str, side: str, got: Sequence[EngineAnswer], counts: Mapping[str, int], engines: int
) -> dict[str, Any]:
    """`busiest`: requests at the engine with the most, as a multiple of an equal share."""
    ttft, itl = [each.ttft_ms for each in got], [each.itl_ms for each in got]
    first, between = _errors(got)
    return {
        "traffic": kind, "side": side, "requests": len(got),
        "hits": sum(each.cached_tokens for each in got) / sum(each.prompt_tokens for each in got),
        "TTFT ms": {
            "mean": _mean(ttft), "p50": percentile(ttft, 0.5), "p99": percentile(ttft, 0.99),
        },
        "ITL ms": {"mean": _mean(itl), "p99": percentile(itl, 0.99)},
        "E2E ms": _mean([each.e2e_ms for each in got]),
        "busiest": max(counts.values(), default=0) * engines / max(sum(counts.values()), 1),
        "TTFT error": first, "ITL error": between,
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _errors(got: Sequence[EngineAnswer]) -> tuple[dict[str, float], dict[str, float]]:
    """Median and 90th percentile of each error; no number where nothing is predicted."""
    found: list[dict[str, float]] = []
    for at in (0, 1):
        known = [each for exchange in got if (each := exchange.errors[at]) is not None] or [
            math.nan
        ]
        found.append({"p50": percentile(known, 0.5), "p90": percentile(known, 0.9)})
    return found[0], found[1]


def _thresholds(
    traffic: Traffic, found: Mapping[tuple[str, str], Sequence[EngineAnswer]]
) -> Iterator[Threshold]:
    for kind in traffic:
        others = [got for (of, side), got in found.items() if of == kind and side != OWN_POLICY]
        if not others or (own := found.get((kind, OWN_POLICY))) is None:
            continue
        for name, field in (("TTFT", "ttft_ms"), ("E2E", "e2e_ms")):
            best = min(_mean([getattr(each, field) for each in got]) for got in others)
            ratio = _mean([getattr(each, field) for each in own]) / best
            yield at_most(f"{kind}: mean {name} to the best other side", ratio, "x", LIMIT)
        for name, errors in zip(("TTFT", "ITL"), _errors(own), strict=True):
            for share, limit in ERROR_LIMITS.items():
                yield at_most(f"{kind}: error of {name}, {share}", errors[share], "", limit)
