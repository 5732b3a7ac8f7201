"""Termination of a request: visible to readers, once, and with no run left behind; and the waits of
a lane's jobs that a Cancel may end.

The order of the appends is the contract: End where readers see it, CancelRun to the workers, Ended
last of all, which discharges every obligation. A router that has lost its lane while it was stopped
may append an End in the middle of an answer of the new owner: readers see that one End and no more.
Only a transaction guarded by the group's generation would rule that out.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from kvlane.app.lanes.context import RouterContext
from kvlane.app.routing.state.request_state import RunId
from kvlane.streams.errors import AppendFailed
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import Account
from kvlane.streams.records import CancelRun, DryRunResult, End, EndCode, Ended, Usage
from kvlane.streams.topics import ASSIGNMENTS, LEDGER, RESPONSES

log = logging.getLogger(__name__)


class RequestCancelled(Exception):
    """A Cancel of the request has arrived, which ends every wait for it."""


class RequestWait(NamedTuple):
    """A wait of a request, as operators read it. `since_ms`: broker time from which on it waits;
    `worker`: the one that it is queued for."""

    since_ms: int
    reason: str
    worker: str = ""
    is_batch: bool = False

    @property
    def text(self) -> str:
        return f"{self.reason}: {self.worker}" if self.worker else self.reason


class CancellableWaits:
    """The requests of one lane whose job waits for a record that may never come. Cancelling the
    job's task ends such a wait. `has_cancel`: whether a Cancel has arrived."""

    def __init__(self, has_cancel: Callable[[str], bool]) -> None:
        self.waiting_ids: set[str] = set()
        self.cancellable_ids: set[str] = set()
        """Those of them that a Cancel ends."""
        self.latest: dict[str, RequestWait] = {}
        """By request: the wait of its job, or the last one, after which it looks for a place."""
        self._has_cancel = has_cancel

    @contextmanager
    def begin(
        self, request_id: str, wait: RequestWait, *, is_cancellable: bool = True
    ) -> Iterator[None]:
        """Around every wait for workers and look-up. `is_cancellable`: False for a wait that a
        Cancel has caused. Raises RequestCancelled if a Cancel is here already."""
        if is_cancellable and self._has_cancel(request_id):
            raise RequestCancelled(request_id)
        self.latest[request_id] = wait
        self.waiting_ids.add(request_id)
        if is_cancellable:
            self.cancellable_ids.add(request_id)
        try:
            yield
        finally:
            self.waiting_ids.discard(request_id)
            self.cancellable_ids.discard(request_id)


class RequestTermination:
    def __init__(self, context: RouterContext, lane: int) -> None:
        self._context = context
        self._lane = lane
        self.prompts: set[str] = set()
        """Ids of requests from Kafka that are being admitted."""
        self.offsets: dict[str, int] = {}
        """Offsets of the records of requests that are being admitted."""
        self.accounts: dict[str, Account | None] = {}
        """Accounts of the same requests."""
        self._ledger = Partition(LEDGER, lane)

    async def end(
        self,
        request_id: str,
        code: EndCode,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        usage: Usage | None = None,
        placed: DryRunResult | None = None,
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """End a request: End where readers see it, CancelRun to its workers, Ended last of all.
        `release`: called before Ended, to free the resources of the request."""
        runs = self.active_runs(request_id)
        end = End(
            id=request_id, code=code, message=message, retry_after_s=retry_after_s, usage=usage,
            placed=placed, origin=self._origin_of(request_id),
        )  # fmt: skip
        await self._context.publisher.publish(RESPONSES, request_id, end, self._lane)
        await self.cancel_runs(request_id, runs, code)
        if release is not None:
            await release()
        await self.write_terminal(request_id, code)
        self._context.metrics.on_ended(code)

    def _origin_of(self, request_id: str) -> int:
        state = self._context.ledger.request(self._lane, request_id)
        if state is not None and state.origin is not None:
            return state.origin.offset
        return self.offsets.get(request_id, -1)

    async def write_terminal(self, request_id: str, code: EndCode | Literal["seen"]) -> None:
        """Discharge a request; `seen`: its readers have seen its end already."""
        s = self._context
        record = Ended(
            id=request_id, code=code, is_prompt=request_id in self.prompts,
            account=self.accounts.get(request_id),
        )  # fmt: skip
        ended = await s.publisher.publish(LEDGER, request_id, record, self._lane)
        await s.wait_for_ledger(self._ledger, ended.offset + 1)

    async def cancel_runs(self, request_id: str, runs: Sequence[RunId], reason: str) -> None:
        """Cancel runs at workers. One try: the next heartbeat lists a run that continues."""
        for run in runs:
            cancel = CancelRun(
                worker=run.worker, epoch=run.epoch, id=request_id, attempt=run.attempt,
                phase=run.phase, reason=reason,
            )  # fmt: skip
            try:
                await self._context.publisher.publish_once(ASSIGNMENTS, run.worker, cancel)
            except AppendFailed as e:
                log.warning("lane %d: CancelRun of %s failed: %s", self._lane, request_id, e)

    async def catch_up_with_ledger(self) -> None:
        """Wait until this lane's ledger is read to where it ends now."""
        end = await self._context.end_offset(self._ledger)
        await self._context.wait_for_ledger(self._ledger, end)

    def active_runs(self, request_id: str) -> list[RunId]:
        """The open runs of a request whose workers may still be working."""
        state = self._context.ledger.request(self._lane, request_id)
        is_lost = self._context.fleet.is_lost
        runs = state.open_runs() if state is not None else []
        return [run for run in runs if not is_lost(run.worker, run.epoch)]
