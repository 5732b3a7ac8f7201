"""One HTTP exchange with a simulated gateway, whose ASGI application is called without a socket.

It runs in the gateway's process: it is paused and killed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from starlette.types import Message

from kvlane.app.gateway import Gateway
from workbench.testing.simulated_process import SimulatedProcess


class Disconnected(Exception):
    """The connection broke, or nothing arrived for too long."""


class HttpCall(NamedTuple):
    """A request as a client sends it. `path`: with the query, if any."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = {}


async def http_exchange(
    gateway: SimulatedProcess, call: HttpCall, read_timeout_s: float, *, buffered: int = 0
) -> AsyncGenerator[Message, None]:
    """A gateway's response, message by message. Stopping early closes the connection.

    `buffered`: messages between the gateway and a slow client; 0 for any number. Raises
    Disconnected when the gateway ends, or sends nothing for `read_timeout_s`.
    """
    assert isinstance(gateway.process, Gateway)
    answer: asyncio.Queue[Message] = asyncio.Queue(buffered)
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    has_left = False

    async def send(message: Message) -> None:
        if not has_left:
            await answer.put(message)

    incoming.put_nowait({"type": "http.request", "body": call.body, "more_body": False})
    path, _, query = call.path.partition("?")
    length = str(len(call.body))
    lines = {"content-type": "application/json", "content-length": length, **call.headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
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
        gateway.process.http(scope, incoming.get, send),
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
        has_left = True
        while not answer.empty():  # else the gateway waits for room
            answer.get_nowait()
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
