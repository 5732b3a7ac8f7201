"""A broker's side of fetch sessions, in its simplest form: the model for tests of the client's.

Written after KIP-227 and the broker's own `FetchSession.scala`, with its epochs and errors.
"""

from collections.abc import Iterable
from typing import NamedTuple

from aiokafka import TopicPartition

UNKNOWN_SESSION, WRONG_EPOCH = 70, 71


class Reported(NamedTuple):
    """A partition in a response: its end, and how many records from the position on."""

    end: int
    records: int


class Answer(NamedTuple):
    error: int
    session_id: int
    partitions: dict[TopicPartition, Reported]


class _Cached:
    """A partition in a session: its position, and the end that was reported last."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.end = -1


class _Session:
    def __init__(self) -> None:
        self.epoch = 1
        self.partitions: dict[TopicPartition, _Cached] = {}


class SessionBroker:
    """Logs that consist of their ends; `room`: records in a response, filled in order."""

    def __init__(self, slots: int = 1000, room: int = 1_000_000) -> None:
        self.slots = slots
        self.room = room
        self.ends: dict[TopicPartition, int] = {}
        self.sessions: dict[int, _Session] = {}
        self._last_id = 0

    def positions(self, session_id: int) -> dict[TopicPartition, int]:
        return {tp: c.offset for tp, c in self.sessions[session_id].partitions.items()}

    def fetch(
        self,
        session_id: int,
        epoch: int,
        positions: Iterable[tuple[TopicPartition, int]],
        forgotten: Iterable[TopicPartition],
    ) -> Answer:
        if epoch <= 0:
            self.sessions.pop(session_id, None)
            return self._full(dict(positions), opening=epoch == 0)
        session = self.sessions.get(session_id)
        if session is None:
            return Answer(UNKNOWN_SESSION, 0, {})
        if session.epoch != epoch:
            return Answer(WRONG_EPOCH, 0, {})
        for tp, offset in positions:
            session.partitions.setdefault(tp, _Cached(offset)).offset = offset
        for tp in forgotten:
            session.partitions.pop(tp, None)
        session.epoch += 1
        return Answer(0, session_id, self._changed(session))

    def _full(self, positions: dict[TopicPartition, int], *, opening: bool) -> Answer:
        session = _Session()
        session.partitions = {tp: _Cached(offset) for tp, offset in positions.items()}
        found = self._changed(session)
        if not opening or len(self.sessions) >= self.slots:
            return Answer(0, 0, found)
        self._last_id += 1
        self.sessions[self._last_id] = session
        return Answer(0, self._last_id, found)

    def _changed(self, session: _Session) -> dict[TopicPartition, Reported]:
        found = {}
        left = self.room
        for tp, cached in list(session.partitions.items()):
            records = min(left, self.ends[tp] - cached.offset)
            left -= records
            if records or cached.end != self.ends[tp]:
                cached.end = self.ends[tp]
                found[tp] = Reported(cached.end, records)
            if records:  # goes to the end of the order
                session.partitions[tp] = session.partitions.pop(tp)
        return found
