"""Dead letters for operators: listing them, reading their records, and publishing one again.

A retry publishes the unchanged record under its own key, so in the lane of its request. A second
one is harmless, since a router recognises a repeated id. It is refused for a record that is still
malformed, and for a request that was accepted. Appends to `prompts` and `requests`; changes no dead
letter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvlane.app.audit.timeline import explain_request
from kvlane.app.operator_error import OperatorError
from kvlane.app.preprocess.kafka_prompts import PromptRecord, UnreadablePrompt, read_prompt
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import decode
from kvlane.streams.errors import RecordError
from kvlane.streams.ports import Appended, Entry, Headers, Log, Partition
from kvlane.streams.reading.dead_letter_format import DeadLetter, parse_dead_letter
from kvlane.streams.reading.range_reader import Progress, read_range, record_at
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Refused
from kvlane.streams.topics import BATCH, DEAD_LETTERS, PROMPTS, REQUESTS, TOPICS_BY_NAME

PUBLISH_TIMEOUT_S = 30.0
_KNOWN = frozenset({"Assigned", "Started"})


class InvalidDeadLetter(OperatorError):
    """A dead letter that does not exist or cannot be retried; the message says why."""


class DeadLetterRecord(NamedTuple):
    """The original record of a dead letter. `source`: read from the dead letter or its topic."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes
    headers: Headers
    source: str


async def list_dead_letters(
    log: Log,
    clock: Clock,
    limit: int,
    matches: Callable[[DeadLetter], bool] = lambda _: True,
    progress: Progress = lambda _done, _total: None,
) -> tuple[list[DeadLetter], int]:
    """The newest `limit` matching dead letters, oldest first, and the number of matches. Raises
    BrokerUnavailable, PositionLost."""
    sources = [Partition(DEAD_LETTERS, p) for p in range(await log.partitions(DEAD_LETTERS))]
    numbers = [source.partition for source in sources]
    starts = await log.start_offsets(DEAD_LETTERS, numbers)
    ends = await log.end_offsets(DEAD_LETTERS, numbers)
    newest: dict[int, deque[DeadLetter]] = {number: deque(maxlen=limit) for number in numbers}
    count = 0
    async for source, records, _ in read_range(
        log,
        clock,
        {source: starts[source.partition] for source in sources},
        {source: ends[source.partition] for source in sources},
        progress=progress,
    ):
        for record in records:
            letter = parse_dead_letter(record)
            if matches(letter):
                count += 1
                newest[source.partition].append(letter)
    found = [letter for each in newest.values() for letter in each]
    return sorted(found, key=lambda each: (each.at_ms, each.name))[-limit:], count


async def find_dead_letter(log: Log, clock: Clock, name: str) -> DeadLetter:
    """The dead letter with the id PARTITION:OFFSET. Raises InvalidDeadLetter, BrokerUnavailable."""
    partition, colon, offset = name.partition(":")
    if not (colon and partition.isdecimal() and offset.isdecimal()):
        raise InvalidDeadLetter(
            f"invalid dead letter id {name!r}: expected PARTITION:OFFSET "
            "(see `kvlane dead-letters list`)"
        )
    if int(partition) >= await log.partitions(DEAD_LETTERS):
        raise InvalidDeadLetter(f"no dead letter {name}: see `kvlane dead-letters list`")
    source = Partition(DEAD_LETTERS, int(partition))
    record = await record_at(log, clock, source, int(offset))
    if record is None:
        raise InvalidDeadLetter(f"no dead letter {name}: it may be deleted, retention is a week")
    return parse_dead_letter(record)


async def record_of_dead_letter(log: Log, clock: Clock, letter: DeadLetter) -> DeadLetterRecord:
    """The record of a dead letter, from it or from its topic. Raises InvalidDeadLetter."""
    if letter.unreadable:
        raise InvalidDeadLetter(f"dead letter {letter.name} has no content: {letter.reason}")
    if letter.has_whole_value:
        if letter.value is None:
            raise InvalidDeadLetter(
                f"dead letter {letter.name} is of a tombstone, which has no content"
            )
        return _content(letter, letter.value, letter.headers, "kept in the dead letter")
    origin = f"{letter.origin_topic}/{letter.origin_partition}:{letter.origin_offset}"
    if letter.origin_topic in TOPICS_BY_NAME and letter.origin_offset >= 0:
        source = Partition(letter.origin_topic, letter.origin_partition)
        record = await record_at(log, clock, source, letter.origin_offset)
        if record is not None and letter.has_value(record.value):
            assert record.value is not None
            return _content(letter, record.value, tuple(record.headers), f"read from {origin}")
    raise InvalidDeadLetter(
        f"the content of dead letter {letter.name} is redacted, and {origin} does not "
        "hold it any more. Set KVLANE_KEEP_PROMPTS=true to keep content in dead letters"
    )


def decode_dead_letter(letter: DeadLetter, content: DeadLetterRecord) -> Any:
    """The record, decoded by this version. Raises RecordError for a malformed one."""
    if letter.origin_topic not in (PROMPTS, BATCH):
        return decode(content)
    record = read_prompt(content.key, content.value, content.timestamp)
    if isinstance(record, UnreadablePrompt | Refused):
        raise RecordError(record.reason if isinstance(record, UnreadablePrompt) else record.message)
    return record.prompt if isinstance(record, PromptRecord) else record


async def retry_dead_letter(log: Log, clock: Clock, letter: DeadLetter) -> tuple[str, Appended]:
    """Publish the record of a dead letter again; its request id, and the append. Raises
    InvalidDeadLetter when that cannot help, and the errors of the log."""
    if letter.origin_topic not in (PROMPTS, BATCH, REQUESTS):
        raise InvalidDeadLetter(
            f"dead letter {letter.name} is from {letter.origin_topic or 'no topic'}: only those of "
            f"{PROMPTS}, {BATCH} and {REQUESTS} can be retried"
        )
    content = await record_of_dead_letter(log, clock, letter)
    request_id = _id_of(letter, content)
    await _check_unknown(log, clock, letter, request_id)
    entry = Entry(letter.key, content.value, content.headers)
    until = clock.now() + PUBLISH_TIMEOUT_S
    publisher = RecordPublisher(log, clock)
    return request_id, await publisher.publish_entry(letter.origin_topic, entry, until=until)


def _id_of(letter: DeadLetter, content: DeadLetterRecord) -> str:
    """The request id of a record. Raises InvalidDeadLetter for one that no process could accept."""
    try:
        record = decode_dead_letter(letter, content)
    except RecordError as e:
        raise InvalidDeadLetter(
            f"the record of dead letter {letter.name} is still malformed: {e}"
        ) from e
    if (
        letter.origin_topic == REQUESTS
        and type(record).__name__ not in TOPICS_BY_NAME[REQUESTS].records
    ):
        name = type(record).__name__
        raise InvalidDeadLetter(
            f"dead letter {letter.name} is a {name}, which does not belong on {REQUESTS}"
        )
    request_id: str = record.id
    if letter.key is None or letter.key.decode(errors="replace") != request_id:
        raise InvalidDeadLetter(
            f"dead letter {letter.name} is of {request_id!r}, but its key is {letter.key!r}: it "
            "would land in the wrong lane. Publish it again with its id as its key"
        )
    return request_id


async def _check_unknown(log: Log, clock: Clock, letter: DeadLetter, request_id: str) -> None:
    """Raises InvalidDeadLetter for a request that was accepted, whether open or ended."""
    timeline = await explain_request(log, clock, request_id)
    steps = {step.name: step for step in timeline.steps}
    if ended := steps.get("Ended"):
        code = timeline.ending or ended.fields.get("code", "")
        raise InvalidDeadLetter(
            f"{request_id} of dead letter {letter.name} ended ({code}): an id is answered once. "
            "Publish it under another id"
        )
    if timeline.ending:
        raise InvalidDeadLetter(
            f"{request_id} of dead letter {letter.name} was answered ({timeline.ending})"
        )
    if _KNOWN & steps.keys():
        raise InvalidDeadLetter(
            f"{request_id} of dead letter {letter.name} is open: no retry is needed"
        )


def _content(letter: DeadLetter, value: bytes, headers: Headers, where: str) -> DeadLetterRecord:
    return DeadLetterRecord(
        letter.origin_partition, letter.origin_offset, letter.at_ms, letter.key, value, headers,
        where,
    )  # fmt: skip


def to_json_types(record: Any) -> dict[str, Any]:
    """A decoded record as JSON types; token ids in base64."""
    if isinstance(record, msgspec.Struct):
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(record))
    else:
        given = record.model_fields_set  # `model_dump` has a limit of depth
        fields = {name: value for name, value in record if name in given}
    return fields
