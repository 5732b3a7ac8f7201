"""The catch-up reader of `responses`, for replies that begin before their lane's live position.

    catch_up ──► queue of lanes ──► pass: from the lowest start up to the live position ──► live

A pass reads one lane once, with its own reader, for all replies that waited for it or join it
before it passes their start. Starts far back have separate passes, so that a reply of the last
minute does not wait for an hour of the lane.

Bounds: MAX_PASSES concurrent passes, MAX_FAR_PASSES of them far back; the caller bounds the waiting
replies. Changed replies go to `settle`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from kvlane.streams.clock import Clock
from kvlane.streams.errors import PositionLost
from kvlane.streams.ports import Log, Partition, Reader
from kvlane.streams.responses.live_reader import PartitionTail
from kvlane.streams.responses.reply_stream import Reply
from kvlane.streams.topics import RESPONSES

MAX_PASSES = 4
"""Concurrent passes, so that a lane whose leader hangs delays few others."""
MAX_FAR_PASSES = 2
FAR_OFFSETS = 500_000
"""A start further below the live position is far back. Reading as many takes 1 to 2 s."""
PASS_POLL_S = 0.1
"""After this long without records a pass checks whether it has reached the live position."""
RECORDS_PER_POLL = 1000
STALL_TIMEOUT_S = 5.0
"""A pass without progress for this long yields to another waiting lane."""

OnChanged = Callable[[int, PartitionTail, list[Reply]], Awaitable[None]]
"""Called with the lane number, the lane, and its changed replies."""
ReaderTask = Callable[[], Coroutine[Any, Any, None]]
TryMoveToLive = Callable[[int, PartitionTail], bool]
"""Moves the replies of a lane to the live reader; False before the pass has caught up."""


class PassKey(NamedTuple):
    """The key of a pass: a lane, and whether its starts are far back."""

    lane: int
    is_far: bool


class CatchUpReader:
    """The passes and the replies that wait for one. All of `reader_tasks` must be running."""

    def __init__(
        self, log: Log, clock: Clock, settle: OnChanged, move_to_live: TryMoveToLive
    ) -> None:
        self.readers = [log.reader() for _ in range(MAX_PASSES)]
        self.active_passes: dict[PassKey, PartitionTail] = {}
        self._waiting: dict[PassKey, dict[Reply, int]] = {}
        """Start offsets of waiting replies; keys in the order of their first reply."""
        self._clock = clock
        self._settle = settle
        self._move_to_live = move_to_live
        self._wanted = asyncio.Event()

    def reader_tasks(self) -> dict[str, ReaderTask]:
        """The reading tasks by name; each runs until cancelled, and raises its reader's errors."""
        return {f"history-{n}": partial(self._run, reader) for n, reader in enumerate(self.readers)}

    def catch_up(self, number: int, start: int, reply: Reply, live: int) -> None:
        """Feed a reply from `start`, which is below `live`, the live position of its lane."""
        queue = PassKey(number, live - start > FAR_OFFSETS)
        self._waiting.setdefault(queue, {})[reply] = start
        self._wanted.set()

    def remove(self, number: int, reply: Reply) -> None:
        for is_far in (False, True):
            queue = PassKey(number, is_far)
            if (lane := self.active_passes.get(queue)) is not None:
                lane.remove(reply)
            if (waiting := self._waiting.get(queue)) is not None:
                waiting.pop(reply, None)
                if not waiting:
                    del self._waiting[queue]

    def all_replies(self) -> list[Reply]:
        read = [reply for lane in self.active_passes.values() for reply in lane.all_replies()]
        return read + [reply for waiting in self._waiting.values() for reply in waiting]

    async def _run(self, reader: Reader) -> None:
        while True:
            while (queue := self._next()) is None:
                self._wanted.clear()
                await self._wanted.wait()
            waiting = self._waiting.pop(queue)
            lane = self.active_passes[queue] = PartitionTail(
                min(waiting.values()), self._clock.now()
            )
            for reply in waiting:
                lane.add(reply)
            try:
                await self._read(reader, queue, lane)
            finally:
                del self.active_passes[queue]
                self._wanted.set()  # wake passes that had to wait for this one

    def _next(self) -> PassKey | None:
        """The longest waiting key that may have a pass now."""
        far = sum(queue.is_far for queue in self.active_passes)
        for queue in self._waiting:
            if queue not in self.active_passes and (not queue.is_far or far < MAX_FAR_PASSES):
                return queue
        return None

    async def _read(self, reader: Reader, queue: PassKey, lane: PartitionTail) -> None:
        """One pass: until the live reader has taken over all replies, or none is left."""
        source = Partition(RESPONSES, queue.lane)
        reader.assign({source: lane.position}, lane.replies)
        moved_at = self._clock.now()
        try:
            while lane.replies:
                self._join(queue, lane)
                before = lane.position
                try:
                    batches = await reader.poll(PASS_POLL_S, RECORDS_PER_POLL)
                except PositionLost as e:
                    await self._lose(queue, lane, e)
                    return
                changed = lane.apply(batches[source]) if source in batches else []
                lane.position = max(lane.position, reader.position(source))
                await self._settle(queue.lane, lane, changed)
                if self._move_to_live(queue.lane, lane):
                    return
                if lane.position > before:
                    moved_at = self._clock.now()
                elif self._clock.now() - moved_at >= STALL_TIMEOUT_S and self._next() is not None:
                    self._put_back(queue, lane)
                    return
        finally:
            reader.assign({})

    def _join(self, queue: PassKey, lane: PartitionTail) -> None:
        """Add waiting replies to a pass that has not passed their start. Only between two polls:
        during one the reader has skipped records beyond the position."""
        for is_far in (False, True):
            waiting = self._waiting.get(PassKey(queue.lane, is_far), {})
            last = sys.maxsize if is_far == queue.is_far else lane.position + FAR_OFFSETS
            for reply in [r for r, start in waiting.items() if lane.position <= start <= last]:
                self.remove(queue.lane, reply)
                lane.add(reply)

    async def _lose(self, queue: PassKey, lane: PartitionTail, error: PositionLost) -> None:
        """The start of the log has moved past the position of the pass. Replies without visible
        records restart there: the deleted records may be of others."""
        lost = []
        for reply in lane.all_replies():
            if reply.has_begun or error.wanted >= error.start:
                reply.fail(error)
                lost.append(reply)
            elif reply.start < error.start:
                reply.restart_truncated(error.start)
        await self._settle(queue.lane, lane, lost)
        lane.position = error.start
        self._put_back(queue, lane)

    def _put_back(self, queue: PassKey, lane: PartitionTail) -> None:
        """Let the replies wait for another pass, from the position of this one."""
        if rest := {reply: max(reply.start, lane.position) for reply in lane.all_replies()}:
            self._waiting.setdefault(queue, {}).update(rest)
