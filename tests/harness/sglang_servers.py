"""Servers that meet as those of SGLang do, one for prompts and one for the rest of the answers."""

from __future__ import annotations

import asyncio
from typing import Literal

from kvlane.app.engine.attached.request_body import FAKE_BOOTSTRAP_HOST
from kvlane.app.engine.interface import Engine
from tests.harness.model_servers import CloseConnection, ModelServer, ServerExchange


class MeetingRooms:
    """The rooms in which the servers of a deployment meet.

    `faults`: arrivals that no server could serve, each with the reason. `met`: the rooms of
    requests that were transferred, in their order.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.met: list[int] = []
        self._arrived: dict[tuple[int, str], asyncio.Future[None]] = {}

    async def enter(self, room: int, mode: str) -> None:
        """Arrive in a room; wait for the other server, or for the end of the connection."""
        if (room, mode) in self._arrived:
            self.faults.append(f"{mode} entered room {room} again")
        other = "decode" if mode == "prefill" else "prefill"
        mine = self._arrived[room, mode] = asyncio.get_running_loop().create_future()
        theirs = self._arrived.get((room, other))
        if theirs is not None:
            self.met.append(room)
            mine.set_result(None)
            if not theirs.done():
                theirs.set_result(None)
        await mine


class SglangServer(ModelServer):
    """Serves an engine as SGLang in a disaggregation mode would: it answers when its request and
    that of the other server are in the same room. Each room is for one request, and without one a
    request is refused.
    """

    def __init__(
        self, engine: Engine, mode: Literal["prefill", "decode"], rooms: MeetingRooms
    ) -> None:
        super().__init__(engine, "sglang")
        self.mode, self.rooms = mode, rooms

    async def complete(self, exchange: ServerExchange) -> None:
        body = exchange.body
        if (room := body.get("bootstrap_room")) is None:
            message = "Disaggregated request received without bootstrap room id"
            self.rooms.faults.append(message)
            await exchange.answer({"error": {"message": message}}, 400)
            return
        if body.get("bootstrap_host") != FAKE_BOOTSTRAP_HOST:
            if not 0 <= room < 2**63 or not isinstance(body.get("bootstrap_port"), int):
                self.rooms.faults.append(f"invalid room: {body}")
            meeting = asyncio.ensure_future(self.rooms.enter(room, self.mode))
            leaving = asyncio.ensure_future(exchange.wait_closed())
            await asyncio.wait([meeting, leaving], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not meeting.done():
                meeting.cancel()
                raise CloseConnection
        if not body.get("stream"):
            await exchange.answer(
                {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
            )
            return
        await super().complete(exchange)
