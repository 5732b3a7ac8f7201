"""Decoder of KV cache events in vLLM's format, into `kvlane.indexer.cache_events.engine_events`.

    frames ─► EngineEventBatch ─► BatchNumberTracker ─► missing batches ─► replay ─► recovered

A message has three frames: topic, batch number (i64, big endian, from 0), and a batch of time,
events and rank in msgpack. Answers to a replay have an empty frame first, older ones no topic.
Batches and events are maps or arrays, independently: arrays in engines without cache groups, arrays
with a group in later ones, maps in the newest; hashes are bytes or signed integers. Unknown fields
are skipped; an event of an unknown type becomes `UnreadableEvent`. Input never raises, since it
must not end the reading task. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from kvlane.indexer.block_hashes import multimodal_hash
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EventsLost,
    UnreadableEvent,
)
from kvlane.indexer.xxh3 import xxh3

log = logging.getLogger(__name__)

END_OF_REPLAY = -1
"""Batch number that marks the end of a replay."""


class EngineEventBatch(NamedTuple):
    """The events of one engine step; `rank`: data-parallel."""

    number: int
    rank: int = 0
    events: tuple[EngineEvent, ...] = ()


class BatchGap(NamedTuple):
    """The state of the earlier batches, by the number of a batch."""

    is_restart: bool
    """The engine has restarted with an empty cache: `AllCleared` precedes its events."""
    missing: range
    """Numbers of batches that were not received, to be replayed from `missing.start`."""


class BatchNumberTracker:
    """Tracks the batch numbers of one rank; `next_number`: the next one."""

    def __init__(self) -> None:
        self.next_number = 0

    def advance(self, number: int) -> BatchGap:
        """Advance to a published number. Replayed batches go to `recovered_events`."""
        restarted = number < self.next_number
        missing = range(0 if restarted else self.next_number, number)
        self.next_number = number + 1
        return BatchGap(restarted, missing)


def recovered_events(missing: range, replay: Iterable[EngineEventBatch]) -> tuple[EngineEvent, ...]:
    """The events of missing batches in order, with `EventsLost` first if some are lost.

    Engines keep a limited history with possible gaps: only the batches after the last gap count,
    since blocks stored before may be gone.
    """
    found = {batch.number: batch.events for batch in replay if batch.number in missing}
    start = missing.stop
    while start > missing.start and start - 1 in found:
        start -= 1
    events = tuple(event for number in range(start, missing.stop) for event in found[number])
    return events if start == missing.start else (EventsLost(), *events)


def decode_batch(frames: Sequence[bytes]) -> EngineEventBatch | None:
    """Decode a live or replayed message; `END_OF_REPLAY` is the number of its end. None if
    unreadable: the next batch shows a gap.
    """
    try:
        *_, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big", signed=True)
        if len(number_bytes) != 8 or number < END_OF_REPLAY:
            raise ValueError(f"number {number}, of {len(number_bytes)} bytes")
        if number == END_OF_REPLAY:
            return EngineEventBatch(END_OF_REPLAY)
        message = (_MESSAGE_MAP if _is_map(payload) else _MESSAGE).decode(payload)
    except _UNREADABLE:
        return None
    events: list[EngineEvent] = []
    for raw in message.events:
        event = _event(raw)
        if not (events and _joins(events[-1], event)):
            events.append(event)
    return EngineEventBatch(number, message.data_parallel_rank or 0, tuple(events))


class UnreadableEvents:
    """Log of the messages of one engine that cannot be read, or have events that cannot. It has a
    line for the first, the tenth, the hundredth message and so on."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._messages = 0
        self._next_line = 1

    def readable_events(self, batch: EngineEventBatch | None) -> tuple[EngineEvent, ...]:
        """The events of a message; an `UnreadableEvent`, to be counted, for one without any."""
        events = (UnreadableEvent(is_known=True),) if batch is None else batch.events
        if any(type(event) is UnreadableEvent and event.is_known for event in events):
            self._messages += 1
            if self._messages == self._next_line:
                self._next_line *= 10
                log.warning(
                    "cache events of %s cannot be read, %d messages so far: its cache is partly "
                    "unknown to routers. It may be newer than this version supports",
                    self._source,
                    self._messages,
                )
        return events


# --- shapes ----------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True, gc=False):
    timestamp: msgspec.Raw
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _MessageMap(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct, gc=False):
    """The order of the fields is that of array events. `group_idx` and the fields after it are in
    those of engines with cache groups only."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Any = None
    locality: str | None = None


class _StoredRow(_Stored, array_like=True, tag="BlockStored", gc=False):
    pass


class _StoredMap(_Stored, tag="BlockStored", kw_only=True, gc=False):
    parent_block_hash: int | bytes | None = None
    """Some writers of maps leave fields out that are null."""


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _RemovedMap(_Removed, tag="BlockRemoved", gc=False):
    pass


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _TypeRow(msgspec.Struct, array_like=True, gc=False):
    type: str


class _TypeMap(msgspec.Struct, gc=False):
    type: str


_MESSAGE = msgspec.msgpack.Decoder(_Message)
_MESSAGE_MAP = msgspec.msgpack.Decoder(_MessageMap)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_MAP = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_TYPE_ROW = msgspec.msgpack.Decoder(_TypeRow)
_TYPE_MAP = msgspec.msgpack.Decoder(_TypeMap)
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def _is_map(raw: bytes | msgspec.Raw) -> bool:
    first = memoryview(raw)[:1]
    return len(first) > 0 and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def _event(raw: msgspec.Raw) -> EngineEvent:
    is_map = _is_map(raw)
    try:
        event: object = _MAP.decode(raw) if is_map else _ROW.decode(raw)
        if isinstance(event, _Stored):
            return _stored(event)
        if isinstance(event, _Removed):
            return _removed(event)
        return AllCleared()
    except _UNREADABLE:
        return UnreadableEvent(_type_of(raw, _TYPE_MAP if is_map else _TYPE_ROW) in _KNOWN)


def _type_of(raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[Any]) -> str:
    try:
        return str(decoder.decode(raw).type)
    except _UNREADABLE:
        return ""


def _removed(event: _Removed) -> BlocksRemoved:
    return BlocksRemoved(
        event.block_hashes, event.medium or "", event.group_idx or 0, event.locality or ""
    )


def _joins(last: EngineEvent, event: EngineEvent) -> bool:
    """Merge a removal into the one before: engines evict one block per event, hundreds in a row."""
    if not isinstance(event, BlocksRemoved) or not isinstance(last, BlocksRemoved):
        return False
    if event[1:] != last[1:]:
        return False
    assert isinstance(last.block_hashes, list)
    last.block_hashes.extend(event.block_hashes)
    return True


def _stored(event: _Stored) -> BlocksStored:
    # Old engines number adapters; such blocks must not pass for those of the base model.
    adapter = event.lora_name or ("" if event.lora_id is None else f"adapter {event.lora_id}")
    salt, objects = _extra(event)
    return BlocksStored(
        event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
        event.medium or "", adapter, salt, objects,
        event.group_idx or 0, event.kv_cache_spec_kind or "", event.locality or "",
    )  # fmt: skip


def _extra(event: _Stored) -> tuple[str, list[set[int]] | None]:
    """The salt, and the non-token contents of each block.

    Engines list for each block the extra inputs of its hash: the adapter, multimodal objects
    (identifiers, with or without an offset), the salt in a prompt's first block, digests of
    embeddings.
    """
    if not event.extra_keys or not any(event.extra_keys):
        return "", None
    salt, objects = "", []
    for index, listed in enumerate(event.extra_keys):
        keys = list(listed or ())
        for adapter in (event.lora_name, event.lora_id):
            if adapter is not None and adapter in keys[:1]:
                del keys[0]
        if index == 0 and event.parent_block_hash is None:
            last = next((i for i in reversed(range(len(keys))) if isinstance(keys[i], str)), None)
            salt = "" if last is None else keys.pop(last)
        objects.append({found for key in keys if (found := _object(key)) is not None})
    return salt, objects if any(objects) else None


def _object(key: Any) -> int | None:
    if isinstance(key, list) and len(key) == 2:
        key = key[0]
    if isinstance(key, str):
        return multimodal_hash(key)
    return xxh3(msgspec.msgpack.encode(key), 0)
