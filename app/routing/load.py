"""Load: the fold of the ledger. Which runs of which requests are open, and what became of the rest.

One `LaneStories` per ledger partition, made of that partition's records alone: no clock, no input
of this process. Two replicas at the same position hold the same lane (`state_hash`). What has to be
done about a story is not decided here but in `obligations.py`; what this router has decided and not
yet read back is not in here either.

The rules of the fold, per request id:

* the attempt is the highest one in any Assigned, Started or Fencing;
* a higher attempt, or Ended, closes every run below it, and nothing below opens afterwards;
* a Started without Assigned counts as assigned (the router may have died between its two sends);
* of several `responses_from` the lowest is kept: scanning too much is only slower;
* the first close of a run is final.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from streams.ports import Partition
from streams.records import (
    Assigned,
    Ended,
    Fact,
    Fencing,
    Finished,
    Origin,
    Phase,
    PrefillDone,
    Started,
)

LedgerRecord = Assigned | Started | PrefillDone | Finished | Fencing | Ended

RunState = Literal[
    "assigned", "started", "prefilled",
    "stop", "length", "cancelled", "error", "handed_off",
    "broken", "worker_full", "expired", "retryable",
]  # fmt: skip
OPEN: frozenset[RunState] = frozenset({"assigned", "started", "prefilled"})
FAILED: frozenset[RunState] = frozenset({"broken", "worker_full", "retryable", "expired"})
"""Closed without a last Chunk: the reader still waits, so the owner owes the request something."""

UNCOUNTED = frozenset({"worker_full", "not_started"})
"""Reasons of a new attempt that are not the request's fault and do not use up its attempts."""


class RunId(NamedTuple):
    """One execution as the ledger tells it: twins of a run key differ in worker or epoch."""

    attempt: int
    phase: Phase
    worker: str
    epoch: int


@dataclass(slots=True)
class KnownRun:
    """State of one run. `since_ms`: append time of the record that brought it there."""

    state: RunState
    since_ms: int
    tokens: int = 0


@dataclass(slots=True)
class Story:
    """What the ledger says about one request."""

    attempt: int = 0
    runs: dict[RunId, KnownRun] = field(default_factory=dict)
    ended: str = ""
    origin: Origin | None = None
    responses_from: int = 0
    deadline_ms: int = 0
    failures: int = 0
    fulls: int = 0
    failed_workers: set[str] = field(default_factory=set)
    last_ms: int = 0

    @property
    def known(self) -> bool:
        """Whether the id is taken: a Request that comes again is recognised by this alone."""
        return self.origin is not None or bool(self.ended)

    @property
    def over(self) -> bool:
        """Whether nothing is running and nothing is owed."""
        if self.ended:
            return True
        states = [run.state for run in self.runs.values()]
        return bool(states) and not any(s in OPEN or s in FAILED for s in states)

    def open_runs(self) -> list[RunId]:
        """The runs that a worker may still be working on."""
        return [k for k, run in self.runs.items() if run.state in OPEN]


class Burden(NamedTuple):
    """What the open runs of a worker's epoch add up to."""

    runs: int = 0
    tokens: int = 0


class LaneStories:
    """The stories of one ledger partition."""

    def __init__(self, dedup_window_ms: int) -> None:
        self.position = 0
        self.stories: dict[str, Story] = {}
        self.unfinished: dict[str, Story] = {}
        """The stories that are not over: what obligations are looked for in."""
        self._window_ms = dedup_window_ms
        self._outcomes: deque[tuple[int, str]] = deque()

    def apply(self, fact: Fact, burdens: Burdens) -> None:
        """Take in one record."""
        record = fact.record
        if not isinstance(record, LedgerRecord):
            return
        story = self.stories.get(record.id)
        if story is None:
            story = self.stories[record.id] = Story()
        story.last_ms = fact.timestamp_ms
        _fold(story, record, fact.timestamp_ms, burdens)
        self.file(record.id, story)
        self._expire(fact.timestamp_ms)

    def file(self, request_id: str, story: Story) -> None:
        """Put a story where it belongs: with the unfinished ones, or with those to be forgotten."""
        if story.over or not story.known:
            self.unfinished.pop(request_id, None)
            self._outcomes.append((story.last_ms, request_id))
        else:
            self.unfinished[request_id] = story

    def _expire(self, now_ms: int) -> None:
        """Forget outcomes older than the window, by the ledger's own time."""
        while self._outcomes and self._outcomes[0][0] < now_ms - self._window_ms:
            at_ms, request_id = self._outcomes.popleft()
            story = self.stories.get(request_id)
            if story is not None and story.last_ms <= at_ms and request_id not in self.unfinished:
                del self.stories[request_id]

    def drop(self, burdens: Burdens) -> None:
        """Forget everything; the burdens of its open runs go too."""
        for story in self.stories.values():
            _clear_runs(story, burdens)


class Burdens:
    """Open runs and their tokens by (worker, epoch), kept up to date run by run."""

    def __init__(self) -> None:
        self._by_epoch: dict[tuple[str, int], Burden] = {}

    def of(self, worker: str, epoch: int) -> Burden:
        """What lies on one epoch of a worker."""
        return self._by_epoch.get((worker, epoch), Burden())

    def add(self, run: RunId, tokens: int, sign: Literal[1, -1]) -> None:
        """Count a run in or out."""
        key = (run.worker, run.epoch)
        old = self._by_epoch.get(key, Burden())
        new = Burden(old.runs + sign, old.tokens + sign * tokens)
        if new.runs:
            self._by_epoch[key] = new
        else:
            self._by_epoch.pop(key, None)


def _fold(
    story: Story,
    record: LedgerRecord,
    at_ms: int,
    burdens: Burdens,
) -> None:
    if isinstance(record, Ended):
        story.ended = story.ended or record.code
        _clear_runs(story, burdens)
        return
    if isinstance(record, Assigned | Started):
        lowest = record.responses_from
        if story.origin is not None:
            lowest = min(lowest, story.responses_from)
        story.origin, story.responses_from = record.origin, lowest
        story.deadline_ms = record.deadline_ms
    if story.ended:
        return
    if record.attempt > story.attempt and isinstance(record, Assigned | Started | Fencing):
        _begin_attempt(story, record, burdens)
    if isinstance(record, Fencing) or record.attempt < story.attempt:
        return
    _fold_run(story, record, at_ms, burdens)


def _begin_attempt(story: Story, record: Assigned | Started | Fencing, burdens: Burdens) -> None:
    story.attempt = record.attempt
    if isinstance(record, Fencing):
        if record.reason in UNCOUNTED:
            story.fulls += 1
        else:
            story.failures += 1
            story.failed_workers.update(
                run_id.worker for run_id, run in story.runs.items() if run.state != "worker_full"
            )
    _clear_runs(story, burdens)


def _fold_run(
    story: Story, record: Assigned | Started | PrefillDone | Finished, at_ms: int, burdens: Burdens
) -> None:
    run_id = RunId(record.attempt, record.phase, record.worker, record.epoch)
    run = story.runs.get(run_id)
    if run is None:
        tokens = record.prompt_tokens if isinstance(record, Assigned | Started) else 0
        run = story.runs[run_id] = KnownRun("assigned", at_ms, tokens)
        burdens.add(run_id, tokens, 1)
        if isinstance(record, Assigned):
            return
    state = _next_state(run.state, record)
    if state == run.state:
        return
    if run.state in OPEN and state not in OPEN:
        burdens.add(run_id, run.tokens, -1)
    run.state, run.since_ms = state, at_ms


def _next_state(state: RunState, record: Assigned | Started | PrefillDone | Finished) -> RunState:
    if state not in OPEN or isinstance(record, Assigned):
        return state
    if isinstance(record, Started):
        return "started" if state == "assigned" else state
    if isinstance(record, PrefillDone):
        return "handed_off" if record.phase == "prefill" else "prefilled"
    return "retryable" if record.code == "error" and record.retryable else record.code


def _clear_runs(story: Story, burdens: Burdens) -> None:
    for run_id, run in story.runs.items():
        if run.state in OPEN:
            burdens.add(run_id, run.tokens, -1)
    story.runs.clear()


class _Told(msgspec.Struct):
    """A story as it stands in a snapshot."""

    id: str
    attempt: int
    runs: list[tuple[int, Phase, str, int, RunState, int, int]]
    ended: str
    origin: Origin | None
    responses_from: int
    deadline_ms: int
    failures: int
    fulls: int
    failed_workers: list[str]
    last_ms: int


class Load:
    """All lanes together; a `Fold` (streams/follow.py) over the ledger's partitions."""

    name = "load"

    def __init__(self, dedup_window_ms: int) -> None:
        self._window_ms = dedup_window_ms
        self._lanes: dict[int, LaneStories] = {}
        self.burdens = Burdens()

    def lane(self, number: int) -> LaneStories:
        """The lane of a ledger partition; empty at position 0 before anything was read."""
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = LaneStories(self._window_ms)
        return lane

    def story(self, lane: int, request_id: str) -> Story | None:
        """What is known of a request."""
        return self.lane(lane).stories.get(request_id)

    def apply(self, source: Partition, facts: Sequence[Fact], position: int) -> None:
        """Take in records of one ledger partition; `position` is the next offset after them."""
        lane = self.lane(source.partition)
        for fact in facts:
            lane.apply(fact, self.burdens)
        lane.position = position

    def position(self, source: Partition) -> int | None:
        """Next offset to read of a ledger partition; None before the first."""
        lane = self._lanes.get(source.partition)
        return None if lane is None else lane.position

    def forget(self, source: Partition) -> None:
        """Drop one partition's stories."""
        lane = self._lanes.pop(source.partition, None)
        if lane is not None:
            lane.drop(self.burdens)

    def snapshot(self, source: Partition) -> bytes:
        """The partition's stories as bytes; equal stories give equal bytes."""
        return msgspec.msgpack.encode(list(_tell(self.lane(source.partition))))

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`, at a position. Raises msgspec.DecodeError on other bytes."""
        told = msgspec.msgpack.decode(data, type=list[_Told])
        self.forget(source)
        lane = self.lane(source.partition)
        for t in sorted(told, key=lambda t: t.last_ms):
            story = Story(
                t.attempt, {}, t.ended, t.origin, t.responses_from, t.deadline_ms,
                t.failures, t.fulls, set(t.failed_workers), t.last_ms,
            )  # fmt: skip
            for attempt, phase, worker, epoch, state, since_ms, tokens in t.runs:
                run_id = RunId(attempt, phase, worker, epoch)
                story.runs[run_id] = KnownRun(state, since_ms, tokens)
                if state in OPEN:
                    self.burdens.add(run_id, tokens, 1)
            lane.stories[t.id] = story
            lane.file(t.id, story)
        lane.position = position

    def state_hash(self, source: Partition) -> str:
        """BLAKE2b of the stories, in hex: equal for replicas at equal positions."""
        return hashlib.blake2b(self.snapshot(source), digest_size=16).hexdigest()


def _tell(lane: LaneStories) -> Iterator[_Told]:
    for request_id in sorted(lane.stories):
        s = lane.stories[request_id]
        runs = [
            (*run_id, run.state, run.since_ms, run.tokens) for run_id, run in sorted(s.runs.items())
        ]
        yield _Told(
            request_id, s.attempt, runs, s.ended, s.origin, s.responses_from, s.deadline_ms,
            s.failures, s.fulls, sorted(s.failed_workers), s.last_ms,
        )  # fmt: skip
