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
* the first close of a run is final;
* a request that is over stays so, and only its outcome is kept.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from app.routing.burdens import NOTHING, Burden, Burdens
from app.routing.policies import Place
from app.routing.sessions import Binding, Key, Sessions
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

    def place(self, rank: int) -> Place:
        """Where it is, with the rank, which two runs do not differ in alone."""
        return Place(self.worker, self.epoch, rank)


@dataclass(slots=True)
class KnownRun:
    """State of one run. `since_ms`: append time of the record that brought it there.

    `tokens` it has to hold, `prefill_tokens` of them still to be computed when it was assigned.
    """

    state: RunState
    since_ms: int
    tokens: int = 0
    rank: int = 0
    prefill_tokens: int = 0
    lora_name: str = ""

    @property
    def burden(self) -> Burden:
        """What it adds to its worker's rank now."""
        if self.state not in OPEN:
            return NOTHING
        if self.state == "prefilled":
            return Burden(1, self.tokens)
        return Burden(1, self.tokens, self.prefill_tokens, 1, self.since_ms)


@dataclass(slots=True)
class Story:
    """What the ledger says about one request. `ended`: the code of its end, "" before."""

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
        """Whether nothing is running and nothing is owed.

        A prefill that was handed off is not an end: its decode is still to come.
        """
        if self.ended:
            return True
        states = [run.state for run in self.runs.values()]
        is_final = any(s not in OPEN and s not in FAILED and s != "handed_off" for s in states)
        return is_final and not any(s in OPEN or s in FAILED for s in states)

    def open_runs(self) -> list[RunId]:
        """The runs that a worker may still be working on."""
        return [k for k, run in self.runs.items() if run.state in OPEN]


class Outcome(NamedTuple):
    """What is kept of a request that is over: enough to recognise its id, and late runs of it."""

    code: str
    attempt: int
    last_ms: int


class LaneStories:
    """The stories of one ledger partition."""

    def __init__(self, dedup_window_ms: int) -> None:
        self.position = 0
        self.stories: dict[str, Story] = {}
        """Those that are not over, and those whose id is not known yet."""
        self.unfinished: dict[str, Story] = {}
        """The known ones of them: what obligations are looked for in."""
        self.outcomes: dict[str, Outcome] = {}
        """Of all others, in the order of their ends."""
        self._window_ms = dedup_window_ms
        self._strays: deque[tuple[int, str]] = deque()

    def story(self, request_id: str) -> Story | None:
        """What is known of a request; of one that is over, no more than its outcome says."""
        outcome = self.outcomes.get(request_id)
        if outcome is not None:
            return Story(outcome.attempt, ended=outcome.code, last_ms=outcome.last_ms)
        return self.stories.get(request_id)

    def apply(self, fact: Fact, burdens: Burdens) -> None:
        """Take in one record. What comes after the end of a request changes nothing.

        Its end is visible then, whoever wrote it, so later runs and fences are of no consequence.
        """
        record = fact.record
        if not isinstance(record, LedgerRecord):
            return
        if record.id not in self.outcomes:
            story = self.stories.get(record.id)
            if story is None:
                story = self.stories[record.id] = Story()
            story.last_ms = fact.timestamp_ms
            _fold(story, record, fact.timestamp_ms, burdens)
            self.file(record.id, story)
        self._expire(fact.timestamp_ms, burdens)

    def file(self, request_id: str, story: Story) -> None:
        """Put a story where it belongs: with the unfinished, the strays, or the outcomes."""
        if not story.known:
            self._strays.append((story.last_ms, request_id))
        elif story.over:
            code = story.ended or _last_code(story)
            self.outcomes[request_id] = Outcome(code, story.attempt, story.last_ms)
            self.unfinished.pop(request_id, None)
            del self.stories[request_id]
        else:
            self.unfinished[request_id] = story

    def _expire(self, now_ms: int, burdens: Burdens) -> None:
        """Forget what ended, or remained unknown, before the window, by the ledger's own time."""
        since_ms = now_ms - self._window_ms
        while self.outcomes:
            first = next(iter(self.outcomes))
            if self.outcomes[first].last_ms >= since_ms:
                break
            del self.outcomes[first]
        while self._strays and self._strays[0][0] < since_ms:
            at_ms, request_id = self._strays.popleft()
            story = self.stories.get(request_id)
            if story is not None and not story.known and story.last_ms <= at_ms:
                _clear_runs(story, burdens)
                del self.stories[request_id]

    def drop(self, burdens: Burdens) -> None:
        """Forget everything; the burdens of its open runs go too."""
        for story in self.stories.values():
            _clear_runs(story, burdens)


def _last_code(story: Story) -> str:
    """How the worker ended it; twins may both have, and the reader saw the first."""
    return next(
        run.state
        for run in story.runs.values()
        if run.state not in OPEN and run.state not in FAILED and run.state != "handed_off"
    )


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
        run = story.runs[run_id] = KnownRun("assigned", at_ms)
        if isinstance(record, Started):
            run.tokens = run.prefill_tokens = record.prompt_tokens
    else:
        burdens.remove(run_id.place(run.rank), run.burden, run.lora_name)
    if isinstance(record, Assigned):  # it knows better than the Started that may have overtaken it
        booked = record.policy != "direct"  # who chooses the workers keeps the books there
        run.tokens = (record.prompt_tokens + record.base_tokens) * booked
        run.rank, run.prefill_tokens = record.rank, record.prefill_tokens
        run.lora_name = record.lora_name
    state = _next_state(run.state, record)
    if state != run.state:
        run.state, run.since_ms = state, at_ms
    burdens.add(run_id.place(run.rank), run.burden, run.lora_name)
    if run.state == "prefilled":
        burdens.prefilled(run_id.place(run.rank), run.since_ms)


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
        burdens.remove(run_id.place(run.rank), run.burden, run.lora_name)
    story.runs.clear()


class _Told(msgspec.Struct):
    """A story as it stands in a snapshot."""

    id: str
    attempt: int
    runs: list[tuple[int, Phase, str, int, RunState, int, int, int, int, str]]
    ended: str
    origin: Origin | None
    responses_from: int
    deadline_ms: int
    failures: int
    fulls: int
    failed_workers: list[str]
    last_ms: int


class _Lane(msgspec.Struct):
    """A lane as it stands in a snapshot."""

    stories: list[_Told]
    outcomes: list[tuple[str, str, int, int]]
    sessions: list[tuple[Key, Binding]] = []


class Load:
    """All lanes together; a `Fold` (streams/follow.py) over the ledger's partitions."""

    name = "load"

    def __init__(self, dedup_window_ms: int) -> None:
        self._window_ms = dedup_window_ms
        self._lanes: dict[int, LaneStories] = {}
        self.burdens = Burdens()
        self.sessions = Sessions(dedup_window_ms)
        self.known_ms = 0
        """Append time of the youngest record that was taken in; 0 before the first."""

    def lane(self, number: int) -> LaneStories:
        """The lane of a ledger partition; empty at position 0 before anything was read."""
        return self._lanes.get(number) or LaneStories(self._window_ms)

    def story(self, lane: int, request_id: str) -> Story | None:
        """What is known of a request."""
        return self.lane(lane).story(request_id)

    def apply(self, source: Partition, facts: Sequence[Fact], position: int) -> None:
        """Take in records of one ledger partition; `position` is the next offset after them."""
        lane = self._lanes.setdefault(source.partition, self.lane(source.partition))
        for fact in facts:
            lane.apply(fact, self.burdens)
            if isinstance(fact.record, Assigned):
                self.sessions.apply(source.partition, fact.record, fact.timestamp_ms)
        if facts:
            self.known_ms = max(self.known_ms, facts[-1].timestamp_ms)
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
        self.sessions.forget(source.partition)

    def snapshot(self, source: Partition) -> bytes:
        """The partition's stories as bytes; equal stories give equal bytes."""
        lane = self.lane(source.partition)
        outcomes = [(request_id, *outcome) for request_id, outcome in lane.outcomes.items()]
        sessions = self.sessions.told(source.partition)
        return msgspec.msgpack.encode(_Lane(list(_tell(lane)), outcomes, sessions))

    def restore(self, source: Partition, data: bytes, position: int) -> None:
        """The inverse of `snapshot`, at a position. Raises msgspec.DecodeError on other bytes."""
        told = msgspec.msgpack.decode(data, type=_Lane)
        self.forget(source)
        lane = self._lanes[source.partition] = LaneStories(self._window_ms)
        for t in sorted(told.stories, key=lambda t: t.last_ms):
            story = Story(
                t.attempt, {}, t.ended, t.origin, t.responses_from, t.deadline_ms,
                t.failures, t.fulls, set(t.failed_workers), t.last_ms,
            )  # fmt: skip
            for told_run in t.runs:
                run_id = RunId(*told_run[:4])
                run = story.runs[run_id] = KnownRun(*told_run[4:])
                self.burdens.add(run_id.place(run.rank), run.burden, run.lora_name)
                if run.state == "prefilled":
                    self.burdens.prefilled(run_id.place(run.rank), run.since_ms)
            lane.stories[t.id] = story
            lane.file(t.id, story)
        lane.outcomes = {i: Outcome(code, n, at_ms) for i, code, n, at_ms in told.outcomes}
        self.sessions.restore(source.partition, told.sessions)
        lane.position = position

    def state_hash(self, source: Partition) -> str:
        """BLAKE2b of the stories, in hex: equal for replicas at equal positions."""
        return hashlib.blake2b(self.snapshot(source), digest_size=16).hexdigest()


def _tell(lane: LaneStories) -> Iterator[_Told]:
    for request_id in sorted(lane.stories):
        s = lane.stories[request_id]
        runs = [
            (
                *run_id,
                run.state,
                run.since_ms,
                run.tokens,
                run.rank,
                run.prefill_tokens,
                run.lora_name,
            )
            for run_id, run in sorted(s.runs.items())
        ]
        yield _Told(
            request_id, s.attempt, runs, s.ended, s.origin, s.responses_from, s.deadline_ms,
            s.failures, s.fulls, sorted(s.failed_workers), s.last_ms,
        )  # fmt: skip
