"""Latency of refusing requests without a valid API key, during streams.

Streams of a tenant run at a fixed rate. Meanwhile requests arrive whose key is missing, wrong or
revoked, each on a new connection or all on a kept one. There is no router and no engine:
`token_feeder.py` answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from kvlane.app.access import key_file
from kvlane.app.commands.simulation.report import Report, at_most
from kvlane.app.percentiles import percentile
from kvlane.app.settings import Settings
from workbench.bench.bench_environment import (
    BenchEnvironment,
    BenchFailed,
    PrintLine,
    bench_environment,
)
from workbench.bench.streaming.raw_http import HttpConnection, http_request, read_stream

MODEL = "bench"
PATH = "/v1/chat/completions"
STREAMS = 64
STEPS_PER_S = 20
REQUEST_INTERVAL_S = 0.01
KEY_RELOAD_WAIT_S = 2.5
"""More than the second after which processes have read a changed file of keys."""
LATENCY_LIMIT_MS = 50.0


class KeyRefusalScale(NamedTuple):
    """Amount of work: requests for each kind of key and connection."""

    requests: int


QUICK = KeyRefusalScale(200)
FULL = KeyRefusalScale(1000)


async def bench_key_refusals(
    settings: Settings,
    scale: KeyRefusalScale,
    print_line: PrintLine,
    progress: Callable[[float], None],
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BenchFailed, BrokerUnavailable."""
    async with bench_environment(settings, print_line) as on:
        valid, revoked = key_file.new_key("acme"), key_file.new_key("acme")
        path = on.output_folder / "keys.json"
        keys = key_file.KeyFile().with_key(valid.entry).with_key(revoked.entry)
        key_file.write_key_file(path, keys)
        _, port = await on.start_gateway(
            MODEL, 4096, api_keys_file=path, stream_secret="bench",  # noqa: S106 - of this run
            metrics_allow_anonymous=True,
        )  # fmt: skip
        await on.start_feeder(100_000, 1, STEPS_PER_S, 0)
        tokens = {"missing": "", "wrong": valid.token[:-8] + "AAAAAAAA", "revoked": revoked.token}
        key_file.write_key_file(path, keys.without(revoked.entry.id))
        await on.clock.sleep(KEY_RELOAD_WAIT_S)
        stream = http_request(PATH, _body(stream=True), valid.token)
        streams = [asyncio.create_task(read_stream(port, stream, on.clock)) for _ in range(STREAMS)]
        try:
            await on.clock.sleep(1)
            rows, thresholds = [], []
            for kind, token in tokens.items():
                for is_kept in (False, True):
                    took_ms = await _refused(on, port, token, scale.requests, is_kept=is_kept)
                    rows.append(_row(kind, took_ms, is_kept=is_kept))
                    p99 = percentile(took_ms, 0.99)
                    where = "kept connection" if is_kept else "new connections"
                    name = f"401 for a {kind} key, {where}, p99"
                    thresholds.append(at_most(name, p99, "ms", LATENCY_LIMIT_MS))
                    progress(1 / (2 * len(tokens)))
            if any(task.done() for task in streams):
                raise BenchFailed("a stream ended before all requests were refused")
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return Report("access", rows, thresholds)


async def _refused(
    on: BenchEnvironment, port: int, token: str, count: int, *, is_kept: bool
) -> list[float]:
    """Milliseconds from the request (new: from connecting) to its answer. Raises BenchFailed."""
    request = http_request(PATH, _body(stream=False), token)
    took_ms, caller = [], await HttpConnection.connect(port)
    try:
        for _ in range(count):
            began = on.clock.now()
            if not is_kept:
                caller.close()
                caller = await HttpConnection.connect(port)
            status = await caller.request(request)
            took_ms.append(1000 * (on.clock.now() - began))
            if status != 401:
                raise BenchFailed(f"a request without a valid key was answered with {status}")
            await on.clock.sleep(REQUEST_INTERVAL_S)
    finally:
        caller.close()
    return took_ms


def _row(kind: str, took_ms: list[float], *, is_kept: bool) -> dict[str, Any]:
    return {
        "key": kind,
        "connection": "kept" if is_kept else "new",
        "streams beside": STREAMS,
        "p50 ms": f"{percentile(took_ms, 0.5):.1f}",
        "p99 ms": f"{percentile(took_ms, 0.99):.1f}",
        "max ms": f"{max(took_ms):.1f}",
        "requests": len(took_ms),
    }


def _body(*, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4000, "stream": stream}
