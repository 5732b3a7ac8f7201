"""When workers were last heard of, so that those who went for good can be forgotten.

The time is that of the records of one partition, so that what is forgotten is a function of the
records, as everything in a fold.
"""

from __future__ import annotations

from collections.abc import Iterator

KEPT_MS = 24 * 3600 * 1000
"""How long a name is remembered after its last record: as long as kv-events are kept, and as the
registry is not compacted."""


class Signs:
    """Names and the times of their last records, in the order of these."""

    def __init__(self, times: dict[str, int] | None = None) -> None:
        self.times = times or {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.times)

    def note(self, name: str, at_ms: int) -> list[str]:
        """A record came; returns the names whose last one is too long ago, forgotten here now."""
        self.times.pop(name, None)
        self.times[name] = at_ms
        outdated = []
        for each, time in self.times.items():
            if time >= at_ms - KEPT_MS:
                break
            outdated.append(each)
        for each in outdated:
            del self.times[each]
        return outdated
