"""Tokens as text and columns as cache events, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvlane.app.text.byte_level import ByteDetokenizer
from kvlane.indexer.events import CacheEvent, EventColumns, EventKind, Tier, parse_columns


def decode_bytes(token_ids: Sequence[int]) -> str:
    """The text of a whole answer."""
    detokenizer = ByteDetokenizer()
    return detokenizer.push(token_ids) + detokenizer.end()


def decode_events(columns: EventColumns) -> list[CacheEvent]:
    """Decode columns, the inverse of `encode_events`. Raises MalformedColumns."""
    rows = parse_columns(columns)
    counts, keys = rows.counts.tolist(), rows.keys.tolist()
    ends = list(accumulate(counts))
    return [
        CacheEvent(EventKind(kind), Tier(tier), position, tuple(keys[end - count : end]))
        for kind, tier, position, count, end in zip(
            columns.kinds, columns.tiers, rows.positions.tolist(), counts, ends, strict=True
        )
    ]
