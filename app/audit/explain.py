"""Why a request went where it went: its whole story, from the log alone.

Reads the lane of the request: `ledger` (decisions and runs), `requests` (what was asked, as long as
it is kept) and `responses` (what readers saw). Nothing has to be alive for it but the broker.
Decides nothing, keeps nothing, and never prints what a prompt or an answer says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from app.audit.moments import LONGEST_MS
from app.audit.reasons import Reasons, reasons
from streams.clock import Clock
from streams.codecs import decode
from streams.errors import Malformed
from streams.ids import issued_ms
from streams.ports import Log, Partition, Record
from streams.records import (
    Assigned,
    Chunk,
    End,
    Ended,
    Fact,
    Fence,
    Finished,
    PrefillDone,
    Request,
    RunKey,
)
from streams.replies import CLOCK_MARGIN_MS
from streams.stretch import Progress, stretch
from streams.topics import BY_NAME, LEDGER, REQUESTS, RESPONSES, lane_of
from streams.transcript import Transcript

_PRIVATE = frozenset({
    "token_ids", "text", "log_probs", "agent_context", "extra_args", "multi_modal_data",
    "prompt_embeds", "prefill_result", "handoff", "cache_salt", "mm_routing_info", "body", "data",
})  # fmt: skip
"""Fields that may hold what a prompt or an answer says, or are megabytes."""
_PLACE = frozenset({"id", "t"})
_ENDS = frozenset({"Finished", "Ended"})
"""On the ledger when the last chunk is in the log, not before."""


class Actual(NamedTuple):
    """What became of a run, by its engine; None where nothing was said. Times in ms."""

    cached_tokens: int | None = None
    ttft_ms: float | None = None
    code: str | None = None


class Decision(NamedTuple):
    """A decision: the record, why it fell so (None without inputs), and what became of it."""

    record: Assigned
    reasons: Reasons | None
    actual: Actual


class Step(NamedTuple):
    """One thing that happened: when (broker ms), where in the log, what, and its fields."""

    at_ms: int
    source: Partition
    offset: int
    name: str
    fields: dict[str, Any]
    decision: Decision | None = None


class Explained(NamedTuple):
    """The story of a request, in the order of the broker's clock. Empty `steps`: unknown id.

    `ending`: how it ended for its readers; "" while it has not, or when that is not kept any more.
    `drawn_ms`: when its id was drawn, if it says so; `is_deleted`: that is longer ago than the
    ledger is kept.
    """

    request_id: str
    lane: int
    steps: list[Step]
    ending: str
    drawn_ms: int | None = None
    is_deleted: bool = False


async def explain(
    log: Log,
    clock: Clock,
    request_id: str,
    progress: Progress = lambda _done, _total: None,
) -> Explained:
    """Read all that the log has of a request.

    An id with a time in it is found quickly: first what was written in the longest time that a
    request may take is read, and more only if it was not over then, as after a wait in `prompts`.

    Raises BrokerUnavailable, PositionLost, UnknownType.
    """
    lane = lane_of(request_id, await log.partitions(LEDGER))
    found: dict[str, list[Fact]] = {topic: [] for topic in (REQUESTS, LEDGER, RESPONSES)}
    drawn_ms = issued_ms(request_id)
    starts, bounds, ends = await _stretches(log, lane, drawn_ms)
    for first, last in ((starts, bounds), (bounds, ends)):
        async for source, records, _ in stretch(log, clock, first, last, progress=progress):
            found[source.topic] += _of(request_id, records)
        if found[LEDGER] and _is_last(found[LEDGER][-1].record):
            break
    asked, ledger = (found[topic] for topic in (REQUESTS, LEDGER))
    readers = _Readers(Partition(RESPONSES, lane))
    for fact in found[RESPONSES]:
        readers.take(fact)
    readers.close()
    steps = _in_order(
        [_step(Partition(REQUESTS, lane), fact) for fact in asked],
        _decided(Partition(LEDGER, lane), ledger, asked),
        readers.steps,
    )
    kept_ms = BY_NAME[LEDGER].retention_ms or 0
    is_deleted = drawn_ms is not None and drawn_ms < clock.wall_ms() - kept_ms
    return Explained(request_id, lane, steps, readers.ending, drawn_ms, is_deleted)


def _is_last(record: Any) -> bool:
    """Whether nothing is to follow a record of the ledger, but for a late word of another run."""
    return isinstance(record, Ended) or (
        isinstance(record, Finished) and record.code in ("stop", "length", "cancelled")
    )


def _of(request_id: str, records: Sequence[Record]) -> Iterator[Fact]:
    key = request_id.encode()
    for record in records:
        if record.key == key:
            with suppress(Malformed):
                yield Fact(record.offset, record.timestamp, decode(record))


def _decided(source: Partition, ledger: Sequence[Fact], asked: Sequence[Fact]) -> list[Step]:
    """The steps of the ledger; decisions with their reasons and what became of them."""
    requests = [fact.record for fact in asked if isinstance(fact.record, Request)]
    session = None
    if requests:
        control = requests[0].hints.session_control
        session = control.session_id if control else ""
    actual: dict[tuple[RunKey, str], Actual] = {}
    for record in [fact.record for fact in ledger]:
        if isinstance(record, PrefillDone | Finished):
            run = (RunKey(record.id, record.attempt, record.phase), record.worker)
            told = actual.get(run, Actual())
            if record.ttft_ms:
                told = told._replace(cached_tokens=record.cached_tokens, ttft_ms=record.ttft_ms)
            code = record.code if isinstance(record, Finished) else told.code
            actual[run] = told._replace(code=code)
    steps = []
    for fact in ledger:
        step, record = _step(source, fact), fact.record
        if isinstance(record, Assigned):
            run = (RunKey(record.id, record.attempt, record.phase), record.worker)
            decision = Decision(record, reasons(record, session), actual.get(run, Actual()))
            step = step._replace(decision=decision)
        steps.append(step)
    return steps


def _in_order(*topics: list[Step]) -> list[Step]:
    """The steps of all topics by the broker's clock, those of each one as they stand in the log.

    Of the same millisecond: what was asked, decided, shown, and that it was over, as it is done.
    """
    ranked = []
    for number, steps in enumerate(topics):
        latest = (0, 0)
        for step in steps:
            rank = len(topics) if step.name in _ENDS else number
            latest = max(latest, (step.at_ms, rank))
            ranked.append((latest, step))
    return [step for _, step in sorted(ranked, key=lambda each: each[0])]


async def _stretches(log: Log, lane: int, drawn_ms: int | None) -> tuple[dict[Partition, int], ...]:
    """Where to begin, where most requests are over, and the end, of the lane's three topics.

    To begin is a while before the id was drawn, or at the oldest record.
    """
    starts, bounds, ends = {}, {}, {}
    for topic in (REQUESTS, LEDGER, RESPONSES):
        source = Partition(topic, lane)
        start = (await log.start_offsets(topic, [lane]))[lane]
        bound = ends[source] = (await log.end_offsets(topic, [lane]))[lane]
        if drawn_ms is not None:
            since_ms, until_ms = drawn_ms - CLOCK_MARGIN_MS, drawn_ms + LONGEST_MS + CLOCK_MARGIN_MS
            start = max(start, await log.offset_at(topic, lane, max(0, since_ms)))
            bound = min(bound, await log.offset_at(topic, lane, max(0, until_ms)))
        starts[source] = min(start, ends[source])
        bounds[source] = max(bound, starts[source])
    return starts, bounds, ends


def _step(source: Partition, fact: Fact) -> Step:
    record = fact.record
    return Step(fact.timestamp_ms, source, fact.offset, type(record).__name__, fields_of(record))


def fields_of(record: Any) -> dict[str, Any]:
    """What a record says, beside its id, what is private, and fields at their default."""
    told: dict[str, Any] = {}
    if isinstance(record, Request):
        told["prompt_tokens"] = record.prompt_tokens
        if record.body is not None:
            told["kind"] = record.kind
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if field.name in _PLACE or field.name == "candidates" or value == field.default:
            continue
        if field.name == "message" and isinstance(record, Finished) and record.code == "error":
            continue  # its engine may quote the prompt
        if field.name not in _PRIVATE:
            told[field.name] = _plain(value)
    return {name: value for name, value in told.items() if value not in ({}, [], ())}


def _plain(value: Any) -> Any:
    """A value without what is at its default, and without what is private."""
    if isinstance(value, msgspec.Struct):
        return fields_of(value)
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


class _Readers:
    """What readers saw: one step for each run that was shown, and how it ended."""

    def __init__(self, source: Partition) -> None:
        self.steps: list[Step] = []
        self.ending = ""
        self._source = source
        self._transcript = Transcript(keep=False)
        self._shown: list[tuple[Fact, Chunk]] = []
        """The pieces of the present run."""

    def take(self, fact: Fact) -> None:
        """The next record of the request on `responses`."""
        record = fact.record
        if not isinstance(record, Chunk | Fence | End):
            return
        if not isinstance(record, Chunk):
            self.close()
            self.steps.append(_step(self._source, fact))
        piece = self._transcript.feed(record)
        if isinstance(piece, Chunk):
            self._shown.append((fact, piece))
            self.ending = piece.finish_reason or ""
        elif isinstance(piece, End):
            self.ending = f"{piece.code} {piece.message}".strip()

    def close(self) -> None:
        """The present run shows nothing more."""
        if not self._shown:
            return
        (first, piece), (last, _) = self._shown[0], self._shown[-1]
        fields = {
            "attempt": piece.attempt,
            "run": piece.run,
            "tokens": sum(len(chunk.token_ids) for _, chunk in self._shown),
            "from_token": piece.index,
            "over_ms": last.timestamp_ms - first.timestamp_ms,
        }
        if not fields["tokens"]:  # its engine gives text only
            fields["chars"] = sum(len(chunk.text) for _, chunk in self._shown)
        self.steps.append(Step(first.timestamp_ms, self._source, first.offset, "Shown", fields))
        self._shown.clear()
