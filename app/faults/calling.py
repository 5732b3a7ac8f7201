"""Clients that speak HTTP: they ask at one gateway and go on at another when that one is gone.

The real application of a gateway is called in process, without a socket; it runs in the gateway's
process, and stops where that one is stopped. A client that hears nothing for a while leaves, as
does one whose gateway died: it knows an id and a position, and reads on anywhere.
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

from app.faults.asking import RUSH_S, TEXTS
from app.faults.node import Node
from app.faults.shape import MODELS
from app.faults.vtime import process_context
from app.faults.world import World
from app.gateway import Gateway
from app.http.telling import ID_HEADER

CALLS = 4
"""At most, a seed: a call costs ten times as much as a record."""
LEAST_PATIENCE_S, MOST_PATIENCE_S = 4.0, 20.0
PAUSE_S = 2.0
AT_THE_DOOR = ("log_unavailable", "stopping", "no_workers", "overloaded", "model_not_found")
"""Refusals of a gateway, before or instead of a router's: another try may have more luck."""


class Gone(Exception):
    """The connection broke, or nothing came for too long."""


class Call:
    """One answer that a client wants, and what was told of it."""

    def __init__(self, world: World, number: int, rng: random.Random) -> None:
        self.name = f"caller-{number}"
        self.at = rng.random() * (RUSH_S if world.shape.rush else world.shape.faults_s)
        self.prompt = rng.choice(TEXTS)
        self.max_tokens = rng.choice((1, 3, 7, 12, 20))
        self.chat = rng.random() < 0.5
        self._patience_s = rng.uniform(LEAST_PATIENCE_S, MOST_PATIENCE_S)
        self.leaves_after = rng.choice((None, None, None, 1, 3))
        """Events after which the client loses interest."""
        self.id = ""
        self.position = 0
        self.text = ""
        self.outcome = ""
        """The finish reason, the code of the error, or that it left; "" while it goes on."""
        self.surprises: list[str] = []
        """What no gateway should ever have answered."""
        self._world = world
        self._rng = rng
        self._model = rng.choice(MODELS[: world.shape.models])

    async def run(self) -> None:
        """Ask, and go on asking for the rest, until it is over."""
        clock = self._world.clock
        await clock.sleep(self.at)
        while not self.outcome:
            up = [n for n in self._world.living("gateway") if n.state == "up"]
            if up:
                try:
                    await self._try(self._rng.choice(up))
                except Gone:
                    self._world.history.happened(f"{self.name} lost its connection")
                    self._patience_s *= 2  # else it may ask for more than all workers can do
            await clock.sleep(PAUSE_S * self._rng.random())

    async def _try(self, gateway: Node) -> None:
        stream = self._go_on(gateway) if self.id else self._ask(gateway)
        heard = 0
        async with aclosing(stream) as events:
            async for event in events:
                self._take(event)
                heard += 1
                if self._world.on_told is not None:
                    self._world.on_told(gateway)
                if heard == self.leaves_after and not self.outcome:
                    self.outcome = "left"
                if self.outcome:
                    return

    def _ask(self, gateway: Node) -> AsyncGenerator[bytes, None]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": self.max_tokens, "stream": True}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        # Whoever wants to go on elsewhere says so; whoever leaves for good does not.
        headers = {} if self.leaves_after else {"x-kvlane-detach": "true"}
        return self._exchange(gateway, "POST", path, "", msgspec.json.encode(body), headers)

    def _go_on(self, gateway: Node) -> AsyncGenerator[bytes, None]:
        query = f"form={'chat' if self.chat else 'completion'}"
        headers = {"last-event-id": f"{self.position}"}
        return self._exchange(gateway, "GET", f"/v1/streams/{self.id}", query, b"", headers)

    async def _exchange(
        self,
        gateway: Node,
        method: str,
        path: str,
        query: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> AsyncGenerator[bytes, None]:
        """The events that are told, one by one. Raises Gone."""
        self._world.history.happened(f"{self.name} {method} {path} at {gateway.label}")
        told = exchange(gateway, method, path, query, body, headers, self._patience_s)
        async with aclosing(told) as parts:
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
        """One event: a piece, an error, or the end."""
        lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
        if (data := lines.get(b"data")) is None or data == b"[DONE]":
            return
        told = msgspec.json.decode(data)
        if "error" in told:
            self._failed(told["error"]["code"])
            return
        choice = told["choices"][0]
        self.text += choice["delta"].get("content", "") if self.chat else choice["text"]
        if b"id" in lines:
            self.position = int(lines[b"id"])
        if choice["finish_reason"] is not None:
            self.outcome = choice["finish_reason"]

    def _turned_down(self, status: int, code: str) -> None:
        self._world.history.happened(f"{self.name} is told {status} {code}")
        if code in AT_THE_DOOR and not self.position:
            self.id = ""  # what may have become of that one is nobody's concern any more
        else:
            self._failed(code)

    def _failed(self, code: str) -> None:
        if code in ("stopping", "log_unavailable"):
            return  # another gateway goes on
        self.outcome = code
        if code in ("internal", "invalid_value"):
            self.surprises.append(code)


class Calling:
    """All calls of one seed."""

    def __init__(self, world: World) -> None:
        rng = random.Random(f"{world.seed} calling")
        count = rng.randint(1, CALLS) if world.shape.gateways else 0
        self.calls = [Call(world, n, random.Random(f"{world.seed} call {n}")) for n in range(count)]
        self._loop = world.loop

    def start(self) -> None:
        """Start the clients."""
        for call in self.calls:
            self._loop.create_task(call.run(), name=call.name, context=process_context("callers"))


async def exchange(
    gateway: Node,
    method: str,
    path: str,
    query: str,
    body: bytes,
    headers: Mapping[str, str],
    patience_s: float,
) -> AsyncGenerator[Message, None]:
    """What a gateway answers, message by message. To stop early is to close the connection.

    Raises Gone when it dies, or says nothing for `patience_s`.
    """
    assert isinstance(gateway.process, Gateway)
    told: asyncio.Queue[Message] = asyncio.Queue()
    said: asyncio.Queue[Message] = asyncio.Queue()
    said.put_nowait({"type": "http.request", "body": body, "more_body": False})
    lines = {"content-length": str(len(body)), **headers}
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
        gateway.process.http(scope, said.get, told.put),
        name=f"{gateway.label}/exchange",
        context=gateway.context,
    )
    gateway.exchanges.add(serving)
    serving.add_done_callback(gateway.exchanges.discard)
    gone = asyncio.ensure_future(gateway.gone.wait())
    try:
        while True:
            message = await _next(told, gone, patience_s)
            yield message
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
    finally:
        gone.cancel()
        said.put_nowait({"type": "http.disconnect"})


async def _next(
    told: asyncio.Queue[Message], gone: asyncio.Future[Any], within_s: float
) -> Message:
    coming = asyncio.ensure_future(told.get())
    try:
        await asyncio.wait({coming, gone}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise Gone
        return coming.result()
    finally:
        coming.cancel()
