"""Reader of probes and metrics of processes over HTTP, by their addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvlane.app.audit.diagnosis.facts import ProcessAnswer

ANSWER_S = 2.0
SAMPLES = 3
"""Reads of the metrics of several processes: their views are compared at equal offsets, and move
with each heartbeat."""
_BETWEEN_SAMPLES_S = 0.2
_MAX_BYTES = 8 * 1024 * 1024
_OFFSET, _HASH = "kvlane_view_offset", "kvlane_view_state_hash"
_ZERO: Mapping[str, Mapping[str, str]] = {
    "kvlane_gateway_stream_gaps_total": {},
    "kvlane_collector_unreadable_records_total": {},
    "kvlane_gateway_completions_total": {"outcome": "unreadable"},
    "kvlane_indexer_skipped_records_total": {"reason": "wrong_secret"},
    "kvlane_worker_skipped_kv_events_total": {"reason": "gaps"},
}
"""Counters that must stay 0, with the labels that count."""


class _Metrics(NamedTuple):
    counts: dict[str, float]
    hashes: dict[tuple[str, str, str, int], float]


class _Page(NamedTuple):
    """A response; status 0: none, `text` is the reason. `ahead_ms`: its clock against ours."""

    status: int
    text: str
    took_s: float = 0.0
    ahead_ms: int | None = None


async def read_processes(urls: Sequence[str], key: str = "") -> list[ProcessAnswer]:
    """The answers of each address, all at the same time. `key`: for metrics. A certificate is
    verified where the key is sent."""
    timeout, connector = aiohttp.ClientTimeout(ANSWER_S), aiohttp.TCPConnector(ssl=bool(key))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        samples = SAMPLES if len(urls) > 1 else 1
        bare = [url.rstrip("/") for url in urls]
        return await asyncio.gather(*(_read(http, url, key, samples) for url in bare))


async def _read(http: aiohttp.ClientSession, url: str, key: str, samples: int) -> ProcessAnswer:
    live, ready = await asyncio.gather(_get(http, f"{url}/livez"), _get(http, f"{url}/readyz"))
    if not live.status:
        return ProcessAnswer(url, unmeasured=live.text)
    metrics, unmeasured = _Metrics({}, {}), ""
    for number in range(samples):
        await asyncio.sleep(_BETWEEN_SAMPLES_S if number else 0)
        page = await _get(http, f"{url}/metrics", key)
        if page.status != HTTPStatus.OK:
            unmeasured = f"/metrics: {page.status or page.text}"
            if page.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                unmeasured = "its metrics need --api-key, of the role metrics or operator"
            break
        try:
            newer = _parse(page.text)
        except (ValueError, KeyError, OverflowError):
            unmeasured = "/metrics: its answer has no figures in the form of Prometheus"
            break
        metrics = _Metrics(newer.counts, metrics.hashes | newer.hashes)
    return ProcessAnswer(
        url, live.status, ready.status, max(live.took_s, ready.took_s), list(_false(ready.text)),
        ready.ahead_ms, None if unmeasured else metrics.counts, metrics.hashes, unmeasured,
    )  # fmt: skip


async def _get(http: aiohttp.ClientSession, url: str, key: str = "") -> _Page:
    headers, began_s = {"authorization": f"Bearer {key}"} if key else {}, time.monotonic()
    try:
        async with http.get(url, headers=headers, allow_redirects=False) as answer:
            content = b""
            while len(content) < _MAX_BYTES and (part := await answer.content.read(_MAX_BYTES)):
                content += part
            text = content.decode(errors="replace")
            date = answer.headers.get("date", "")
            return _Page(answer.status, text, time.monotonic() - began_s, _ahead_ms(date))
    except TimeoutError:
        return _Page(0, f"no answer within {ANSWER_S:g} s")
    except (aiohttp.ClientError, ValueError) as e:
        return _Page(0, str(e) or type(e).__name__)


def _ahead_ms(date: str) -> int | None:
    """Of a header `date`, which is cut to the second."""
    try:
        at_s = parsedate_to_datetime(date).timestamp() + 0.5
    except ValueError:
        return None
    return int((at_s - time.time()) * 1000)


def _false(text: str) -> Iterator[str]:
    """The checks in the body of `/readyz` that are false."""
    try:
        checks: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return
    if isinstance(checks, dict):
        yield from (name for name, value in checks.items() if value is False and name != "ready")


def _parse(text: str) -> _Metrics:
    found = _Metrics({}, {})
    offsets: dict[tuple[str, str, str], float] = {}
    hashes: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name in (_OFFSET, _HASH):
                place = labels["view"], labels["topic"], labels["partition"]
                if sample.name == _OFFSET:
                    offsets[place] = int(sample.value)
                else:
                    hashes[place] = sample.value
            elif (
                wanted := _ZERO.get(sample.name)
            ) is not None and wanted.items() <= labels.items():
                found.counts[sample.name] = found.counts.get(sample.name, 0.0) + sample.value
    found.hashes.update({(*at, int(offsets[at])): value for at, value in hashes.items()})
    return found
