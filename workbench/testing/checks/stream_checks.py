"""Checks of the streams that readers have seen, once the world has drained.

Kafka   every request ends exactly once, with the engine's tokens and text: all of them, or a
        prefix where its end has a cause; no gap in any stream
HTTP    the same stream as on Kafka, once, however often and at which position the client resumed;
        the same for readers with the client library
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import takewhile

from kvlane.app.engine.echo import echo_answer
from kvlane.app.http.openai.passthrough_fields import JsonObject, merge_fields
from kvlane.app.lanes.failover import MAX_STALLS
from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.routing.state.request_state import NOT_COUNTED_AS_FAILURE
from kvlane.app.text.answer_parts import AnswerPart
from kvlane.app.text.byte_level import ByteDetokenizer
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.streams.codecs import AnyRecord, decode, unpack_tokens
from kvlane.streams.errors import RecordError
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Partition
from kvlane.streams.record_base import Phase
from kvlane.streams.records import (
    Assigned,
    Cancel,
    Chunk,
    End,
    Ended,
    Fence,
    Fencing,
    Finished,
    PassthroughDelta,
    RequestOffset,
    Started,
)
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import DEAD_LETTERS, LEDGER, REQUESTS, RESPONSES, lane_of
from workbench.testing.clients.all_clients import Clients
from workbench.testing.clients.kafka_clients import ExpectedRequest
from workbench.testing.clients.received_answer import AnswerReader, ReceivedAnswer
from workbench.testing.simulated_world import SimulatedWorld

COMPLETE = ("stop", "length", "tool_calls")
MAX_LATE_S = 10.0
"""Longest time for which a record of a router that is no longer the owner is under way."""


def stream_violations(world: SimulatedWorld, clients: Clients) -> Iterator[str]:
    """Violations, as texts."""
    asides: dict[str, list[PassthroughDelta]] = defaultdict(list)
    shown = shown_streams(world, asides)
    causes = _Causes(world)
    dead_letters = {r.key for p in range(4) for r in world.broker.records(DEAD_LETTERS, p)}
    for key, source in world.malformed.items():
        if source.topic == REQUESTS and key not in dead_letters:
            yield f"poison: {key!r} of {source} did not go to the dead letters"
    questions = {**clients.requests, **_called(world, clients)}
    for request_id, question in questions.items():
        yield from _misread(question, shown[request_id], asides[request_id], causes)
    for reader in clients.readers:
        yield from _misheard(reader, shown, causes)
    yield from _misrouted(world, questions)
    yield from _run_again(world)


def shown_streams(
    world: SimulatedWorld, asides: dict[str, list[PassthroughDelta]] | None = None
) -> dict[str, Transcript]:
    """By request, its stream as readers have seen it. `asides` gets the parts of `Chunk.data`."""
    return _streams(world, lambda lane: world.all_records(RESPONSES, lane), asides)


def _streams(
    world: SimulatedWorld,
    records: Callable[[int], Iterable[MemoryRecord]],
    asides: dict[str, list[PassthroughDelta]] | None = None,
) -> dict[str, Transcript]:
    shown: dict[str, Transcript] = defaultdict(Transcript)
    for lane in range(world.parameters.lanes):
        for raw in records(lane):
            if isinstance(record := decode_or_none(raw), Chunk | Fence | End):
                piece = shown[record.id].apply(record)
                if asides is not None and isinstance(piece, Chunk) and piece.data:
                    asides[record.id] += piece.data
    return shown


def waiting_answers(world: SimulatedWorld, readers: Iterable[AnswerReader]) -> int:
    """Number of answers for which readers wait rightly, although their requests have ended."""
    causes = _Causes(world)
    answers = (answer for reader in readers for answer in reader.answers)
    return sum(not answer.outcome and causes.may_wait(answer) for answer in answers)


def decode_or_none(raw: MemoryRecord) -> AnyRecord | None:
    """The record; None for a malformed one."""
    try:
        return decode(raw)
    except RecordError:
        return None


def _called(world: SimulatedWorld, clients: Clients) -> dict[str, ExpectedRequest]:
    """The requests that gateways published, under ids of their own."""
    requests: dict[str, Request] = {}
    cancelled = set()
    for lane in range(world.parameters.lanes):
        for raw in world.all_records(REQUESTS, lane):
            record = decode_or_none(raw)
            if raw.key in world.malformed:
                continue
            if isinstance(record, Request) and record.id not in clients.requests:
                requests[record.id] = record
            elif isinstance(record, Cancel):
                cancelled.add(record.id)
    may_expire = world.parameters.absence is not None
    return {
        i: ExpectedRequest(
            r,
            echo_answer(unpack_tokens(r.token_ids), r.stop.max_tokens),
            i in cancelled,
            may_expire=may_expire,
        )
        for i, r in requests.items()
    }


def _misread(
    question: ExpectedRequest, seen: Transcript, asides: list[PassthroughDelta], causes: _Causes
) -> Iterator[str]:
    request_id = question.request.id
    if not seen.is_over:
        yield f"hanging: {request_id} never ends (shown {seen.shown_tokens} tokens)"
        return
    if seen.gaps:
        yield f"hole: {request_id} has {seen.gaps} gaps"
    code = end_code(seen)
    whole = code in COMPLETE
    if not (question.is_served and not question.is_refused) and (seen.shown_tokens or whole):
        yield f"refused: {request_id} should have been rejected and has an answer"
    due = question.expected_tokens if whole else question.expected_tokens[: seen.shown_tokens]
    if seen.tokens != due:
        expected = question.expected_tokens
        yield f"wrong: {request_id} ({code}) shows {seen.tokens}, expected {expected}"
    elif question.request.parsing is not None:
        shown = (seen.text, _merged(asides))
        if shown not in _parts(question.request, seen, is_whole=whole):
            yield f"parts: {request_id} ({code}) shows {shown}"
    elif seen.text not in _texts(seen):
        yield f"text: {request_id} ({code}) shows {seen.text!r} for {seen.tokens}"
    elif whole and (code == "length") != (question.request.stop.max_tokens is not None):
        yield f"code: {request_id} ends as {code}"
    if not whole and not causes.justify(question, code):
        yield f"causeless: {request_id} ends as {code}"


def _misheard(reader: AnswerReader, shown: dict[str, Transcript], causes: _Causes) -> Iterator[str]:
    if not reader.is_over:
        # A client resumes one answer after the other: those behind one that may wait are not due.
        still_open = (answer for answer in reader.answers if not answer.outcome)
        due = takewhile(lambda answer: not causes.may_wait(answer), still_open)
        if ids := [answer.id for answer in due]:
            yield f"waiting: {reader.name} got no end of {ids}"
    if reader.unexpected_errors:
        yield f"surprise: {reader.name} got {reader.unexpected_errors}"
    for answer in reader.answers:
        if answer.outcome and answer.id and (why := _mistake(answer, shown[answer.id], causes)):
            yield f"received: {reader.name} {why}"


def _mistake(answer: ReceivedAnswer, seen: Transcript, causes: _Causes) -> str:
    """The difference between an answer as a client got it and its stream; "" for none."""
    if answer.outcome == "left":
        is_right = seen.text.startswith(answer.text)
    elif answer.outcome in ("stream_not_found", "lost") and causes.are_cut(answer.id):
        is_right = True  # a late reader cannot read records that were deleted
    elif answer.outcome == "deadline" and causes.may_wait(answer):
        is_right = True  # the wait has taken as long as requests may
    elif answer.outcome == "stream_not_found" and not answer.text and end_code(seen) == "deadline":
        is_right = True  # no router ran while it could: its end came after its lifetime
    elif answer.outcome in COMPLETE:
        is_right = answer.outcome == end_code(seen) and answer.text == seen.text
    elif seen.end is not None and causes.are_cut(answer.id):
        # The End may be deleted before text that a run appended after it.
        is_right = answer.outcome == end_code(seen) and answer.text.startswith(seen.text)
    else:  # a failure may hide text that came with it
        is_right = answer.outcome == end_code(seen) and seen.text.startswith(answer.text)
    if is_right:
        return ""
    shown = f"{answer.id} shows {seen.text!r} and {end_code(seen)}"
    return f"{answer.text!r} and {answer.outcome}, {shown}"


def is_cut(world: SimulatedWorld, request_id: str) -> bool:
    """Whether records that an answer needs may be deleted."""
    lane = lane_of(request_id, world.parameters.lanes)
    return any(Partition(topic, lane) in world.truncated for topic in (REQUESTS, RESPONSES))


def end_code(seen: Transcript) -> str:
    """The code or finish reason with which a stream ended."""
    return str(seen.end.code if seen.end is not None else seen.finish_reason)


def _texts(seen: Transcript) -> tuple[str, ...]:
    """The possible texts of the tokens shown; an End may drop an incomplete character."""
    text = ByteDetokenizer()
    visible = text.push(seen.tokens)
    whole = visible + text.end()
    return (whole,) if seen.end is None else (visible, whole)


def _parts(
    request: Request, seen: Transcript, *, is_whole: bool
) -> tuple[tuple[str, dict[int, JsonObject]], ...]:
    """The possible content and asides of the tokens shown; an end may drop parts that are held."""
    assert request.parsing is not None
    stream = ParsedStream(ByteModel().text_stream(request), request.parsing, request.id)
    piece, end = stream.feed(seen.tokens), stream.end()
    rest = [part._replace(at=len(piece.text) + part.at) for part in end.data]
    visible = (piece.text, _merged(piece.data))
    whole = (piece.text + end.text, _merged([*piece.data, *rest]))
    return (whole,) if is_whole else (visible, whole)


def _merged(data: Iterable[PassthroughDelta | AnswerPart]) -> dict[int, JsonObject]:
    """By their place in the text, the deltas in one: Chunks divide them by steps."""
    places: dict[int, list[JsonObject]] = defaultdict(list)
    for item in data:
        places[item.at].append(item.delta or {})
    return {at: merge_fields(*deltas) for at, deltas in places.items()}


def _misrouted(world: SimulatedWorld, questions: dict[str, ExpectedRequest]) -> Iterator[str]:
    """Requests that were assigned to workers of other models."""
    for lane in range(world.parameters.lanes):
        for raw in world.all_records(LEDGER, lane):
            record = decode_or_none(raw)
            if isinstance(record, Assigned) and (question := questions.get(record.id)):
                model = question.request.model
                if model and world.model_of(record.worker) != model:
                    yield f"misrouted: {record.id}, for {model!r}, goes to {record.worker}"


def _run_again(world: SimulatedWorld) -> Iterator[str]:
    """Requests that begin anew, long after their end: their ids were forgotten.

    The end of a run that has failed is not the end of its request. The first decision about a
    run that has begun before is no such beginning: its router did not reach the leader of the
    ledger meanwhile.
    """
    for lane in range(world.parameters.lanes):
        ended_ms: dict[str, int] = {}
        begun: set[tuple[str, RequestOffset, Phase]] = set()
        decisions: dict[tuple[str, RequestOffset, Phase], Assigned] = {}
        for raw in world.all_records(LEDGER, lane):
            record = decode_or_none(raw)
            if isinstance(record, Ended) or (
                isinstance(record, Finished) and record.code in COMPLETE
            ):
                ended_ms.setdefault(record.id, raw.timestamp)
            elif isinstance(record, Started) and record.id not in ended_ms:
                begun.add((record.id, record.origin, record.phase))
            elif isinstance(record, Assigned) and record.attempt == 0:
                run = (record.id, record.origin, record.phase)
                is_late_append = decisions.setdefault(run, record) == record and run in begun
                if record.id in ended_ms and not is_late_append:
                    late_s = (raw.timestamp - ended_ms[record.id]) / 1000
                    if late_s > MAX_LATE_S:
                        yield f"again: {record.id} is assigned {late_s:.0f} s after its end"


class _Causes:
    """The causes in the log that justify the end of a request."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._failed: dict[str, set[int]] = defaultdict(set)
        self._stalled: dict[str, set[int]] = defaultdict(set)
        for lane in range(world.parameters.lanes):
            for raw in world.all_records(LEDGER, lane):
                record = decode_or_none(raw)
                if isinstance(record, Fencing) and record.reason not in NOT_COUNTED_AS_FAILURE:
                    self._failed[record.id].add(record.attempt)
                elif isinstance(record, Finished) and record.stalled:
                    self._stalled[record.id].add(record.attempt)

    def are_cut(self, request_id: str) -> bool:
        """As `is_cut`."""
        return is_cut(self._world, request_id)

    def may_wait(self, answer: ReceivedAnswer) -> bool:
        """Whether a reader may wait for an answer whose request has ended: the records with its end
        were deleted, and the reader has no text but of later ones, as of a run that was not ended
        yet. For the reader it is as a request that is still queued or computed: the wait lasts as
        long as requests may, and an error would end such requests."""
        kept = self._kept.get(answer.id)
        if kept is None:
            return not answer.marks and answer.id in self._deleted
        return not kept.is_over and answer.id in self._deleted and kept.text.startswith(answer.text)

    @cached_property
    def _kept(self) -> dict[str, Transcript]:
        """By request, the stream of the records that were not deleted."""
        return _streams(self._world, lambda lane: self._world.broker.records(RESPONSES, lane))

    @cached_property
    def _deleted(self) -> set[str]:
        """The requests of whose answers records were deleted."""
        lanes = (Partition(RESPONSES, lane) for lane in range(self._world.parameters.lanes))
        gone = {raw.key for lane in lanes for raw in self._world.truncated.get(lane, ())}
        return {key.decode() for key in gone if key is not None}

    def justify(self, question: ExpectedRequest, code: str) -> bool:
        """Whether this end of it has a cause."""
        request_id = question.request.id
        settings = self._world.settings
        engines = [node.engine for node in self._world.processes if node.engine is not None]
        causes = {
            "cancelled": question.is_cancelled,
            "deadline": question.may_time_out,
            "no_workers": question.may_time_out,
            "all_busy": question.may_time_out,
            "none_eligible": question.may_time_out,
            "attempts": len(self._failed[request_id]) >= settings.max_attempts
            or len(self._stalled[request_id]) >= MAX_STALLS,
            # Past its deadline, a request ends as lost when the log cannot be read at once.
            "lost": self.are_cut(request_id) or question.may_time_out,
            "invalid": question.is_refused or not question.is_served,
            "model_not_found": not question.is_served,
            "queue_full": self._world.parameters.is_tight and not question.via_prompts,
            "error": any(request_id in engine.rejected for engine in engines),
        }
        return causes.get(code, False)
