"""A client and a fake worker that answers it, for tests on the log in memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvlane.streams.client import Client
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.topics import RESPONSES, lane_of
from tests.harness.memory_world import MemoryWorld


class Worker:
    """Writes the stream of one request, chunk by chunk; a token is a character."""

    def __init__(
        self, world: MemoryWorld, request_id: str, attempt: int = 0, index: int = 0
    ) -> None:
        self.id = request_id
        self._world = world
        self._lane = lane_of(request_id, world.lanes)
        self._attempt = attempt
        self._seq = 0
        self.index = index

    def write(self, text: str, finish_reason: str | None = None) -> Chunk:
        chunk = Chunk(
            id=self.id,
            attempt=self._attempt,
            run=f"1{self._attempt}",
            seq=self._seq,
            index=self.index,
            token_ids=tuple(map(ord, text)),
            text=text,
            chars=self.index + len(text),
            finish_reason=finish_reason,
        )
        self.append(chunk)
        self._seq += 1
        self.index += len(text)
        return chunk

    def append(self, record: Chunk | Fence | End) -> None:
        self._world.append(RESPONSES, self._lane, record, key=self.id)


async def connect(world: MemoryWorld, name: str = "client") -> Client:
    client = Client(await world.connect(name), world.clock)
    await client.start()
    return client


async def publish(client: Client, request_id: str | None = None) -> str:
    return await client.publish(Prompt(id=request_id or client.new_request_id()))


async def begin_reply(world: MemoryWorld) -> tuple[Client, Worker]:
    """A client that has published a prompt, and the prompt's worker."""
    client = await connect(world)
    return client, Worker(world, await publish(client))


async def read(client: Client, request_id: str, from_token: int = 0) -> list[Chunk | End]:
    return [piece async for piece in client.stream(request_id, from_token=from_token)]


def in_lane(lane: int, name: str) -> str:
    """An id with this prefix in this lane, of two."""
    return next(i for i in (f"{name}-{n}" for n in range(100)) if lane_of(i, 2) == lane)


def text(pieces: Sequence[Chunk | End]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Chunk))
