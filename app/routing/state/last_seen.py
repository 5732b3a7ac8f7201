"""Last-seen times of workers, by the records of one partition, to expire those that are gone."""

from __future__ import annotations

from collections.abc import Iterator

RETENTION_MS = 24 * 3600 * 1000
"""How long a name is kept after its last record: as long as kv-events are kept, and as long as the
registry is not compacted."""


class LastSeen:
    """Names and the times of their last records, in the order of these times."""

    def __init__(self, times: dict[str, int] | None = None) -> None:
        self.times = times or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.times)

    def touch(self, name: str, at_ms: int) -> list[str]:
        """Take in a record's time; returns the expired names, which are removed here."""
        self.times.pop(name, None)
        self.times[name] = at_ms
        outdated = []
        for each, time in self.times.items():
            if time >= at_ms - RETENTION_MS:
                break
            outdated.append(each)
        for each in outdated:
            del self.times[each]
        return outdated
