"""Dead letters for people: what was put aside and why, and how one is taken in again.

A record is taken in again by publishing it to its topic once more, as it was, under its own key: so
it lands in the lane of its request, also when the first one did not. That may be done twice, since
a router recognises an id that comes again. It is refused where it could not help: what cannot be
read now either would only become the next letter, and what is known of an id already is not asked
again.

Reads the log and appends to `prompts` and `requests`; belongs to no group, changes no letter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from app.audit.explain import explain
from app.preprocess.prompts import Question, Unreadable, read
from streams.clock import Clock
from streams.codecs import decode
from streams.deadletters import Letter, letter_in
from streams.errors import PositionLost, RecordError
from streams.outbox import Outbox
from streams.ports import Appended, Entry, Log, Partition, Record
from streams.records import Refused
from streams.stretch import Progress, stretch
from streams.topics import BY_NAME, DEAD_LETTERS, PROMPTS, REQUESTS

PUBLISH_S = 30.0
_KNOWN = frozenset({"Assigned", "Started"})


class BadLetter(Exception):
    """A dead letter that is not there, or that cannot be taken in again; the message says why."""


class Content(NamedTuple):
    """The record that was put aside, as it was. `where` it was found: in the letter, or outside."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    where: str


async def letters(
    log: Log,
    clock: Clock,
    limit: int,
    wanted: Callable[[Letter], bool] = lambda _: True,
    progress: Progress = lambda _done, _total: None,
) -> tuple[list[Letter], int]:
    """The newest `limit` letters that are wanted, the oldest of them first, and how many there are.

    Raises BrokerUnavailable, PositionLost.
    """
    sources = [Partition(DEAD_LETTERS, p) for p in range(await log.partitions(DEAD_LETTERS))]
    numbers = [source.partition for source in sources]
    starts = await log.start_offsets(DEAD_LETTERS, numbers)
    ends = await log.end_offsets(DEAD_LETTERS, numbers)
    newest: dict[int, deque[Letter]] = {number: deque(maxlen=limit) for number in numbers}
    count = 0
    async for source, records, _ in stretch(
        log,
        clock,
        {source: starts[source.partition] for source in sources},
        {source: ends[source.partition] for source in sources},
        progress=progress,
    ):
        for record in records:
            letter = letter_in(record)
            if wanted(letter):
                count += 1
                newest[source.partition].append(letter)
    found = [letter for each in newest.values() for letter in each]
    return sorted(found, key=lambda each: (each.at_ms, each.name))[-limit:], count


async def find(log: Log, clock: Clock, name: str) -> Letter:
    """The letter of a name, PARTITION:OFFSET. Raises BadLetter, BrokerUnavailable."""
    partition, colon, offset = name.partition(":")
    if not (colon and partition.isdecimal() and offset.isdecimal()):
        raise BadLetter(f"{name!r} names no letter: give PARTITION:OFFSET, as `list` shows them")
    if int(partition) >= await log.partitions(DEAD_LETTERS):
        raise BadLetter(f"there is no letter {name}: `kvlane dead-letters list` shows all")
    source = Partition(DEAD_LETTERS, int(partition))
    record = await _record_at(log, clock, source, int(offset))
    if record is None:
        raise BadLetter(f"there is no letter {name}: it may be gone, they are kept for a week")
    return letter_in(record)


async def content_of(log: Log, clock: Clock, letter: Letter) -> Content:
    """The record of a letter, out of it or from where it stood. Raises BadLetter."""
    if letter.is_kept:
        if letter.value is None:
            raise BadLetter(f"letter {letter.name} is of a tombstone: there is nothing in it")
        return _content(letter, letter.value, letter.headers, "kept in the letter")
    origin = f"{letter.origin_topic}/{letter.origin_partition}:{letter.origin_offset}"
    if letter.origin_topic in BY_NAME and letter.origin_offset >= 0:
        source = Partition(letter.origin_topic, letter.origin_partition)
        record = await _record_at(log, clock, source, letter.origin_offset)
        if record is not None and letter.is_of(record.value):
            assert record.value is not None
            return _content(letter, record.value, tuple(record.headers), f"read from {origin}")
    raise BadLetter(
        f"the content of letter {letter.name} is not kept: it was redacted, and {origin} does not "
        "hold it any more. Set KVLANE_KEEP_PROMPTS=true to have letters keep it"
    )


def meaning_of(letter: Letter, content: Content) -> Any:
    """What the record says, as this version reads it. Raises RecordError when it cannot."""
    if letter.origin_topic != PROMPTS:
        return decode(content)
    said = read(content.key, content.value, content.timestamp)
    if isinstance(said, Unreadable | Refused):
        raise RecordError(said.reason if isinstance(said, Unreadable) else said.message)
    return said.prompt if isinstance(said, Question) else said


async def retry(log: Log, clock: Clock, letter: Letter) -> tuple[str, Appended]:
    """Publish the record of a letter again; its request id, and where it stands now.

    Raises BadLetter when that cannot help, and what the log raises.
    """
    if letter.origin_topic not in (PROMPTS, REQUESTS):
        raise BadLetter(
            f"letter {letter.name} is from {letter.origin_topic or 'nowhere'}: only records of "
            f"{PROMPTS} and {REQUESTS} are taken in again"
        )
    content = await content_of(log, clock, letter)
    request_id = _id_of(letter, content)
    await _check_unknown(log, clock, letter, request_id)
    entry = Entry(letter.key, content.value, content.headers)
    until = clock.now() + PUBLISH_S
    outbox = Outbox(log, clock)
    return request_id, await outbox.persist_entry(letter.origin_topic, entry, until=until)


def _id_of(letter: Letter, content: Content) -> str:
    """The id that a record is about. Raises BadLetter for one that nobody could take in."""
    try:
        said = meaning_of(letter, content)
    except RecordError as e:
        raise BadLetter(f"letter {letter.name} still cannot be read: {e}") from e
    if letter.origin_topic == REQUESTS and type(said).__name__ not in BY_NAME[REQUESTS].records:
        name = type(said).__name__
        raise BadLetter(f"letter {letter.name} is a {name}, which does not belong on {REQUESTS}")
    request_id: str = said.id
    if letter.key is None or letter.key.decode(errors="replace") != request_id:
        raise BadLetter(
            f"letter {letter.name} is about {request_id!r}, but its key is {letter.key!r}: it "
            "would land where nobody looks for it. Publish it again with its id as its key"
        )
    return request_id


async def _check_unknown(log: Log, clock: Clock, letter: Letter, request_id: str) -> None:
    """Raises BadLetter for a request that was taken in, under way or over."""
    story = await explain(log, clock, request_id)
    said = {step.name: step for step in story.steps}
    if ended := said.get("Ended"):
        code = story.ending or ended.fields.get("code", "")
        raise BadLetter(
            f"{request_id} of letter {letter.name} has ended ({code}): an id is answered once. "
            "Publish it under another one"
        )
    if story.ending:
        raise BadLetter(f"{request_id} of letter {letter.name} was answered ({story.ending})")
    if _KNOWN & said.keys():
        raise BadLetter(f"{request_id} of letter {letter.name} is under way: nothing is to be done")


async def _record_at(log: Log, clock: Clock, source: Partition, offset: int) -> Record | None:
    """The record at an offset; None when there is none (any more)."""
    if source.partition >= await log.partitions(source.topic):
        return None
    if offset >= (await log.end_offsets(source.topic, [source.partition]))[source.partition]:
        return None
    try:
        async for _, records, _ in stretch(log, clock, {source: offset}, {source: offset + 1}):
            for record in records:
                if record.offset == offset:
                    return record
    except PositionLost:
        return None
    return None


def _content(
    letter: Letter, value: bytes, headers: tuple[tuple[str, bytes], ...], where: str
) -> Content:
    return Content(
        letter.origin_partition, letter.origin_offset, letter.at_ms, letter.key, value, headers,
        where,
    )  # fmt: skip


def plain(said: Any) -> dict[str, Any]:
    """A record that was read, in the types of JSON; token ids in base64."""
    if isinstance(said, msgspec.Struct):
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(said))
    else:
        fields = said.model_dump(mode="json", exclude_defaults=True)
    return fields
