"""What readers must have seen when the world has come to rest.

of the log   every request end exactly once, with the engine's tokens and text: all of them, or
             the first ones where its end has a cause; no hole in any stream
by HTTP      what a reader of the log sees, once, however often the client had to reconnect
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from app.engine.echo import echo_answer
from app.faults.asking import Asking, Question
from app.faults.calling import Call, Calling
from app.faults.world import World
from app.preprocess.byte_level import Detokenizer
from app.routing.load import UNCOUNTED
from streams.codecs import AnyRecord, decode, unpack_tokens
from streams.errors import RecordError
from streams.memory.partition import MemoryRecord
from streams.ports import Partition
from streams.records import Assigned, Cancel, Chunk, End, Fence, Fencing, Request
from streams.topics import DEAD_LETTERS, LEDGER, REQUESTS, RESPONSES, lane_of
from streams.transcript import Transcript

WHOLE = ("stop", "length")


def unread(world: World, asking: Asking, calling: Calling) -> Iterator[str]:
    """What does not hold of it."""
    shown: dict[str, Transcript] = defaultdict(Transcript)
    for lane in range(world.shape.lanes):
        for raw in world.lane(RESPONSES, lane):
            if isinstance(record := decoded(raw), Chunk | Fence | End):
                shown[record.id].feed(record)
    causes = _Causes(world)
    letters = {r.key for p in range(4) for r in world.broker.records(DEAD_LETTERS, p)}
    for key, source in world.poisoned.items():
        if source.topic == REQUESTS and key not in letters:
            yield f"poison: {key!r} of {source} did not go to the dead letters"
    questions = asking.questions | _called(world, asking)
    for request_id, question in questions.items():
        yield from _misread(question, shown[request_id], causes)
    for call in calling.calls:
        yield from _misheard(call, shown[call.id], causes)
    yield from _misrouted(world, questions)


def decoded(raw: MemoryRecord) -> AnyRecord | None:
    """The record, None for poison."""
    try:
        return decode(raw)
    except RecordError:
        return None


def _called(world: World, asking: Asking) -> dict[str, Question]:
    """The questions that gateways made; they drew the ids."""
    requests: dict[str, Request] = {}
    cancelled = set()
    for lane in range(world.shape.lanes):
        for raw in world.lane(REQUESTS, lane):
            record = decoded(raw)
            if raw.key in world.poisoned:
                continue
            if isinstance(record, Request) and record.id not in asking.questions:
                requests[record.id] = record
            elif isinstance(record, Cancel):
                cancelled.add(record.id)
    return {
        i: Question(r, echo_answer(unpack_tokens(r.token_ids), r.stop.max_tokens), i in cancelled)
        for i, r in requests.items()
    }


def _misread(question: Question, seen: Transcript, causes: _Causes) -> Iterator[str]:
    request_id = question.request.id
    if not seen.over:
        yield f"hanging: {request_id} never ends (shown {seen.shown} tokens)"
        return
    if seen.holes:
        yield f"hole: {request_id} lost {seen.holes} times a Chunk"
    code = _code(seen)
    whole = code in WHOLE
    if not (question.served and not question.refused) and (seen.shown or whole):
        yield f"refused: {request_id} had to be refused and has an answer"
    due = question.tokens if whole else question.tokens[: seen.shown]
    if seen.tokens != due:
        yield f"wrong: {request_id} ({code}) shows {seen.tokens}, due is {question.tokens}"
    elif seen.text not in _texts(seen):
        yield f"text: {request_id} ({code}) shows {seen.text!r} for {seen.tokens}"
    elif whole and (code == "length") != (question.request.stop.max_tokens is not None):
        yield f"code: {request_id} ends as {code}"
    if not whole and not causes.justify(question, code):
        yield f"causeless: {request_id} ends as {code}"


def _misheard(call: Call, seen: Transcript, causes: _Causes) -> Iterator[str]:
    if not call.outcome:
        yield f"waiting: {call.name} has no end of {call.id or 'anything'}"
    if call.surprises:
        yield f"surprise: {call.name} was told {call.surprises}"
    if not call.outcome or not call.id:
        return
    if call.outcome == "left":
        if not seen.text.startswith(call.text):
            yield f"heard: {call.name} {call.text!r}, {call.id} shows {seen.text!r}"
    elif call.outcome in ("stream_not_found", "lost") and causes.are_cut(call.id):
        pass  # whoever came later could not read what others had read
    elif call.outcome != _code(seen) or not _told(call, seen):
        yield (
            f"heard: {call.name} {call.text!r} and {call.outcome}, "
            f"{call.id} shows {seen.text!r} and {_code(seen)}"
        )


def _told(call: Call, seen: Transcript) -> bool:
    """Whether the client has what it must; a failure takes what comes with it out of its sight."""
    if call.outcome in WHOLE:
        return call.text == seen.text
    return seen.text.startswith(call.text)


def _code(seen: Transcript) -> str:
    return str(seen.end.code if seen.end is not None else seen.finish_reason)


def _texts(seen: Transcript) -> tuple[str, ...]:
    """What the tokens shown may read as; an End leaves a character that was cut off unsaid."""
    text = Detokenizer()
    said = text.push(seen.tokens)
    whole = said + text.end()
    return (whole,) if seen.end is None else (said, whole)


def _misrouted(world: World, questions: dict[str, Question]) -> Iterator[str]:
    """Requests that were given to workers of other models."""
    for lane in range(world.shape.lanes):
        for raw in world.lane(LEDGER, lane):
            record = decoded(raw)
            if isinstance(record, Assigned) and (question := questions.get(record.id)):
                model = question.request.model
                if model and world.model_of(record.worker) != model:
                    yield f"misrouted: {record.id}, for {model!r}, goes to {record.worker}"


class _Causes:
    """Which ends are justified by what happened."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._failed: dict[str, set[int]] = defaultdict(set)
        for lane in range(world.shape.lanes):
            for raw in world.lane(LEDGER, lane):
                record = decoded(raw)
                if isinstance(record, Fencing) and record.reason not in UNCOUNTED:
                    self._failed[record.id].add(record.attempt)

    def are_cut(self, request_id: str) -> bool:
        """Whether records that its answer needs may be gone."""
        lane, cut = lane_of(request_id, self._world.shape.lanes), self._world.truncated
        return Partition(RESPONSES, lane) in cut or Partition(REQUESTS, lane) in cut

    def justify(self, question: Question, code: str) -> bool:
        """Whether this end of it has a cause."""
        request_id = question.request.id
        settings = self._world.settings
        engines = [node.engine for node in self._world.nodes if node.engine is not None]
        causes = {
            "cancelled": question.cancelled,
            "deadline": question.hurried,
            "no_workers": question.hurried,
            "all_busy": question.hurried,
            "none_eligible": question.hurried,
            "attempts": len(self._failed[request_id]) >= settings.max_attempts,
            # Past its deadline, a request is given up when the log cannot be read at once.
            "lost": self.are_cut(request_id) or question.hurried,
            "invalid": question.refused or not question.served,
            "model_not_found": not question.served,
            "queue_full": self._world.shape.cramped,
            "error": any(request_id in engine.refused for engine in engines),
        }
        return causes.get(code, False)
