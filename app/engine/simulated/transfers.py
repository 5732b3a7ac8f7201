"""Transfers of KV blocks from prefill to decode, as simulated engines make them.

    prefill engine: offer ─► parameters ─► decode engine: take ─► transfer time ─► release
                      └──── lease over, or the engine shut down ──────────────────► release
                    offer in a room ─────► decode engine: meet ─► take ─► ...

`KvTransfers` is shared by the engines of one process. An offer can be taken once, within its lease;
of an offer of another process only the lease is checked. So engines of one process alone meet in
rooms: with `has_bootstrap` they advertise an endpoint under which none listens. The blocks belong
to their engine, which passes a callback that releases them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvlane.app.engine.interface import EngineError
from kvlane.streams.clock import Clock
from kvlane.streams.record_base import JsonText


class TransferModel(NamedTuple):
    """Time of a transfer, and how long blocks are held for it. Defaults: 16-bit keys and values of
    32 layers with 8 heads of 128 numbers, over 100 Gbit/s."""

    bytes_per_token: int = 131_072
    bytes_per_s: float = 12.5e9
    latency_ms: float = 1.0
    lease_s: float = 2.0

    def duration_s(self, tokens: int) -> float:
        return self.latency_ms / 1000 + tokens * self.bytes_per_token / self.bytes_per_s


class TransferParams(msgspec.Struct, frozen=True):
    """The transfer parameters of an offer, as JSON. `expires_ms`: wall clock, in ms since 1970."""

    engine: str
    handoff: int
    tokens: int
    expires_ms: int


class Transfer(NamedTuple):
    """A transfer under way: its duration, and the callback at its end. `finish` releases the
    blocks; False if they were released before, so that the transfer failed."""

    duration_s: float
    finish: Callable[[], bool]


class _Offer(NamedTuple):
    blocks: int
    release: Callable[[], None]
    lease: asyncio.TimerHandle
    room: int | None


class KvTransfers:
    """The offers of the engines of one process, with counts of failed attempts to take one.

    `taken_twice`: taken before; `taken_late`: past the lease, by an engine that relies on its
    worker for that; `invalid`: with other parameters. `interrupted`: requests that were cancelled
    during their transfer.
    """

    def __init__(
        self,
        clock: Clock,
        model: TransferModel = TransferModel(),  # noqa: B008 - immutable
        *,
        has_bootstrap: bool = False,
    ) -> None:
        self.model = model
        self.has_bootstrap = has_bootstrap
        self.taken_twice = self.taken_late = self.invalid = 0
        self.interrupted: set[str] = set()
        self._clock = clock
        self._held: dict[str, dict[int, _Offer]] = {}
        """Blocks that are not released yet, by engine and number; of running engines only."""
        self._ended: set[str] = set()
        """Engines that were shut down."""
        self._taken: dict[tuple[str, int], int] = {}
        """When the lease of each taken offer ends, in the order of taking."""
        self._rooms: dict[int, asyncio.Future[JsonText]] = {}
        """The parameters of offers in rooms: there, or waited for by a decode engine."""
        self._count = 0
        self._released = asyncio.Event()

    @property
    def held_offers(self) -> int:
        """Offers whose blocks are not released yet."""
        return sum(map(len, self._held.values()))

    @property
    def held_blocks(self) -> int:
        return sum(offer.blocks for offers in self._held.values() for offer in offers.values())

    def add_engine(self, worker_id: str) -> str:
        """Add an engine at its start; returns its name, which no later start repeats."""
        self._count += 1
        name = f"{worker_id}/{self._clock.wall_ms()}/{self._count}"
        self._held[name] = {}
        return name

    def remove_engine(self, name: str) -> None:
        """Remove an engine, which releases its blocks; its offers cannot be taken after that."""
        for number in list(self._held.get(name, ())):
            self._release(name, number)
        self._held.pop(name, None)
        self._ended.add(name)

    def offer(
        self,
        engine: str,
        tokens: int,
        blocks: int,
        release: Callable[[], None],
        room: int | None = None,
    ) -> JsonText:
        """Hold the blocks of a prompt for one lease; returns the transfer parameters. In a room
        they are also for the engine that waits there, or comes within the lease."""
        self._count += 1
        number, lease_s = self._count, self.model.lease_s
        loop = asyncio.get_running_loop()
        lease = loop.call_later(lease_s, self._release, engine, number)
        self._held[engine][number] = _Offer(blocks, release, lease, room)
        expires_ms = self._clock.wall_ms() + int(lease_s * 1000)
        params = msgspec.json.encode(TransferParams(engine, number, tokens, expires_ms))
        if room is not None:
            meeting = self._rooms.setdefault(room, loop.create_future())
            if meeting.done():
                self.invalid += 1
            else:
                meeting.set_result(params)
        return params

    async def meet(self, room: int) -> JsonText:
        """The parameters of the offer in a room. It waits for one without a limit of its own, until
        it is cancelled."""
        meeting = self._rooms.setdefault(room, asyncio.get_running_loop().create_future())
        try:
            return await asyncio.shield(meeting)
        finally:
            self._rooms.pop(room, None)

    def take(self, params: JsonText, prompt_tokens: int, *, is_met: bool = False) -> Transfer:
        """Begin the transfer of an offer. Its lease goes on meanwhile.

        `is_met`: the parameters come from `meet`, whose worker could not know the end of the lease.
        Raises a retryable EngineError if its blocks are gone or taken, or if it is of another
        prompt.
        """
        try:
            wanted = msgspec.json.decode(params, type=TransferParams)
        except msgspec.MsgspecError as e:
            self.invalid += 1
            raise _unusable(f"its transfer parameters are invalid: {e}") from e
        if wanted.tokens != prompt_tokens:
            self.invalid += 1
            raise _unusable(f"it has {wanted.tokens} tokens, the prompt has {prompt_tokens}")
        now_ms = self._clock.wall_ms()
        key = (wanted.engine, wanted.handoff)
        if key in self._taken:
            self.taken_twice += 1
            raise _unusable("it was taken already")
        if wanted.engine in self._ended:
            raise _unusable(f"its engine {wanted.engine} was shut down")
        is_here = wanted.engine in self._held
        if wanted.expires_ms <= now_ms or (
            is_here and wanted.handoff not in self._held[wanted.engine]
        ):
            self.taken_late += not is_met
            raise _unusable("its lease is over")
        self._forget_taken(now_ms)
        self._taken[key] = wanted.expires_ms
        duration_s = self.model.duration_s(prompt_tokens)
        return Transfer(duration_s, lambda: self._release(*key) or not is_here)

    async def wait_released(self, engine: str) -> None:
        """Wait until an engine holds no blocks, at most one lease."""
        while self._held.get(engine):
            self._released.clear()
            await self._released.wait()

    def _release(self, engine: str, number: int) -> bool:
        """Release the blocks of an offer; returns whether they were held."""
        offer = self._held.get(engine, {}).pop(number, None)
        if offer is None:
            return False
        offer.lease.cancel()
        if offer.room is not None:
            self._rooms.pop(offer.room, None)
        offer.release()
        self._released.set()
        return True

    def _forget_taken(self, now_ms: int) -> None:
        """Drop taken offers whose lease is over, since that is checked too."""
        while self._taken and next(iter(self._taken.values())) <= now_ms:
            del self._taken[next(iter(self._taken))]


def _unusable(why: str) -> EngineError:
    return EngineError(f"the hand-off of the prompt cannot be fetched: {why}", retryable=True)
