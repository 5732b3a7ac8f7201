"""Points in time and periods of the log, parsed from absolute times, ages or offsets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from kvlane.app.operator_error import OperatorError
from kvlane.streams.ports import Partition
from kvlane.streams.topics import RESPONSES, TOPICS_BY_NAME

MAX_LIFETIME_MS = (TOPICS_BY_NAME[RESPONSES].retention_ms or 0) // 2
"""Maximum lifetime of a request in any deployment (`Settings.max_lifetime_s`)."""
_AGO = re.compile(r"^-(\d+(?:\.\d+)?)(s|m|h|d)$")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_OFFSET = re.compile(r"^([a-z-]+)/(\d+)[:=](\d+)$")


class InvalidTime(OperatorError):
    """Invalid time or period; the message shows valid ones."""


class TimeRange(NamedTuple):
    """The times [from_ms, to_ms), in ms since 1970."""

    from_ms: int
    to_ms: int


def parse_moment(text: str, now_ms: int) -> int | dict[Partition, int]:
    """Milliseconds since 1970, or next offsets by partition. Raises InvalidTime.

    `2025-11-21T06:40:00Z` (without a zone: UTC), `-15m`, `1763707200000`, or
    `ledger/3:1200,ledger/4:980`.
    """
    text = text.strip()
    if (ago := _AGO.match(text)) is not None:
        return now_ms - int(float(ago[1]) * _SECONDS[ago[2]] * 1000)
    if text.isascii() and text.isdecimal():
        return int(text)
    if "/" in text:
        return dict(_offset(part) for part in text.split(","))
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidTime(
            f"invalid time {text!r}: expected a time (2025-11-21T06:40:00Z), an age (-15m), "
            "milliseconds since 1970, or offsets (ledger/3:1200,ledger/4:980)"
        ) from None
    return int(time.replace(tzinfo=time.tzinfo or UTC).timestamp() * 1000)


def parse_range(text: str, now_ms: int) -> TimeRange:
    """`FROM..TO`, or `FROM` until now; both as in `parse_moment`. Raises InvalidTime."""
    first, _, last = text.partition("..")
    return range_between(first, last, now_ms)


def range_between(first: str, last: str, now_ms: int) -> TimeRange:
    """The period between two times, "" for now; it ends now at the latest. Raises InvalidTime."""
    ends = []
    for text in (first, last):
        at = parse_moment(text, now_ms) if text else now_ms
        if not isinstance(at, int):
            raise InvalidTime(f"invalid period: {text!r} is not a time (example: -1h..-5m)")
        ends.append(min(at, now_ms))
    if ends[0] >= ends[1]:
        raise InvalidTime(
            f"empty period: {format_time(ends[0])} to {format_time(ends[1])} UTC; "
            "it must start before its end, and before now"
        )
    return TimeRange(*ends)


def _offset(text: str) -> tuple[Partition, int]:
    found = _OFFSET.match(text.strip())
    if found is None:
        raise InvalidTime(
            f"invalid offset {text.strip()!r}: expected topic/partition:offset, as ledger/3:1200"
        )
    return Partition(found[1], int(found[2])), int(found[3])


def format_time(timestamp_ms: int) -> str:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(" ", "milliseconds")[:-6]


def check_partitions(moments: Iterable[Partition], known: Iterable[Partition]) -> None:
    """Raise InvalidTime for partitions that are not among the known ones."""
    have = set(known)
    for given in moments:
        if given not in have:
            topics = ", ".join(sorted({p.topic for p in have}))
            raise InvalidTime(
                f"partition {given.topic}/{given.partition} is not read here, only {topics}"
            )
