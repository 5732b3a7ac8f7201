"""Clients of batch jobs in a simulation: upload, create, wait or cancel, download the output.

A client continues at any gateway when its own is gone. It repeats a call without an answer: the
file or the job may then exist twice, and the client follows the later job.
"""

from __future__ import annotations

import json
import random
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import msgspec

from workbench.testing.api_keys import LIMITED, TENANTS, ClientKey
from workbench.testing.clients.http_exchange import Disconnected, HttpCall, http_exchange
from workbench.testing.clients.kafka_clients import TEXTS
from workbench.testing.simulated_process import SimulatedProcess
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import process_context
from workbench.testing.world_parameters import MODELS

MAX_JOBS, MAX_LINES = 2, 6
LIMITED_JOBS = 3
"""Jobs that a tenant with limits creates at the same time."""
CANCEL_SHARE = 0.25
CHECK_S = 2.0
READ_TIMEOUT_S = 15.0
ENDED = ("completed", "failed", "expired", "cancelled")
ENDPOINT = "/v1/completions"
_BOUNDARY = "a-boundary"
UPLOAD_HEADERS = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}


class JobClient:
    """One job: `names` are the custom ids of its lines."""

    def __init__(
        self, world: SimulatedWorld, number: int, rng: random.Random, *, is_limited: bool = False
    ) -> None:
        """`is_limited`: of the tenant with limits; all its jobs begin at the same time."""
        self.is_limited = is_limited
        self.name = f"job-client-{number}"
        self.names = [f"line-{n}" for n in range(rng.randint(1, MAX_LINES))]
        self.job: dict[str, Any] = {}
        """The job as its client got it last."""
        self.lines: list[dict[str, Any]] = []
        """The lines of its output and its error file."""
        self.is_over = False
        self.unexpected_errors: list[str] = []
        self._world = world
        self._rng = rng
        begins = random.Random(f"{world.seed} limited jobs") if is_limited else rng
        self._begins_s = begins.random() * world.parameters.faults_s * 0.7
        self._key: ClientKey | None = None
        if world.keys is not None:
            tenants = random.Random(f"{world.seed} {self.name} tenant")
            tenant = LIMITED if is_limited else tenants.choice(TENANTS)
            self._key = ClientKey(world.keys, tenant)
        self._cancels_after_s = 10 * rng.random() if rng.random() < CANCEL_SHARE else None
        self._input = b"".join(self._line(name) for name in self.names)

    @property
    def is_cancelled(self) -> bool:
        """True if the client cancels its job."""
        return self._cancels_after_s is not None

    async def run(self) -> None:
        """Bring a job from its input to the lines of its output."""
        clock = self._world.clock
        await clock.sleep(self._begins_s)
        file = await self._json("POST", "/v1/files", upload_form(self._input), UPLOAD_HEADERS)
        self._own(f"/v1/files/{file['id']}/content")
        wanted = {"input_file_id": file["id"], "endpoint": ENDPOINT}
        self.job = await self._json("POST", "/v1/batches", msgspec.json.encode(wanted))
        path = f"/v1/batches/{self.job['id']}"
        self._own(path)
        if self._cancels_after_s is not None:
            await clock.sleep(self._cancels_after_s)
            self.job = await self._json("POST", f"{path}/cancel")
        while self.job["status"] not in ENDED:
            await clock.sleep(CHECK_S)
            self.job = await self._json("GET", path)
        for field in ("output_file_id", "error_file_id"):
            if file_id := self.job[field]:
                content = await self._call("GET", f"/v1/files/{file_id}/content")
                self.lines += [json.loads(line) for line in content.splitlines()]
        self.is_over = True

    def _own(self, path: str) -> None:
        if self._key is not None:
            self._key.own(path)

    def _line(self, name: str) -> bytes:
        body = {
            "model": self._rng.choice(MODELS[: self._world.parameters.models]),
            "prompt": self._rng.choice(TEXTS),
            "max_tokens": self._rng.choice((3, 7, 20)),
        }
        line = {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body}
        return msgspec.json.encode(line) + b"\n"

    async def _json(self, *call: Any) -> Any:
        return msgspec.json.decode(await self._call(*call))

    async def _call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> bytes:
        """The body of the answer; repeated at any gateway while there is none."""
        while True:
            up = [n for n in self._world.running("gateway") if n.state == "up"]
            if up:
                gateway = self._rng.choice(up)
                self._world.history.add_event(f"{self.name} {method} {path} at {gateway.label}")
                call = HttpCall(method, path, body, headers or {})
                try:
                    status, content = await self._answer(gateway, call)
                except Disconnected:
                    self._world.history.add_event(f"{self.name} lost its connection")
                else:
                    if status == HTTPStatus.OK:
                        return content
                    self._world.history.add_event(f"{self.name} gets {status} {content!r}")
                    if status == HTTPStatus.CONFLICT and path.endswith("/cancel"):
                        return await self._call("GET", path.removesuffix("/cancel"))
                    is_reached = self.is_limited and status == HTTPStatus.TOO_MANY_REQUESTS
                    is_error = status < HTTPStatus.INTERNAL_SERVER_ERROR and not is_reached
                    if is_error and (self._key is None or status != HTTPStatus.UNAUTHORIZED):
                        self.unexpected_errors.append(f"{status} {content!r}")
            await self._world.clock.sleep(CHECK_S * self._rng.random())

    async def _answer(self, gateway: SimulatedProcess, call: HttpCall) -> tuple[int, bytes]:
        """Status and body, asked for with the key of the tenant. Raises Disconnected."""
        if (key := self._key) is None:
            return await answer_of(gateway, call)
        is_valid = key.is_valid(gateway)
        call = call._replace(headers={**call.headers, **key.headers})
        status, content = await answer_of(gateway, call)
        is_refused = status == HTTPStatus.UNAUTHORIZED
        if is_valid == is_refused:
            self.unexpected_errors.append("a revoked key is served, or a valid one refused")
        if is_refused:
            key.replace()
        return status, content


class JobClients:
    """The batch jobs of a seed; none without gateways and collectors."""

    def __init__(self, world: SimulatedWorld) -> None:
        rng = random.Random(f"{world.seed} jobs")
        has_jobs = "batch jobs" in world.parameters.scenarios
        self.clients = [
            JobClient(world, n, random.Random(f"{world.seed} job {n}"))
            for n in range(rng.randint(1, MAX_JOBS) if has_jobs else 0)
        ]
        self.clients += [
            JobClient(world, n, random.Random(f"{world.seed} limited job {n}"), is_limited=True)
            for n in range(MAX_JOBS, MAX_JOBS + LIMITED_JOBS)
            if "limits" in world.parameters.scenarios
        ]
        self._loop = world.loop

    def start(self) -> None:
        """Start all."""
        self._running = [
            self._loop.create_task(client.run(), name=client.name, context=process_context("jobs"))
            for client in self.clients
        ]


async def answer_of(gateway: SimulatedProcess, call: HttpCall) -> tuple[int, bytes]:
    """Status and body. Raises Disconnected."""
    async with aclosing(http_exchange(gateway, call, READ_TIMEOUT_S)) as parts:
        status: int = (await anext(parts))["status"]
        return status, b"".join([part.get("body", b"") async for part in parts])


def upload_form(content: bytes) -> bytes:
    """The multipart body of an upload."""
    head = b"--a-boundary\r\ncontent-disposition: form-data; name="
    purpose = head + b'"purpose"\r\n\r\nbatch\r\n'
    return (
        purpose
        + head
        + b'"file"; filename="in.jsonl"\r\n\r\n'
        + content
        + b"\r\n--a-boundary--\r\n"
    )
