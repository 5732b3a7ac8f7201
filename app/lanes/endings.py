"""How a request ends: visibly, once, and with nothing left behind.

The order of the appends is the contract: End where readers see it, CancelRun to the workers, Ended
last of all, which discharges every obligation. Whether a request is to end is decided elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from app.lanes.context import RouterContext
from app.routing.load import RunId
from streams.errors import AppendFailed
from streams.ports import Partition
from streams.records import CancelRun, End, EndCode, Ended, Placed, Usage
from streams.topics import ASSIGNMENTS, LEDGER, RESPONSES

log = logging.getLogger(__name__)


class Endings:
    """The ends of one lane's requests."""

    def __init__(self, context: RouterContext, lane: int) -> None:
        self._context = context
        self._lane = lane
        self._ledger = Partition(LEDGER, lane)

    async def end(
        self,
        request_id: str,
        code: EndCode,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        usage: Usage | None = None,
        placed: Placed | None = None,
    ) -> None:
        """End a request: End where readers see it, CancelRun to its workers, Ended last of all.

        Ended discharges everything; written first, a router that died after it would leave readers
        waiting for ever.
        """
        runs = self.living_runs(request_id)
        end = End(
            id=request_id, code=code, message=message, retry_after_s=retry_after_s, usage=usage,
            placed=placed,
        )  # fmt: skip
        await self._context.outbox.persist(RESPONSES, request_id, end, self._lane)
        await self.cancel_runs(request_id, runs, code)
        await self.write_ended(request_id, code)
        self._context.metrics.ended(code)

    async def write_ended(self, request_id: str, code: EndCode | Literal["seen"]) -> None:
        """Discharge a request; `seen`: its readers have seen its end already."""
        s = self._context
        ended = await s.outbox.persist(
            LEDGER, request_id, Ended(id=request_id, code=code), self._lane
        )
        await s.ledger_read(self._ledger, ended.offset + 1)

    async def cancel_runs(self, request_id: str, runs: Sequence[RunId], reason: str) -> None:
        """Tell workers to stop runs. One try: a run that goes on is in the next heartbeat again."""
        for run in runs:
            cancel = CancelRun(
                worker=run.worker, epoch=run.epoch, id=request_id, attempt=run.attempt,
                phase=run.phase, reason=reason,
            )  # fmt: skip
            try:
                await self._context.outbox.send(ASSIGNMENTS, run.worker, cancel)
            except AppendFailed as e:
                log.warning("lane %d: CancelRun of %s failed: %s", self._lane, request_id, e)

    async def read_ledger(self) -> None:
        """Wait until this lane's ledger is read to where it ends now."""
        end = await self._context.end_of(self._ledger)
        await self._context.ledger_read(self._ledger, end)

    def living_runs(self, request_id: str) -> list[RunId]:
        """The open runs of a request whose workers may still be working."""
        story = self._context.load.story(self._lane, request_id)
        is_lost = self._context.fleet.is_lost
        runs = story.open_runs() if story is not None else []
        return [run for run in runs if not is_lost(run.worker, run.epoch)]
