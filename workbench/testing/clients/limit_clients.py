"""HTTP clients of a tenant with limits: they ask in parallel, and again while one is reached."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import aclosing
from http import HTTPStatus

import msgspec

from kvlane.app.http.server.limit_sharing import CLAIM_TTL_S, RENEWAL_S
from kvlane.streams.codecs import type_of
from kvlane.streams.topics import CAPACITY
from workbench.testing.api_keys import HOARDER, LIMITED, ClientKey
from workbench.testing.clients.http_exchange import Disconnected, HttpCall, http_exchange
from workbench.testing.clients.job_clients import UPLOAD_HEADERS, answer_of, upload_form
from workbench.testing.clients.kafka_clients import TEXTS
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import process_context
from workbench.testing.world_parameters import MODELS

CLIENTS, REQUESTS_EACH = 6, 2
READ_TIMEOUT_S, RETRY_PAUSE_S = 15.0, 1.0
PATH = "/v1/completions"
UPLOADERS, UPLOADS_EACH, UPLOAD_BYTES = 4, 4, 1000


class LimitClients:
    """The clients of a seed; none without the scenario."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._rng = rng = random.Random(f"{world.seed} limits")
        self._begins_s = rng.random() * world.parameters.faults_s * 0.7
        has_limits = "limits" in world.parameters.scenarios
        self.waiting = {f"limited-{n}" for n in range(CLIENTS if has_limits else 0)}
        """Names of those that still ask."""
        self._open: Counter[str] = Counter()
        """Responses that have begun and not ended, by gateway."""
        self.most = 0
        """The most of them at a time, over all gateways whose claims have not lapsed."""
        self.file_bytes = self.most_file_bytes = 0
        """Bytes of files that clients of another tenant were given and have not begun to delete."""

    def start(self) -> None:
        for name in sorted(self.waiting):
            context = process_context("limited")
            self._world.loop.create_task(self._run(name), name=name, context=context)
        for n in range(UPLOADERS if self.waiting else 0):
            name, context = f"uploader-{n}", process_context("limited")
            self._world.loop.create_task(self._upload(name), name=name, context=context)

    async def _run(self, name: str) -> None:
        assert self._world.keys is not None
        key = ClientKey(self._world.keys, LIMITED)
        await self._world.clock.sleep(self._begins_s)
        for _ in range(REQUESTS_EACH):
            while not await self._is_answered(name, key):
                await self._world.clock.sleep(RETRY_PAUSE_S * self._rng.random())
        self.waiting.discard(name)

    async def _upload(self, name: str) -> None:
        """Upload files at the same time as others, and delete some."""
        world, rng = self._world, random.Random(f"{self._world.seed} {name}")
        assert world.keys is not None
        key = ClientKey(world.keys, HOARDER)
        await world.clock.sleep(self._begins_s)
        for _ in range(UPLOADS_EACH):
            form, headers = upload_form(b"x" * UPLOAD_BYTES), {**UPLOAD_HEADERS, **key.headers}
            up = [node for node in world.running("gateway") if node.state == "up"]
            try:
                if up:
                    gateway = rng.choice(up)
                    upload = HttpCall("POST", "/v1/files", form, headers)
                    status, content = await answer_of(gateway, upload)
                    world.history.add_event(f"{name} gets {status} at {gateway.label}")
                    if status == HTTPStatus.OK:
                        self.file_bytes += UPLOAD_BYTES
                        self.most_file_bytes = max(self.most_file_bytes, self.file_bytes)
                        await world.clock.sleep(rng.random())
                        path = f"/v1/files/{msgspec.json.decode(content)['id']}"
                        self.file_bytes -= UPLOAD_BYTES
                        await answer_of(gateway, HttpCall("DELETE", path, b"", key.headers))
            except Disconnected:
                pass
            await world.clock.sleep(rng.choice((0.0, 2.0)))

    async def _is_answered(self, name: str, key: ClientKey) -> bool:
        world, rng = self._world, self._rng
        up = [node for node in world.running("gateway") if node.state == "up"]
        if not up:
            return False
        gateway = rng.choice(up)
        body = {
            "model": rng.choice(MODELS[: world.parameters.models]),
            "prompt": rng.choice(TEXTS),
            "max_tokens": rng.choice((3, 7, 20)),
            "stream": True,
        }
        call = HttpCall("POST", PATH, msgspec.json.encode(body), key.headers)
        try:
            async with aclosing(http_exchange(gateway, call, READ_TIMEOUT_S)) as parts:
                status = (await anext(parts))["status"]
                world.history.add_event(f"{name} gets {status} at {gateway.label}")
                if status != HTTPStatus.OK:
                    return False
                self._open[gateway.label] += 1
                counted = self._open.keys() - self._lapsed() | {gateway.label}
                self.most = max(self.most, sum(self._open[label] for label in counted))
                try:
                    async for _ in parts:
                        pass
                finally:
                    self._open[gateway.label] -= 1
        except Disconnected:
            return False
        return True

    def _lapsed(self) -> set[str]:
        """Gateways that may not have renewed their claims in time."""
        records = self._world.broker.records(CAPACITY, 0)
        last_ms = {raw.key: raw.timestamp for raw in records if type_of(raw) == b"LimitClaims"}
        since_ms = records[-1].timestamp - 1000 * (CLAIM_TTL_S - RENEWAL_S) if records else 0
        lapsed = [key for key, at_ms in last_ms.items() if key and at_ms < since_ms]
        return {key.decode().rpartition("-")[0] for key in lapsed}
