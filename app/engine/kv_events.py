"""Cache events as vLLM and those who followed it publish them, read into `indexer.engine_events`.

    frames ─► read ─► EngineBatch ─► Sequence.follow ─► what is missing ─► replay ─► recovered

A message is three frames: topic, number of the batch (i64, big endian, from 0 on, one more each
time), and a msgpack array of time, events and rank. Answers to a replay have an empty frame before
them, older ones no topic. An event is a map, or in older engines an array, with its type inside;
hashes are integers of either sign or bytes. Fields and types of events that are not known here are
skipped, so that newer engines can be read.

Owns the formats, nothing else: no socket, no state of the cache, no time. Never raises for what an
engine may send; what cannot be read is counted, because the engine's loop must not end for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from indexer.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EventsLost,
)
from indexer.hashing import multimodal_hash
from indexer.xxh3 import xxh3

END = -1
"""In place of a batch's number: the replay is over."""


class EngineBatch(NamedTuple):
    """What the engine published after one step; `rank` is the data-parallel one."""

    number: int
    rank: int = 0
    events: tuple[EngineEvent, ...] = ()


@dataclass
class Unread:
    """What was skipped, since it was made."""

    messages: int = 0
    """No batch, or frames that are none."""
    events: int = 0
    """Of a known type, but not of its shape."""
    unknown: int = 0
    """Events of a type that is not known here, or of none."""


class Followed(NamedTuple):
    """What a batch's number says about those before it."""

    restarted: bool
    """The engine began anew, with an empty cache: `AllCleared` comes before anything else."""
    missing: range
    """Batches that were not seen; to be asked for from `missing.start` on."""


class Numbers:
    """Follows the numbers of one rank's batches; `expected` is the next one."""

    def __init__(self) -> None:
        self.expected = 0

    def follow(self, number: int) -> Followed:
        """Take a number that was published; those of replays are `recovered`'s."""
        restarted = number < self.expected
        missing = range(0 if restarted else self.expected, number)
        self.expected = number + 1
        return Followed(restarted, missing)


def recovered(missing: range, replay: Iterable[EngineBatch]) -> tuple[EngineEvent, ...]:
    """The events of missing batches in their order, `EventsLost` first if some never came.

    Engines keep a limited past, and some lose parts of it when they answer slowly. Then only what
    came without a gap up to the end counts: what was stored before a gap may be gone since.
    """
    found = {batch.number: batch.events for batch in replay if batch.number in missing}
    start = missing.stop
    while start > missing.start and start - 1 in found:
        start -= 1
    events = tuple(event for number in range(start, missing.stop) for event in found[number])
    return events if start == missing.start else (EventsLost(), *events)


def read(frames: Sequence[bytes], unread: Unread) -> EngineBatch | None:
    """A message, live or of a replay; its end is a batch of number `END`. None for no batch."""
    try:
        *_, number_bytes, payload = frames
        number = int.from_bytes(number_bytes, "big", signed=True)
        if len(number_bytes) != 8 or number < END:
            raise ValueError(f"number {number}, of {len(number_bytes)} bytes")
        if number == END:
            return EngineBatch(END)
        message = _MESSAGE.decode(payload)
    except _UNREADABLE:
        unread.messages += 1
        return None
    events: list[EngineEvent] = []
    for raw in message.events:
        event = _event(raw, unread)
        if event is not None and not (events and _joins(events[-1], event)):
            events.append(event)
    return EngineBatch(number, message.data_parallel_rank or 0, tuple(events))


# --- shapes ----------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True, gc=False):
    timestamp: msgspec.Raw
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct, gc=False):
    """As long as events were arrays they ended here."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class _StoredRow(_Stored, array_like=True, tag="BlockStored", gc=False):
    pass


class _StoredMap(_Stored, tag="BlockStored", gc=False):
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[int | bytes]
    medium: str | None = None


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _RemovedMap(_Removed, tag="BlockRemoved", gc=False):
    group_idx: int | None = None
    locality: str | None = None


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _TypeRow(msgspec.Struct, array_like=True, gc=False):
    type: str


class _TypeMap(msgspec.Struct, gc=False):
    type: str


_MESSAGE = msgspec.msgpack.Decoder(_Message)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_MAP = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_TYPE_ROW = msgspec.msgpack.Decoder(_TypeRow)
_TYPE_MAP = msgspec.msgpack.Decoder(_TypeMap)
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def _event(raw: msgspec.Raw, unread: Unread) -> EngineEvent | None:
    """The event of some msgpack; None, and counted, for one that cannot be read."""
    first = memoryview(raw)[0]
    is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
    try:
        event: object = _MAP.decode(raw) if is_map else _ROW.decode(raw)
        if isinstance(event, _Stored):
            return _stored(event)
        if isinstance(event, _Removed):
            return _removed(event)
        return AllCleared()
    except _UNREADABLE:
        kind = _type_of(raw, _TYPE_MAP if is_map else _TYPE_ROW)
        if kind in _KNOWN:
            unread.events += 1
        else:
            unread.unknown += 1
        return None


def _type_of(raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[Any]) -> str:
    try:
        return str(decoder.decode(raw).type)
    except _UNREADABLE:
        return ""


def _removed(event: _Removed) -> BlocksRemoved:
    if not isinstance(event, _RemovedMap):
        return BlocksRemoved(event.block_hashes, event.medium or "")
    return BlocksRemoved(
        event.block_hashes, event.medium or "", event.group_idx or 0, event.locality or ""
    )


def _joins(last: EngineEvent, event: EngineEvent) -> bool:
    """Put a removal to the one before it: engines evict one block an event, hundreds in a row."""
    if not isinstance(event, BlocksRemoved) or not isinstance(last, BlocksRemoved):
        return False
    if event[1:] != last[1:]:
        return False
    assert isinstance(last.block_hashes, list)
    last.block_hashes.extend(event.block_hashes)
    return True


def _stored(event: _Stored) -> BlocksStored:
    # Old engines give adapters a number only; it must not pass for the model without one.
    adapter = event.lora_name or ("" if event.lora_id is None else f"adapter {event.lora_id}")
    salt, objects = _extra(event)
    stored = BlocksStored(
        event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
        event.medium or "", adapter, salt, objects,
    )  # fmt: skip
    if not isinstance(event, _StoredMap):
        return stored
    return stored._replace(
        group=event.group_idx or 0,
        kind=event.kv_cache_spec_kind or "",
        locality=event.locality or "",
    )


def _extra(event: _Stored) -> tuple[str, list[set[int]] | None]:
    """The salt, and what else than tokens is in each block.

    Engines list for each block what went into its hash: the adapter, multimodal objects as pairs of
    an identifier and an offset (older ones: the identifier alone), the salt in a prompt's first
    block, and digests of embeddings.
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
    """One u64 for what a key stands for."""
    if isinstance(key, list) and len(key) == 2:
        key = key[0]
    if isinstance(key, str):
        return multimodal_hash(key)
    return xxh3(msgspec.msgpack.encode(key), 0)
