"""Facts of requests, and those of the ended ones of a window in bounded memory.

Of the ended requests these are kept: the newest, and of each minute before them the slowest and the
last failed ones. Pure.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heappushpop
from typing import Literal

import msgspec

from kvlane.app.routing.state.request_state import LedgerRecord, RequestState
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import Assigned, Fencing, Finished, PrefillDone

MAX_NEWEST = 10_000
"""The newest ended requests, which are all kept; about 8 MB. The record of a request may be read
after its end, since partitions are read one after the other."""
MAX_OF_MINUTE = 200
"""Slowest, and failed, requests that are kept of each minute before: 10 MB for an hour each."""
MAX_ENDED_IDS = 50_000
"""Ids of ended requests that are known, the last ones; about 10 MB."""
COMPLETED = frozenset({"stop", "length", "seen", "cancelled"})
"""Codes of requests that are no failures."""
_MINUTE_MS = 60_000


class RequestFacts(msgspec.Struct, order=True):
    """Facts of a request. Times by the broker, in ms; 0: not reached, or not read.

    `state`: by the ledger, while it is open. `began_ms`: append of the request, or of its prompt.
    `received_ms`: its router had it. `offset`: of its record in `requests`; -1: not read.
    `base_tokens`: output of earlier attempts.
    """

    lane: int
    state: RequestState | None = None
    began_ms: int = 0
    received_ms: int = 0
    deadline_ms: int = 0
    offset: int = -1
    model: str = ""
    tenant: str = ""
    service_class: ServiceClass | Literal[""] = ""
    worker: str = ""
    attempt: int = 0
    decided_ms: int = 0
    first_token_ms: int = 0
    base_tokens: int = 0
    output_tokens: int = 0
    code: str = ""
    reason: str = ""
    ended_ms: int = 0
    last_ms: int = 0

    @property
    def since_ms(self) -> int:
        """The time from which the others count: its append, or its arrival at a router."""
        return self.began_ms or self.received_ms

    def note(self, record: LedgerRecord, at_ms: int) -> None:
        """Take in the facts of a ledger record that the state leaves out."""
        if isinstance(record, Assigned):
            self.worker, self.attempt = record.worker, record.attempt
            self.base_tokens = self.output_tokens = record.base_tokens
            self.service_class = record.service_class
            if record.account is not None:
                self.model, self.tenant = record.account.model, record.account.tenant
            if not self.decided_ms:
                self.decided_ms = at_ms
                is_first = not record.attempt and record.phase != "decode"
                self.received_ms = at_ms - record.held_ms if is_first else 0
            self.deadline_ms = record.deadline_ms
        elif isinstance(record, PrefillDone):
            if record.phase != "prefill":
                self.first_token_ms = self.first_token_ms or at_ms
        elif isinstance(record, Finished) and record.attempt >= self.attempt:
            self.reason = record.reason or self.reason
            if record.phase != "prefill":
                self.output_tokens = self.base_tokens + record.output_tokens
        elif isinstance(record, Fencing):
            self.attempt = record.attempt
            self.reason = record.reason or self.reason


class LastEndedIds:
    """The last ids that have ended. `forgotten_ms`: by lane the time up to which others have."""

    def __init__(self) -> None:
        self.forgotten_ms: dict[int, int] = {}
        self._known = set[str]()
        self._order: deque[tuple[int, str, int]] = deque()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._known

    def add(self, lane: int, request_id: str, ended_ms: int) -> None:
        """Add an id that is not known."""
        self._known.add(request_id)
        self._order.append((lane, request_id, ended_ms))
        if len(self._order) > MAX_ENDED_IDS:
            first_lane, first_id, first_ms = self._order.popleft()
            self._known.remove(first_id)
            self.forgotten_ms[first_lane] = first_ms


KeptRequest = tuple[int, str, RequestFacts]
"""The number by which it is kept, its id, its facts."""


class _Minute:
    def __init__(self) -> None:
        self.count = self.failed_count = 0
        self.slowest: list[KeptRequest] = []
        self.failed: list[KeptRequest] = []


class EndedRequests:
    """`newest`: by id, and in no order."""

    def __init__(self, most: int = MAX_OF_MINUTE, model: str = "", tenant: str = "") -> None:
        """`most`: those that are kept of each minute, slowest and failed, as far as they are of
        the model and of the tenant, if one is given."""
        self.newest: dict[str, RequestFacts] = {}
        self._most, self._model, self._tenant = most, model, tenant
        self._order: list[tuple[int, str]] = []
        """A heap of the newest by the time of their end: lanes are read one after the other."""
        self._minutes: dict[int, _Minute] = {}
        self._since_ms = 0

    def kept(self) -> dict[str, RequestFacts]:
        """All that are kept, by id."""
        found = dict(self.newest)
        for minute in self._minutes.values():
            for heap in (minute.slowest, minute.failed):
                found.update((request_id, facts) for _, request_id, facts in heap)
        return found

    def add(self, request_id: str, facts: RequestFacts) -> None:
        self.newest[request_id] = facts
        heappush(self._order, (facts.ended_ms, request_id))
        if len(self._order) > MAX_NEWEST:
            self._fold()

    def expire(self, since_ms: int) -> None:
        """Drop those that ended before a time; of minutes only whole ones."""
        self._since_ms = since_ms
        while self._order and self._order[0][0] < since_ms:
            del self.newest[heappop(self._order)[1]]
        for number in [n for n in self._minutes if (n + 1) * _MINUTE_MS <= since_ms]:
            del self._minutes[number]

    @property
    def count(self) -> int:
        """Number of the wanted requests that ended in the window, also those that are not kept."""
        return len(self.newest) + sum(each.count for each in self._minutes.values())

    @property
    def failed_left_out(self) -> int:
        """Number of the failed ones of them that are not kept."""
        kept = {
            request_id
            for minute in self._minutes.values()
            for _, request_id, facts in (*minute.slowest, *minute.failed)
            if facts.code not in COMPLETED
        }
        return sum(minute.failed_count for minute in self._minutes.values()) - len(kept)

    def _fold(self) -> None:
        """Keep the first one of the newest only if it is among those of its minute."""
        ended_ms, request_id = heappop(self._order)
        facts = self.newest.pop(request_id)
        if self._model not in ("", facts.model or self._model):
            return
        if self._tenant not in ("", facts.tenant or self._tenant):
            return
        minute = self._minutes.setdefault(ended_ms // _MINUTE_MS, _Minute())
        minute.count += 1
        took_ms = ended_ms - (facts.since_ms or self._since_ms)
        self._keep(minute.slowest, (took_ms, request_id, facts))
        if facts.code not in COMPLETED:
            minute.failed_count += 1
            self._keep(minute.failed, (ended_ms, request_id, facts))

    def _keep(self, heap: list[KeptRequest], kept: KeptRequest) -> None:
        if len(heap) < self._most:
            heappush(heap, kept)
        else:
            heappushpop(heap, kept)
