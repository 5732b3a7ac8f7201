"""The client's side of an incremental fetch session (KIP-227) with one broker.

A broker keeps the partitions and positions of a session. A request lists only the partitions that
differ, and the response only those with records, an error or a new end. Pure: no connections. The
rules that keep both sides equal:

- One request at a time. `positions` are those of the last request: the broker's side holds them as
  soon as it has read the request.
- A partition that is not read (revoked, paused, led by another broker, or with records that wait in
  the client) is forgotten, else the broker would answer at once, again and again.
- A request without a response leaves open which side the broker has: `restart`. So does every error
  of a whole response, such as an unknown session (70) or an unexpected epoch (71).
- Ends of partitions are reported once. A new assignment lacks them: `restart`.
- A broker without a free session answers with session id 0: the next request is a full one.

A broker has 1000 sessions by default (`max.incremental.fetch.session.cache.slots`), so a reader of
a short range must not take one: the first requests are made without a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aiokafka import TopicPartition

NO_SESSION = 0
"""Session id of a client that has none."""
FINAL_EPOCH = -1
"""Epoch of a request that lists all partitions and opens no session."""
INITIAL_EPOCH = 0
"""Epoch of a request that lists all partitions and opens a session. Both close the session that the
request names."""
MAX_EPOCH = 2**31 - 1

REQUESTS_WITHOUT_SESSION = 3
"""Responses after a (re)start before a session is opened."""


class SessionRequest(NamedTuple):
    """The part of a fetch request that depends on the session."""

    session_id: int
    epoch: int
    positions: list[tuple[TopicPartition, int]]
    """Partitions to list, with their positions."""
    forgotten: list[TopicPartition]


class FetchSession:
    """The session with one broker; there is none at first."""

    __slots__ = ("_answered", "_epoch", "_id", "_record_bytes", "positions")

    def __init__(self) -> None:
        self._id = NO_SESSION
        self._epoch = FINAL_EPOCH
        self._answered = 0
        self._record_bytes = 0
        self.positions: Mapping[TopicPartition, int] = {}
        """Partitions and positions of the last request."""

    @property
    def record_bytes(self) -> int | None:
        """Bytes of records in the last response; None after one of the first after a (re)start.

        An assignment that has just changed may change again, and a broker takes up the next request
        of a connection only after its response to the last.
        """
        return self._record_bytes if self._answered >= REQUESTS_WITHOUT_SESSION else None

    def request(self, wanted: Mapping[TopicPartition, int]) -> SessionRequest:
        """The request that makes the broker's side equal to `wanted`, which must not change."""
        known, self.positions = self.positions, wanted
        if self._epoch > INITIAL_EPOCH and wanted == known:
            return SessionRequest(self._id, self._epoch, [], [])
        changed = [item for item in wanted.items() if known.get(item[0]) != item[1]]
        if self._epoch <= INITIAL_EPOCH:
            # A broker fills a response in the order of the request, so that those that have just
            # got records come last. In a session it keeps that order itself.
            others = [item for item in wanted.items() if known.get(item[0]) == item[1]]
            return SessionRequest(self._id, self._epoch, others + changed, [])
        forgotten = [tp for tp in known if tp not in wanted]
        return SessionRequest(self._id, self._epoch, changed, forgotten)

    def answered(self, session_id: int, record_bytes: int) -> None:
        """The broker has answered the last request, without an error for the whole. `record_bytes`:
        bytes of the records in the response."""
        self._answered += 1
        self._record_bytes = record_bytes
        if session_id == NO_SESSION:
            opening = self._answered >= REQUESTS_WITHOUT_SESSION
            self._epoch = INITIAL_EPOCH if opening else FINAL_EPOCH
        else:
            self._epoch = 1 if self._epoch >= MAX_EPOCH else self._epoch + 1
        self._id = session_id

    def restart(self) -> None:
        """Begin anew: the broker's side is unknown, or unfit."""
        self._epoch = FINAL_EPOCH
        self._answered = 0
