"""Stored responses: results of the kind `response` on `results`, found by the time of their ids.

    id ──time──► result: output, items of the input since earlier results, places of those results

The collector writes them, also of answers that no gateway waits for (`app/results`). The id shows
whether a response is stored, so nothing is searched for those that are not. A result has the items
of earlier turns itself, up to CARRIED_BYTES: then the next one has its place instead. So a long
conversation is neither copied with each turn nor read in one piece for each of its turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from kvlane.app.http.api_errors import ApiError, error_of_stream, invalid_request
from kvlane.app.http.openai.gateway_deps import GatewayDeps
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.http.server.middleware import Hold, TenantSlots
from kvlane.app.preprocess.json_limits import MAX_VALUES, parse_json
from kvlane.app.preprocess.prompt_errors import TooLarge
from kvlane.app.preprocess.thread_pool import run_cooperatively
from kvlane.streams.errors import BrokerUnavailable, PositionLost, StreamError
from kvlane.streams.ids import issued_ms
from kvlane.streams.ports import POLL_S, Partition, Reader, Record
from kvlane.streams.response_records import TurnPlace
from kvlane.streams.responses.reply_reader import CLOCK_MARGIN_MS
from kvlane.streams.topics import DAY_MS, RESULTS, partition_of

WAIT_S = 5.0
"""Time for the result of an answer that has ended just now."""
READ_S = 20.0
"""Time limit of a search, and of a result at a known place."""
NEAR_MS = 5_000
"""Search from so long before the time of an id; it is that of the broker, once a gateway has read
records. From CLOCK_MARGIN_MS before it only if there is none."""
MAX_LOOKUPS, OF_TENANT = 64, 8
"""Lookups at a time, with a reader of the log each."""
CARRIED_BYTES = 64 * 1024
MAX_DELETIONS = 100_000
"""Of a tenant, within the time for which responses are kept: each gateway knows all of them, in 25
MB."""
RECORDS_PER_POLL = 500


class StoredResponse(NamedTuple):
    """A stored response. `body`: the object of it. `items`: of its input since `history`."""

    place: TurnPlace
    status: str
    body: bytes
    items: bytes
    output: bytes
    history: tuple[TurnPlace, ...]
    conversation: str
    """The id of its first response."""

    @property
    def size(self) -> int:
        """Bytes of its items and its output."""
        return len(self.items) + len(self.output)


class History(NamedTuple):
    """The items before a new input. `carried`: those that the new result has itself, beside those
    at `places`. `values`: as `parse_json` counts them. `conversation`: the id of its first
    response."""

    items: Sequence[JsonObject] = ()
    carried: Sequence[JsonObject] = ()
    places: tuple[TurnPlace, ...] = ()
    values: int = 0
    conversation: str = ""


class _Turn(msgspec.Struct):
    input: msgspec.Raw
    history: tuple[TurnPlace, ...] = ()
    conversation: str = ""


class _Result(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"null")
    stored: _Turn | None = None


class _Body(msgspec.Struct):
    status: str
    output: msgspec.Raw


class StoredResponses:
    """The stored responses of all tenants; each method has the caller's. They raise ApiError."""

    def __init__(self, parts: GatewayDeps) -> None:
        self._parts = parts
        self._log = parts.log
        self._clock = parts.ctx.clock
        self._kept_ms = parts.batches.responses_kept_ms
        self._slots = TenantSlots(MAX_LOOKUPS, OF_TENANT, "too many responses are being looked up")

    async def find(self, request_id: str, tenant: str, wait_s: float) -> StoredResponse | None:
        """The stored response; None if there is none within a time."""
        async with self._reading(tenant) as reader:
            return await self._find(reader, request_id, wait_s)

    async def history(self, request_id: str, tenant: str, hold: Hold) -> History:
        """The items up to the end of a response, which a new one continues."""
        async with self._reading(tenant) as reader:
            turn = await self._turn(reader, request_id)
            if turn.status in ("failed", "cancelled"):
                message = f"this response has {turn.status}: continue the one before it"
                raise invalid_request(message, "previous_response_id")
            read = _Items(hold, self._parts.settings.http_max_body_bytes)
            await self._read_places(reader, turn, read)
            before = len(read.items)
            await read.add(turn)
            await read.add_output(turn)
        carried, places = read.items[:0], (*turn.history, turn.place)
        if turn.size <= CARRIED_BYTES:
            carried, places = read.items[before:], turn.history
        return History(read.items, carried, places, read.values, turn.conversation)

    async def input_items(self, request_id: str, tenant: str, hold: Hold) -> list[JsonObject]:
        """The items of the input of a response, with those that it continues."""
        async with self._reading(tenant) as reader:
            turn = await self._turn(reader, request_id)
            read = _Items(hold, self._parts.settings.http_max_body_bytes)
            await self._read_places(reader, turn, read)
            await read.add(turn)
        return read.items

    async def delete(self, request_id: str, tenant: str) -> None:
        """Delete a response: it is unknown from then on, and its content expires."""
        await self.check_kept(request_id, tenant)
        batches = self._parts.batches
        if batches.view.deletions(tenant) >= MAX_DELETIONS:
            message = (
                f"{MAX_DELETIONS} responses of the tenant are deleted, which count until they have "
                f"expired, after {self._kept_ms / DAY_MS:g} days: wait, or send store: false"
            )
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_deletions")
        try:
            await batches.delete_response(request_id, tenant)
        except StreamError as e:
            raise error_of_stream(e) from e

    async def check_kept(self, request_id: str, tenant: str) -> None:
        """Raises ApiError, 404, for a response that is not stored, deleted or expired."""
        streams, issued = self._parts.streams, issued_ms(request_id)
        if issued is None or not streams.seal.is_stored(request_id, tenant):
            raise unknown_response("it was not stored, or does not exist")
        if streams.now_ms - issued > self._kept_ms:
            raise unknown_response("it is no longer kept")
        await self.check_not_deleted(request_id)

    async def check_not_deleted(self, request_id: str) -> None:
        """Raises ApiError, 404, for a deleted response."""
        try:
            is_deleted = await self._parts.batches.is_deleted(request_id)
        except StreamError as e:
            raise error_of_stream(e) from e
        if is_deleted:
            raise unknown_response("it was deleted")

    @asynccontextmanager
    async def _reading(self, tenant: str) -> AsyncIterator[Reader]:
        """A reader of results, with the errors of the log as those of the API."""
        with self._slots.taken(tenant):
            reader = self._log.reader()
            try:
                yield reader
            except PositionLost as e:
                raise unknown_response("it is no longer kept") from e
            except StreamError as e:
                raise error_of_stream(e) from e
            finally:
                await reader.close()

    async def _turn(self, reader: Reader, request_id: str) -> StoredResponse:
        turn = await self._find(reader, request_id, WAIT_S)
        if turn is None:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the response has not ended, or is not stored yet: no collector has written it",
                code="response_not_stored_yet",
                retry_after_s=WAIT_S,
            )
        if not turn.items:
            message = (
                "the response was not stored: its result is larger than a record may be, or was "
                "written by a collector of an earlier version"
            )
            raise invalid_request(message, "previous_response_id", code="response_not_stored")
        return turn

    async def _find(self, reader: Reader, request_id: str, wait_s: float) -> StoredResponse | None:
        key, began_at = request_id.encode(), self._clock.now()
        number = partition_of(key, await self._log.partitions(RESULTS))
        source = Partition(RESULTS, number)
        for margin_ms, waits_s in ((NEAR_MS, wait_s), (CLOCK_MARGIN_MS, 0.0)):
            since_ms = max(0, (issued_ms(request_id) or 0) - margin_ms)
            start = await self._log.offset_at(RESULTS, number, since_ms)
            end = (await self._log.end_offsets(RESULTS, [number]))[number]
            reader.assign({source: start}, {key})
            is_over = self._deadline(began_at + waits_s, began_at + READ_S)
            while not is_over() or reader.position(source) < end:
                batches = await reader.poll(POLL_S, RECORDS_PER_POLL)
                for record in batches.get(source, ()):
                    return _stored(request_id, record)
        return None

    def _deadline(self, until: float, latest: float) -> Callable[[], bool]:
        """Whether the time of a wait is over. Raises BrokerUnavailable at the latest time."""

        def is_over() -> bool:
            if self._clock.now() > latest:
                raise BrokerUnavailable(f"{RESULTS} was not read within {READ_S:g} s")
            return self._clock.now() >= until

        return is_over

    async def _read_places(self, reader: Reader, turn: StoredResponse, read: _Items) -> None:
        """Read the results before those items that a response has itself."""
        for place in turn.history:
            source = Partition(RESULTS, place.partition)
            reader.assign({source: place.offset}, {place.id.encode()})
            latest = self._clock.now() + READ_S
            is_over = self._deadline(latest, latest)
            record: Record | None = None
            while record is None:
                is_over()
                batches = await reader.poll(POLL_S, 1)
                record = next(iter(batches.get(source, ())), None)
                if record is None and reader.position(source) > place.offset:
                    raise unknown_response("part of its conversation is no longer kept")
            earlier = _stored(place.id, record)
            await read.add(earlier)
            await read.add_output(earlier)


class _Items:
    """Items of several results, in order, within the bounds of a body."""

    def __init__(self, hold: Hold, most_bytes: int) -> None:
        self.items: list[JsonObject] = []
        self.values = 0
        self._hold = hold
        self._left = most_bytes

    async def add(self, turn: StoredResponse) -> None:
        await self._add(turn.items)

    async def add_output(self, turn: StoredResponse) -> None:
        await self._add(turn.output)

    async def _add(self, text: bytes) -> None:
        self._hold(len(text))
        self._left -= len(text)
        parsed = await run_cooperatively(parse_json(text))
        self.items += parsed.value
        self.values += parsed.values
        if self._left < 0 or self.values > MAX_VALUES:
            raise TooLarge(
                "previous_response_id",
                "the conversation is longer than a body may be: begin a new one",
            )


def _stored(request_id: str, record: Record) -> StoredResponse:
    """The response of a record. One of another kind, by an earlier version, has no items. Raises
    ApiError, 404, for an unreadable one."""
    place = TurnPlace(request_id, record.partition, record.offset)
    try:
        result = msgspec.json.decode(record.value or b"{}", type=_Result)
        if result.stored is None:
            return StoredResponse(place, "failed", b"", b"", b"", (), request_id)
        body = msgspec.json.decode(result.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise unknown_response("its record cannot be read") from None
    return StoredResponse(
        place, body.status, bytes(result.body), bytes(result.stored.input), bytes(body.output),
        result.stored.history, result.stored.conversation or request_id,
    )  # fmt: skip


def unknown_response(reason: str) -> ApiError:
    """The error for a response that cannot be had."""
    message = f"there is no such response: {reason}"
    return ApiError(HTTPStatus.NOT_FOUND, message, code="response_not_found")


def item_objects(response_id: str, items: Sequence[JsonObject]) -> list[dict[str, Any]]:
    """Items in OpenAI's form: with ids, and parts instead of a text."""
    found = []
    for number, given in enumerate(items):
        item: JsonObject = {"type": "message", "status": "completed"} | given
        prefix = _PREFIXES.get(item["type"], "item")
        if not isinstance(item.get("id"), str):
            item["id"] = f"{prefix}_{response_id}_in_{number}"
        if isinstance(text := item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": text}]
        found.append(item)
    return found


_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
}  # fmt: skip
