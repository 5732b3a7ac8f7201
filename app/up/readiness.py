"""Readiness of a deployment on this machine, and detection of another one on its topics.

Checks `/readyz` of the processes and `/v1/models` of the gateway, and reads the registry and
heartbeats of the workers. Starts and stops nothing.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.clock import BrokerClock, Clock
from kvlane.streams.ports import Log, Partition
from kvlane.streams.topics import KV_EVENTS, REGISTRY
from kvlane.streams.views.follower import Follower

HTTP_TIMEOUT_S = 2.0
CATCH_UP_S = 30.0
HEARTBEAT_WINDOW_MS = 60_000
"""Age of the oldest heartbeats that are read; also the largest clock difference to brokers."""
LIVENESS_HEARTBEATS = 2.5
"""Heartbeat intervals within which every live worker has sent one."""


class HttpAnswer(NamedTuple):
    """A response: its HTTP status, 0 without an answer, and its body as JSON."""

    status: int
    body: Any


class WorkerObserver:
    """The workers of a deployment, read from its topics."""

    def __init__(self, log: Log, clock: Clock, heartbeat_s: float) -> None:
        self._log = log
        self._local_clock = clock
        self._heartbeat_s = heartbeat_s
        self._reading: asyncio.Task[None] | None = None
        self._fleet = Fleet()
        self._clock = BrokerClock(clock)
        self._follower = Follower(
            log, self._fleet, [REGISTRY, KV_EVENTS], clock,
            broker_clock=self._clock, start=self._start,
        )  # fmt: skip

    async def start(self) -> None:
        """Follow the topics in the background; returns when it has reached their present ends."""
        self._reading = asyncio.create_task(self._follower.run())
        async with asyncio.timeout(CATCH_UP_S):
            await self._follower.wait_caught_up()

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def find_alive(self, names: Collection[str]) -> list[str]:
        """The workers of these that are alive: a new heartbeat arrives while this waits.

        Returns at once if all last heartbeats are old.
        """
        before = {name: beat.offset for name in names if (beat := self._fleet.heartbeats.get(name))}
        recent = [n for n in before if not self._is_silent(n)]
        if not recent:
            return []
        await self._local_clock.sleep(LIVENESS_HEARTBEATS * self._heartbeat_s)
        return [name for name in recent if self._fleet.heartbeats[name].offset != before[name]]

    def next_epoch(self) -> int:
        """An epoch above those of all workers so far."""
        return self._fleet.position(Partition(REGISTRY, 0)) or 0

    def find_ready(self, names: Collection[str], since: int) -> list[str]:
        """The workers of these that accept requests, with epochs of at least `since`."""
        members = self._fleet.members
        return [
            name for name in names if self._fleet.is_ready(name) and members[name].epoch >= since
        ]

    def _is_silent(self, name: str) -> bool:
        return self._clock.now_ms() - self._fleet.heartbeats[name].at_ms > HEARTBEAT_WINDOW_MS

    async def _start(self, source: Partition) -> int:
        if source.topic == REGISTRY:
            return 0
        since_ms = max(0, self._local_clock.wall_ms() - HEARTBEAT_WINDOW_MS)
        return await self._log.offset_at(source.topic, source.partition, since_ms)


class ReadinessCheck:
    """The checks that must pass before requests are served."""

    def __init__(
        self, workers: WorkerObserver, names: Collection[str], since: int, urls: Mapping[str, str]
    ) -> None:
        """`urls`: addresses by process name; the gateway is "gateway-1"."""
        self._workers = workers
        self._names = names
        self._since = since
        self._urls = urls

    async def failed_checks(self) -> list[str]:
        """The failed checks, as texts; empty when all pass."""
        ready = self._workers.find_ready(self._names, self._since)
        missing = [f"{n} has not registered" for n in self._names if n not in ready]
        answers = await asyncio.gather(
            *(asyncio.to_thread(http_get, f"{url}/readyz") for url in self._urls.values())
        )
        for name, answer in zip(self._urls, answers, strict=True):
            if answer.status != HTTPStatus.OK:
                missing.append(f"{name} {_words(answer)}")
        if not missing:
            models = await asyncio.to_thread(http_get, f"{self._urls['gateway-1']}/v1/models")
            if models.status == HTTPStatus.OK and not models.body.get("data"):
                missing.append("gateway-1 lists no model")
        return missing


def http_get(url: str) -> HttpAnswer:
    """GET from a server of this machine, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S, context=context) as answer:  # noqa: S310 - http
            return HttpAnswer(answer.status, _body(answer.read()))
    except urllib.error.HTTPError as e:
        with e:
            return HttpAnswer(e.code, _body(e.read()))
    except (OSError, http.client.HTTPException):
        return HttpAnswer(0, None)


def _body(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _words(answer: HttpAnswer) -> str:
    if not answer.status:
        return "does not listen yet"
    body = answer.body if isinstance(answer.body, dict) else {}
    wrong = [name for name, value in body.items() if value is False and name != "ready"]
    return f"is not ready ({', '.join(wrong) or answer.status})"
