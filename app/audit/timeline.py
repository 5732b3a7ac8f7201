"""Timeline of a request, with the reasons of its routing decisions, from the log alone.

Reads the lane of the request: `ledger`, `requests` (while retained) and `responses`; of an id that
no router has read, also `prompts` and `batch`. Never prints the text of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvlane.app.audit.cost_terms import DecisionReasons, reasons_for
from kvlane.app.audit.time_range import MAX_LIFETIME_MS
from kvlane.app.audit.unknown_ids import find_prompt
from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.clock import Clock
from kvlane.streams.ids import issued_ms
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.reading.range_reader import Progress, read_range
from kvlane.streams.records import (
    Assigned,
    Cancel,
    Chunk,
    End,
    Ended,
    Finished,
    LogRecord,
    PrefillDone,
    RunKey,
)
from kvlane.streams.request import Request, ResultOptions
from kvlane.streams.responses.reply_reader import CLOCK_MARGIN_MS
from kvlane.streams.responses.transcript import VISIBLE, Transcript
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS, RESPONSES, lane_of

_PRIVATE = frozenset({
    "token_ids", "text", "log_probs", "agent_context", "extra_args", "multi_modal_data",
    "prompt_embeds", "prefill_result", "handoff", "cache_salt", "mm_routing_info", "body", "data",
    "shown",
})  # fmt: skip
"""Fields that may hold text of a prompt or an answer, or megabytes."""
_SHOWN_TEXTS = frozenset({
    "model", "alias", "tenant", "service_class", "kind", "mdc_sum", "traceparent", "trace_id",
    "span_id", "backend_instance_id", "allowed_worker_ids", "prefill_worker_id", "decode_worker_id",
    "lora_name", "required_taints", "preferred_taints", "session_id", "action", "queue_class",
    "batch_id", "custom_id", "topic", "tools", "reasoning", "bootstrap_host",
})  # fmt: skip
"""Texts and lists of a `Request` that are shown; others may quote its prompt, such as `echo`."""
PROMPT_STEP = "Prompt"
"""The name of the step of a prompt in `prompts` or `batch`, which is not decoded."""
_ELSEWHERE = frozenset({"id", "t", "listed", "candidate_rows", "choice", "prefix_marks"})
"""Fields that are shown apart from the others, or not for people."""
_ENDS = frozenset({"Finished", "Ended"})
"""Ledger records that are written after the last chunk."""


class RunOutcome(NamedTuple):
    """Outcome of a run by its engine; None for missing figures. Times in ms."""

    cached_tokens: int | None = None
    ttft_ms: float | None = None
    code: str | None = None
    itl_ms: float | None = None


class ExplainedDecision(NamedTuple):
    """A decision: the record, its reasons (None without inputs), and the outcome of its run."""

    record: Assigned
    reasons: DecisionReasons | None
    actual: RunOutcome
    cordoned: tuple[str, ...] = ()
    """Workers of the same model that were no candidates, by an operator's order."""


class TimelineStep(NamedTuple):
    """One event: broker time in ms, position in the log, name and fields."""

    at_ms: int
    source: Partition
    offset: int
    name: str
    fields: dict[str, Any]
    decision: ExplainedDecision | None = None


class RequestTimeline(NamedTuple):
    """The timeline of a request, by the broker's clock. Empty `steps`: unknown id.

    `ending`: of its stream; "" while open or no longer retained. `now_ms`: of reading, by this
    machine.
    """

    request_id: str
    lane: int
    steps: list[TimelineStep]
    ending: str
    now_ms: int = 0


async def explain_request(
    log: Log, clock: Clock, request_id: str, progress: Progress = lambda _done, _total: None
) -> RequestTimeline:
    """Read all records of a request: first those within its maximum lifetime, by the time in its
    id.

    The rest only if it was not finished then. Raises BrokerUnavailable, PositionLost, NewerRecord.
    """
    lane = lane_of(request_id, await log.partitions(LEDGER))
    key, decoding = request_id.encode(), RecordDecoder(log, clock)
    found: dict[str, list[LogRecord]] = {topic: [] for topic in (REQUESTS, LEDGER, RESPONSES)}
    drawn_ms = issued_ms(request_id)
    starts, bounds, ends = await _stretches(log, lane, drawn_ms)
    for first, last in ((starts, bounds), (bounds, ends)):
        reading = read_range(log, clock, first, last, progress=progress, keys={key})
        async for source, records, _ in reading:
            found[source.topic] += await decoding.decode_records(source, records)
        if found[LEDGER] and _is_last(found[LEDGER][-1].record):
            break
    requests, ledger = (found[topic] for topic in (REQUESTS, LEDGER))
    readers = _Readers(Partition(RESPONSES, lane))
    for log_record in found[RESPONSES]:
        readers.take(log_record)
    readers.close()
    cordoned = await _cordoned(log, clock, [r for r in ledger if isinstance(r.record, Assigned)])
    is_unread = not ledger and all(isinstance(r.record, Cancel) for r in requests)
    steps = _in_order(
        await _prompt_steps(log, clock, request_id, progress) if is_unread else [],
        [_step(Partition(REQUESTS, lane), r) for r in requests],
        _decided(Partition(LEDGER, lane), ledger, requests, cordoned),
        readers.steps,
    )
    return RequestTimeline(request_id, lane, steps, readers.ending, clock.wall_ms())


def timeline_json(timeline: RequestTimeline, wait: str) -> dict[str, Any]:
    """The object of `kvlane explain --json`. `wait`: why the request waits, "" if it does not."""
    return {
        "id": timeline.request_id,
        "lane": timeline.lane,
        "ending": timeline.ending,
        "wait": wait,
        "steps": [
            {
                "at_ms": step.at_ms, "topic": step.source.topic,
                "partition": step.source.partition, "offset": step.offset, "name": step.name,
                "fields": step.fields,
            }
            | (
                {}
                if (decision := step.decision) is None
                else {
                    "reasons": decision.reasons, "actual": decision.actual._asdict(),
                    "cordoned": decision.cordoned,
                }
            )
            for step in timeline.steps
        ],
    }  # fmt: skip


async def _prompt_steps(
    log: Log, clock: Clock, request_id: str, progress: Progress
) -> list[TimelineStep]:
    """A step for the prompt in `prompts` or `batch`, if it is there."""
    found = await find_prompt(log, clock, request_id, progress)
    if found is None:
        return []
    source, record = found
    size = {"bytes": len(record.value or b"")}
    return [TimelineStep(record.timestamp, source, record.offset, PROMPT_STEP, size)]


def _is_last(record: Any) -> bool:
    """Whether a ledger record is the last of its request, but for late records of another run."""
    return isinstance(record, Ended) or (
        isinstance(record, Finished) and record.code in ("stop", "length", "cancelled")
    )


async def _cordoned(
    log: Log, clock: Clock, decisions: Sequence[LogRecord]
) -> dict[int, tuple[str, ...]]:
    """By offset of a decision, the workers of its model that were cordoned then."""
    if not decisions:
        return {}
    source, decoding, fleet = Partition(REGISTRY, 0), RecordDecoder(log, clock), Fleet()
    starts = {source: (await log.start_offsets(REGISTRY, [0]))[0]}
    ends = {source: (await log.end_offsets(REGISTRY, [0]))[0]}
    known: list[LogRecord] = []
    async for _, records, _ in read_range(log, clock, starts, ends):
        known += await decoding.decode_records(source, records)
    found: dict[int, tuple[str, ...]] = {}
    for each in decisions:
        assert isinstance(each.record, Assigned)
        count = sum(1 for record in known if record.timestamp_ms <= each.timestamp_ms)
        fleet.apply(source, known[:count], 0)
        del known[:count]
        models = {name: member.card.model for name, member in fleet.members.items()}
        model = models.get(each.record.worker)
        found[each.offset] = tuple(w for w in sorted(fleet.cordons) if models.get(w) == model)
    return found


def _decided(
    source: Partition,
    ledger: Sequence[LogRecord],
    received: Sequence[LogRecord],
    cordoned: Mapping[int, tuple[str, ...]],
) -> list[TimelineStep]:
    """The steps of the ledger; decisions with their reasons and outcomes."""
    requests = [r.record for r in received if isinstance(r.record, Request)]
    session = None
    if requests:
        control = requests[0].hints.session_control
        session = control.session_id if control else ""
    actual: dict[tuple[RunKey, str], RunOutcome] = {}
    for record in [r.record for r in ledger]:
        if isinstance(record, PrefillDone | Finished):
            run = (record.run_key, record.worker)
            outcome = actual.get(run, RunOutcome())
            if record.ttft_ms:
                outcome = outcome._replace(
                    cached_tokens=record.cached_tokens, ttft_ms=record.ttft_ms
                )
            if isinstance(record, Finished):
                outcome = outcome._replace(code=record.code, itl_ms=record.itl_ms or None)
            actual[run] = outcome
    steps = []
    for log_record in ledger:
        step, record = _step(source, log_record), log_record.record
        if isinstance(record, Assigned):
            run = (record.run_key, record.worker)
            decision = ExplainedDecision(
                record, reasons_for(record, session), actual.get(run, RunOutcome()),
                cordoned.get(log_record.offset, ()),
            )  # fmt: skip
            step = step._replace(decision=decision)
        steps.append(step)
    return steps


def _in_order(*topics: list[TimelineStep]) -> list[TimelineStep]:
    """Merge the steps of all topics by the broker's clock, each topic in log order. Within a
    millisecond: requests, decisions, chunks, ends."""
    ranked = []
    for number, steps in enumerate(topics):
        latest = (0, 0)
        for step in steps:
            rank = len(topics) if step.name in _ENDS else number
            latest = max(latest, (step.at_ms, rank))
            ranked.append((latest, step))
    return [step for _, step in sorted(ranked, key=lambda each: each[0])]


async def _stretches(log: Log, lane: int, drawn_ms: int | None) -> tuple[dict[Partition, int], ...]:
    """Start offsets, offsets by which most requests are finished, and end offsets of the lane. The
    start is shortly before the time in the id, or the oldest record."""
    starts, bounds, ends = {}, {}, {}
    for topic in (REQUESTS, LEDGER, RESPONSES):
        source = Partition(topic, lane)
        start = (await log.start_offsets(topic, [lane]))[lane]
        bound = ends[source] = (await log.end_offsets(topic, [lane]))[lane]
        if drawn_ms is not None:
            since_ms, until_ms = (
                drawn_ms - CLOCK_MARGIN_MS,
                drawn_ms + MAX_LIFETIME_MS + CLOCK_MARGIN_MS,
            )
            start = max(start, await log.offset_at(topic, lane, max(0, since_ms)))
            bound = min(bound, await log.offset_at(topic, lane, max(0, until_ms)))
        starts[source] = min(start, ends[source])
        bounds[source] = max(bound, starts[source])
    return starts, bounds, ends


def _step(source: Partition, log_record: LogRecord) -> TimelineStep:
    record = log_record.record
    return TimelineStep(
        log_record.timestamp_ms, source, log_record.offset, type(record).__name__, fields_of(record)
    )


def fields_of(record: Any, *, of_request: bool = False) -> dict[str, Any]:
    """Fields of a record without its id, private fields, and fields at their default. Of a
    `Request` and its parts (`of_request`): numbers, and the texts that are listed."""
    fields: dict[str, Any] = {}
    of_request = of_request or isinstance(record, Request | ResultOptions)
    if isinstance(record, Request):
        fields["prompt_tokens"] = record.prompt_tokens
        if record.body is not None:
            fields["kind"] = record.kind
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if field.name in _ELSEWHERE or value == field.default:
            continue
        if field.name == "message" and isinstance(record, Finished) and record.code == "error":
            continue  # its engine may quote the prompt
        is_hidden = of_request and not (
            isinstance(value, int | float | msgspec.Struct) or field.name in _SHOWN_TEXTS
        )
        if field.name not in _PRIVATE and not is_hidden:
            fields[field.name] = _plain(value, of_request=of_request)
    return {name: value for name, value in fields.items() if value not in ({}, [], ())}


def _plain(value: Any, *, of_request: bool) -> Any:
    """A value without private fields and fields at their default."""
    if isinstance(value, msgspec.Struct):
        return fields_of(value, of_request=of_request)
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


class _Readers:
    """The stream as readers saw it: one step for each run, and its end."""

    def __init__(self, source: Partition) -> None:
        self.steps: list[TimelineStep] = []
        self.ending = ""
        self._source = source
        self._transcript = Transcript(keep=False)
        self._shown: list[tuple[LogRecord, Chunk]] = []
        """Chunks of the current run."""

    def take(self, log_record: LogRecord) -> None:
        record = log_record.record
        if not isinstance(record, VISIBLE):
            return
        if not isinstance(record, Chunk):
            self.close()
            self.steps.append(_step(self._source, log_record))
        piece = self._transcript.apply(record)
        if isinstance(piece, Chunk):
            self._shown.append((log_record, piece))
            self.ending = piece.finish_reason or ""
        elif isinstance(piece, End):
            self.ending = f"{piece.code} {piece.message}".strip()

    def close(self) -> None:
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
        deltas = [data.delta for _, chunk in self._shown for data in chunk.data]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        if begun := sum(isinstance(call, dict) and bool(call.get("id")) for call in calls):
            fields["calls"] = begun
        texts = [delta.get("reasoning_content") or delta.get("reasoning") for delta in deltas]
        if chars := sum(len(text) for text in texts if isinstance(text, str)):
            fields["reasoning_chars"] = chars
        self.steps.append(
            TimelineStep(first.timestamp_ms, self._source, first.offset, "Shown", fields)
        )
        self._shown.clear()
