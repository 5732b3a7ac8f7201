"""Why a request went where it went: its whole story, from the log alone.

Reads the lane of the request: `ledger` (decisions and runs), `requests` (what was asked, as long as
it is kept) and `responses` (what readers saw). Nothing has to be alive for it but the broker.
Decides nothing, keeps nothing, and never prints what a prompt or an answer says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from streams.clock import Clock
from streams.codecs import decode, token_count
from streams.errors import Malformed
from streams.ids import issued_ms
from streams.ports import Log, Partition
from streams.records import Assigned, Candidate, Chunk, End, Fact, Fence, Request
from streams.replies import CLOCK_MARGIN_MS
from streams.stretch import Progress, stretch
from streams.topics import LEDGER, REQUESTS, RESPONSES, lane_of
from streams.transcript import Transcript

_PRIVATE = frozenset({
    "token_ids", "text", "log_probs", "agent_context", "extra_args", "multi_modal_data",
    "prompt_embeds", "prefill_result", "handoff", "cache_salt", "mm_routing_info",
})  # fmt: skip
"""Fields that may hold what a prompt or an answer says, or are megabytes."""
_PLACE = frozenset({"id", "t"})
_ENDS = frozenset({"Finished", "Ended"})
"""On the ledger when the last chunk is in the log, not before."""


class Step(NamedTuple):
    """One thing that happened: when (broker ms), where in the log, what, and its fields."""

    at_ms: int
    source: Partition
    offset: int
    name: str
    fields: dict[str, Any]
    candidates: tuple[Candidate, ...] = ()


class Explained(NamedTuple):
    """The story of a request, in the order of the broker's clock. Empty `steps`: unknown id."""

    request_id: str
    lane: int
    steps: list[Step]
    ending: str
    """How it ended for its readers; "" while it has not, or when that is not kept any more."""


async def explain(
    log: Log,
    clock: Clock,
    request_id: str,
    progress: Progress = lambda _done, _total: None,
) -> Explained:
    """Read all that the log has of a request. An id with a time in it is found quickly.

    Raises BrokerUnavailable, PositionLost, UnknownType.
    """
    lane = lane_of(request_id, await log.partitions(LEDGER))
    sources = [Partition(topic, lane) for topic in (REQUESTS, LEDGER, RESPONSES)]
    starts, ends = {}, {}
    for topic, partition in sources:
        source = Partition(topic, partition)
        ends[source] = (await log.end_offsets(topic, [partition]))[partition]
        starts[source] = min(await _start(log, source, request_id), ends[source])
    found: dict[Partition, list[Fact]] = {source: [] for source in sources}
    key = request_id.encode()
    async for source, records, _ in stretch(log, clock, starts, ends, progress=progress):
        for record in records:
            if record.key == key:
                try:
                    fact = Fact(record.offset, record.timestamp, decode(record))
                except Malformed:
                    continue
                found[source].append(fact)
    requests, ledger, responses = (found[source] for source in sources)
    asked = [_step(Partition(REQUESTS, lane), fact) for fact in requests]
    decided = [_step(Partition(LEDGER, lane), fact) for fact in ledger]
    readers = _Readers(Partition(RESPONSES, lane))
    for fact in responses:
        readers.take(fact)
    readers.close()
    return Explained(request_id, lane, _in_order(asked, decided, readers.steps), readers.ending)


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


async def _start(log: Log, source: Partition, request_id: str) -> int:
    """Where to begin: a while before its id was drawn, or at the oldest record."""
    topic, partition = source
    oldest = (await log.start_offsets(topic, [partition]))[partition]
    drawn_ms = issued_ms(request_id)
    if drawn_ms is None:
        return oldest
    return max(oldest, await log.offset_at(topic, partition, max(0, drawn_ms - CLOCK_MARGIN_MS)))


def _step(source: Partition, fact: Fact) -> Step:
    record = fact.record
    candidates = record.candidates if isinstance(record, Assigned) else ()
    return Step(
        fact.timestamp_ms, source, fact.offset, type(record).__name__, fields_of(record), candidates
    )


def fields_of(record: Any) -> dict[str, Any]:
    """What a record says, beside its id, what is private, and fields at their default."""
    told: dict[str, Any] = {}
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if field.name in _PLACE or field.name == "candidates" or value == field.default:
            continue
        if isinstance(record, Request) and field.name == "token_ids":
            told["prompt_tokens"] = token_count(value)
        elif field.name not in _PRIVATE:
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
        self.steps.append(Step(first.timestamp_ms, self._source, first.offset, "Shown", fields))
        self._shown.clear()


def is_chosen(candidate: Candidate, assigned: dict[str, Any]) -> bool:
    """Whether this is the worker and rank that a decision was for."""
    place = (assigned.get("worker"), assigned.get("epoch"), assigned.get("rank", 0))
    return (candidate.worker, candidate.epoch, candidate.rank) == place
