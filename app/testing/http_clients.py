"""HTTP clients of a simulation: they resume a stream at another gateway when theirs is gone.

The gateway's real ASGI application is called without a socket; it runs in the gateway's simulated
process and is paused and killed with it. A client whose gateway ends or sends nothing for a while
disconnects and, by request id and position, resumes the stream at any gateway.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Message

from app.gateway import Gateway
from app.http.openai.response_writer import ID_HEADER
from app.testing.kafka_clients import BURST_S, TEXTS
from app.testing.simulated_process import SimulatedProcess
from app.testing.simulated_world import SimulatedWorld
from app.testing.virtual_time import process_context
from app.testing.world_parameters import MODELS

MAX_HTTP_CLIENTS = 4
"""Most calls of a seed: one costs ten times as much as a record."""
MIN_READ_TIMEOUT_S, MAX_READ_TIMEOUT_S = 4.0, 20.0
RETRY_PAUSE_S = 2.0
RETRYABLE_CODES = ("log_unavailable", "stopping", "no_workers", "overloaded", "model_not_found")
"""Rejections by a gateway, before or instead of a router's: a retry may succeed."""


class Disconnected(Exception):
    """The connection broke, or nothing arrived for too long."""


class HttpClient:
    """One request of an HTTP client, and its response so far."""

    def __init__(self, world: SimulatedWorld, number: int, rng: random.Random) -> None:
        self.name = f"caller-{number}"
        self.at_s = rng.random() * (
            BURST_S if world.parameters.is_burst else world.parameters.faults_s
        )
        self.prompt = rng.choice(TEXTS)
        self.max_tokens = rng.choice((1, 3, 7, 12, 20))
        self.chat = rng.random() < 0.5
        self._patience_s = rng.uniform(MIN_READ_TIMEOUT_S, MAX_READ_TIMEOUT_S)
        self.disconnects_after = rng.choice((None, None, None, 1, 3))
        """Events after which the client disconnects for good."""
        self.id = ""
        self.position = 0
        self.text = ""
        self.outcome = ""
        """The finish reason, the code of the error, or "left"; "" while it is open."""
        self.unexpected_errors: list[str] = []
        """Error codes that no gateway should ever send."""
        self._world = world
        self._rng = rng
        self._model = rng.choice(MODELS[: world.parameters.models])

    async def run(self) -> None:
        """Send the request, and resume its stream until it is over."""
        clock = self._world.clock
        await clock.sleep(self.at_s)
        while not self.outcome:
            up = [n for n in self._world.running("gateway") if n.state == "up"]
            if up:
                try:
                    await self._try(self._rng.choice(up))
                except Disconnected:
                    self._world.history.add_event(f"{self.name} lost its connection")
                    self._patience_s *= 2  # else it may ask for more than all workers can do
            await clock.sleep(RETRY_PAUSE_S * self._rng.random())

    async def _try(self, gateway: SimulatedProcess) -> None:
        stream = self._go_on(gateway) if self.id else self._send(gateway)
        received = 0
        async with aclosing(stream) as events:
            async for event in events:
                self._take(event)
                received += 1
                if self._world.on_response_event is not None:
                    self._world.on_response_event(gateway)
                if received == self.disconnects_after and not self.outcome:
                    self.outcome = "left"
                if self.outcome:
                    return

    def _send(self, gateway: SimulatedProcess) -> AsyncGenerator[bytes, None]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": self.max_tokens, "stream": True}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        # Only a client that will resume elsewhere asks for a request that outlives it.
        headers = {} if self.disconnects_after else {"x-kvlane-detach": "true"}
        return self._exchange(gateway, "POST", path, "", msgspec.json.encode(body), headers)

    def _go_on(self, gateway: SimulatedProcess) -> AsyncGenerator[bytes, None]:
        query = f"form={'chat' if self.chat else 'completion'}"
        headers = {"last-event-id": f"{self.position}"}
        return self._exchange(gateway, "GET", f"/v1/streams/{self.id}", query, b"", headers)

    async def _exchange(
        self,
        gateway: SimulatedProcess,
        method: str,
        path: str,
        query: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> AsyncGenerator[bytes, None]:
        """The events of a response, one by one. Raises Disconnected."""
        self._world.history.add_event(f"{self.name} {method} {path} at {gateway.label}")
        answer = http_exchange(gateway, method, path, query, body, headers, self._patience_s)
        async with aclosing(answer) as parts:
            start = await anext(parts)
            lines = {k.decode(): v.decode() for k, v in start["headers"]}
            self.id = lines.get(ID_HEADER, self.id)
            rest = b""
            async for part in parts:
                rest += part.get("body", b"")
                if start["status"] == HTTPStatus.OK:
                    *events, rest = rest.split(b"\n\n")
                    for event in events:
                        yield event
        if start["status"] != HTTPStatus.OK:
            self._turned_down(start["status"], msgspec.json.decode(rest)["error"]["code"])

    def _take(self, event: bytes) -> None:
        """Take one event: a chunk, an error, or the end."""
        lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
        if (data := lines.get(b"data")) is None or data == b"[DONE]":
            return
        answer = msgspec.json.decode(data)
        if "error" in answer:
            self._failed(answer["error"]["code"])
            return
        choice = answer["choices"][0]
        self.text += choice["delta"].get("content", "") if self.chat else choice["text"]
        if b"id" in lines:
            self.position = int(lines[b"id"])
        if choice["finish_reason"] is not None:
            self.outcome = choice["finish_reason"]

    def _turned_down(self, status: int, code: str) -> None:
        self._world.history.add_event(f"{self.name} gets {status} {code}")
        if code in RETRYABLE_CODES and not self.position:
            self.id = ""  # start over: the result of that request is not checked
        else:
            self._failed(code)

    def _failed(self, code: str) -> None:
        if code in ("stopping", "log_unavailable"):
            return  # resumed at another gateway
        self.outcome = code
        if code in ("internal", "invalid_value"):
            self.unexpected_errors.append(code)


class HttpClients:
    def __init__(self, world: SimulatedWorld) -> None:
        rng = random.Random(f"{world.seed} calling")
        count = rng.randint(1, MAX_HTTP_CLIENTS) if world.parameters.gateways else 0
        self.clients = [
            HttpClient(world, n, random.Random(f"{world.seed} call {n}")) for n in range(count)
        ]
        self._loop = world.loop

    def start(self) -> None:
        for call in self.clients:
            self._loop.create_task(call.run(), name=call.name, context=process_context("callers"))


async def http_exchange(
    gateway: SimulatedProcess,
    method: str,
    path: str,
    query: str,
    body: bytes,
    headers: Mapping[str, str],
    read_timeout_s: float,
) -> AsyncGenerator[Message, None]:
    """A gateway's response, message by message. Stopping early closes the connection.

    Raises Disconnected when it ends, or sends nothing for `read_timeout_s`.
    """
    assert isinstance(gateway.process, Gateway)
    answer: asyncio.Queue[Message] = asyncio.Queue()
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    lines = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.encode(), v.encode()) for k, v in lines.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    serving = asyncio.get_running_loop().create_task(
        gateway.process.http(scope, incoming.get, answer.put),
        name=f"{gateway.label}/exchange",
        context=gateway.context,
    )
    gateway.exchanges.add(serving)
    serving.add_done_callback(gateway.exchanges.discard)
    gone = asyncio.ensure_future(gateway.is_gone.wait())
    try:
        while True:
            message = await _next(answer, gone, read_timeout_s)
            yield message
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
    finally:
        gone.cancel()
        incoming.put_nowait({"type": "http.disconnect"})


async def _next(
    answer: asyncio.Queue[Message], gone: asyncio.Future[Any], within_s: float
) -> Message:
    coming = asyncio.ensure_future(answer.get())
    try:
        await asyncio.wait({coming, gone}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise Disconnected
        return coming.result()
    finally:
        coming.cancel()
