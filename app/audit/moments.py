"""How people name a moment of the log: a time, so long ago, or offsets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from streams.ports import Partition
from streams.topics import BY_NAME, RESPONSES

LONGEST_MS = (BY_NAME[RESPONSES].retention_ms or 0) // 2
"""No request of any deployment lives longer (`Settings.max_lifetime_s`)."""
_AGO = re.compile(r"^-(\d+(?:\.\d+)?)(s|m|h|d)$")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_OFFSET = re.compile(r"^([a-z-]+)/(\d+)[:=](\d+)$")


class BadMoment(Exception):
    """Not a moment; the message says how one looks."""


class Period(NamedTuple):
    """From a time on and before another one, in ms since 1970."""

    from_ms: int
    to_ms: int


def moment(text: str, now_ms: int) -> int | dict[Partition, int]:
    """Milliseconds since 1970, or next offsets by partition. Raises BadMoment.

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
        raise BadMoment(
            f"{text!r} is no moment: give a time (2025-11-21T06:40:00Z), how long ago (-15m), "
            "milliseconds since 1970, or offsets (ledger/3:1200,ledger/4:980)"
        ) from None
    return int(time.replace(tzinfo=time.tzinfo or UTC).timestamp() * 1000)


def period(text: str, now_ms: int) -> Period:
    """`FROM..TO` or `FROM`, which lasts until now; both as in `moment`. Raises BadMoment."""
    first, _, last = text.partition("..")
    return between(first, last, now_ms)


def between(first: str, last: str, now_ms: int) -> Period:
    """From a time to another one, "" for now; never beyond now. Raises BadMoment."""
    ends = []
    for said in (first, last):
        at = moment(said, now_ms) if said else now_ms
        if not isinstance(at, int):
            raise BadMoment(f"{said!r} is no time: a period goes from a time to a time, -1h..-5m")
        ends.append(min(at, now_ms))
    if ends[0] >= ends[1]:
        raise BadMoment(
            f"nothing is between {clock_time(ends[0])} and {clock_time(ends[1])} UTC: "
            "a period begins before it ends, and before now"
        )
    return Period(*ends)


def _offset(text: str) -> tuple[Partition, int]:
    found = _OFFSET.match(text.strip())
    if found is None:
        raise BadMoment(
            f"{text.strip()!r} is no offset: give topic/partition:offset, ledger/3:1200"
        )
    return Partition(found[1], int(found[2])), int(found[3])


def clock_time(timestamp_ms: int) -> str:
    """A point in time for people, in UTC, to the millisecond."""
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(" ", "milliseconds")[:-6]


def check_known(moments: Iterable[Partition], known: Iterable[Partition]) -> None:
    """Raises BadMoment for partitions that are not among the known ones."""
    have = set(known)
    for wanted in moments:
        if wanted not in have:
            topics = ", ".join(sorted({p.topic for p in have}))
            raise BadMoment(f"{wanted.topic}/{wanted.partition} is not read here: only {topics}")
