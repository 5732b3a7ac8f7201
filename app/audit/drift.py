"""Drift: how far what routers expect of caches and first tokens is from what engines then find.

    Assigned    so many tokens of the prompt are in the cache there, and so soon comes its first one
    Finished    so many were, and so soon it came

A fold of the ledger over the last `WINDOW_MS`, the same in every router. While the view of a cache
is right, nearly all expectations are: the difference, in blocks, is at most `MOST_BLOCKS` for 95 in
100 runs (`holds`). What is cached in the moments between a decision and its prefill makes the rest.
If it does not hold, a view is wrong (a lost event, another hash secret, an engine that hashes or
evicts in another way), or so much comes at once that caches change before requests get there.

Pure: times are in the records and handed in. Who raises the alarm is `app/router.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from streams.records import Assigned, Fact, Finished, RunKey

WINDOW_MS = 600_000
MOST_RUNS = 256
"""Of one worker that are remembered; beyond, the window is shorter."""
FEWEST_RUNS = 20
"""With less, one run more or less decides: nothing is said."""
MOST_BLOCKS = 1.0
REMEMBERED = 65_536
"""Decisions whose runs have not ended; the oldest are forgotten."""
_WORKERS = 4096


class Difference(NamedTuple):
    """Of one run, without signs: cached tokens in blocks; time to the first token in ms, if any was
    expected.
    """

    at_ms: int
    blocks: float
    ttft_ms: float | None


class Drifted(NamedTuple):
    """Of some runs: for 95 in 100 of them the difference is at most this. None: too few runs."""

    runs: int = 0
    blocks: float | None = None
    ttft_ms: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether caches are what they are expected to be; None while nobody can tell."""
        return None if self.blocks is None else self.blocks <= MOST_BLOCKS


class _Expected(NamedTuple):
    worker: str
    epoch: int
    cached_tokens: int
    block_size: int
    ttft_ms: float


class Drift:
    """See the module."""

    def __init__(self) -> None:
        self._expected: dict[RunKey, _Expected] = {}
        self._found: dict[str, deque[Difference]] = {}

    def told(self, fact: Fact) -> None:
        """A record of the ledger; others change nothing."""
        record = fact.record
        if isinstance(record, Assigned):
            if record.block_size and record.candidates:
                self._expect(record)
        elif isinstance(record, Finished):
            expected = self._expected.pop(RunKey(record.id, record.attempt, record.phase), None)
            if expected is not None and record.code in ("stop", "length"):
                self._find(fact.timestamp_ms, expected, record)

    def _expect(self, decision: Assigned) -> None:
        self._expected[RunKey(decision.id, decision.attempt, decision.phase)] = _Expected(
            decision.worker, decision.epoch, decision.cached_tokens_predicted, decision.block_size,
            decision.ttft_ms_predicted,
        )  # fmt: skip
        while len(self._expected) > REMEMBERED:
            del self._expected[next(iter(self._expected))]

    def _find(self, at_ms: int, expected: _Expected, end: Finished) -> None:
        if (end.worker, end.epoch) != (expected.worker, expected.epoch):
            return
        tokens = abs(expected.cached_tokens - end.cached_tokens)
        ttft_ms = abs(expected.ttft_ms - end.ttft_ms) if expected.ttft_ms else None
        found = self._found.setdefault(end.worker, deque(maxlen=MOST_RUNS))
        found.append(Difference(at_ms, tokens / expected.block_size, ttft_ms))
        while len(self._found) > _WORKERS:
            del self._found[next(iter(self._found))]

    def workers(self, now_ms: int) -> list[str]:
        """Those of whose runs the window has any."""
        for worker, found in list(self._found.items()):
            while found and found[0].at_ms <= now_ms - WINDOW_MS:
                found.popleft()
            if not found:
                del self._found[worker]
        return sorted(self._found)

    def of(self, workers: Iterable[str], now_ms: int) -> Drifted:
        """The runs of some workers together, of the window before a time of the broker."""
        since_ms = now_ms - WINDOW_MS
        found = [
            each for worker in workers for each in self._found.get(worker, ()) if each[0] > since_ms
        ]
        ttft_ms = [ms for _, _, ms in found if ms is not None]
        return Drifted(len(found), _p95([blocks for _, blocks, _ in found]), _p95(ttft_ms))


class Alarm:
    """Says when a worker begins or ceases to be one of whom it does not hold."""

    def __init__(self) -> None:
        self._raised: set[str] = set()

    def changes(self, drift: Drift, now_ms: int) -> list[tuple[str, Drifted]]:
        """Workers of whom it holds no longer, or again, since this was asked last."""
        changed = []
        workers = drift.workers(now_ms)
        for worker in workers:
            now = drift.of([worker], now_ms)
            if now.holds is not None and now.holds == (worker in self._raised):
                changed.append((worker, now))
        self._raised &= {*workers}
        self._raised ^= {worker for worker, _ in changed}
        return changed


def _p95(values: Sequence[float]) -> float | None:
    """The least of them that 95 in 100 do not exceed; None for too few."""
    if len(values) < FEWEST_RUNS:
        return None
    return sorted(values)[-(-95 * len(values) // 100) - 1]
