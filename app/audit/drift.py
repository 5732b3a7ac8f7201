"""Drift: error of the predicted cache hits and times to first token, against the engines' figures.

    Assigned    predicted: cached prompt tokens, time to first token, time between tokens
    Finished    actual: the same three figures

A view of the ledger over the last `WINDOW_MS`, the same in every router. While the index of a cache
is right, the error is at most `MAX_ERROR_BLOCKS` blocks for 95 % of its runs (`is_within_limit`),
by blocks that are cached between a decision and its prefill. A larger error means a wrong index (a
lost event, another hash secret, an engine with another hash or eviction), or a load so high that
caches change before requests arrive. Pure; `app/router.py` logs the alarm.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvlane.streams.records import Assigned, Finished, LogRecord, RunKey

WINDOW_MS = 600_000
MAX_RUNS = 256
"""Maximum runs kept per worker; beyond, the window is shorter."""
MIN_RUNS = 20
"""Minimum runs for a percentile; with fewer, a single run would decide it."""
MAX_ERROR_BLOCKS = 1.0
MAX_OPEN_DECISIONS = 65_536
"""Maximum decisions kept whose runs have not ended; the oldest are dropped."""
_WORKERS = 4096
COMPLETE = frozenset({"stop", "length", "handed_off"})
"""Codes of runs whose figures count."""


class PredictionError(msgspec.Struct, frozen=True, gc=False):
    """Absolute errors of one run: cached tokens in blocks; time to first token in ms, if one was
    predicted. `ttft_share`, `itl_share`: of the times to first token and between tokens, as shares
    of the measured ones. `prompt_tokens`, `cached_tokens`: its prompt, and the part the engine had.
    """

    at_ms: int
    blocks: float
    ttft_ms: float | None
    ttft_share: float | None
    itl_share: float | None
    prompt_tokens: int
    cached_tokens: int


class ErrorShares(NamedTuple):
    """Median and 90th percentile of |predicted - measured| / measured."""

    median: float
    p90: float


class DriftSummary(NamedTuple):
    """95th percentiles of the absolute errors of some runs, and the shares of the measured times
    that they are. None: too few runs."""

    runs: int = 0
    blocks: float | None = None
    ttft_ms: float | None = None
    ttft_error: ErrorShares | None = None
    itl_error: ErrorShares | None = None

    @property
    def is_within_limit(self) -> bool | None:
        """Whether the error is within MAX_ERROR_BLOCKS; None for too few runs."""
        return None if self.blocks is None else self.blocks <= MAX_ERROR_BLOCKS


class _Expected(msgspec.Struct, frozen=True, gc=False):
    worker: str
    epoch: int
    prompt_tokens: int
    cached_tokens: int
    block_size: int
    ttft_ms: float
    itl_ms: float


class DriftTracker:
    def __init__(self) -> None:
        self._expected: OrderedDict[RunKey, _Expected] = OrderedDict()
        self._differences: OrderedDict[str, deque[PredictionError]] = OrderedDict()

    def on_record(self, log_record: LogRecord, *, is_replay: bool = False) -> None:  # noqa: ARG002  old runs count
        record = log_record.record
        if type(record) is Assigned:
            # Engines count the blocks that a decode worker has fetched as cached, too.
            if record.block_size and record.has_candidates and record.phase != "decode":
                self._expect(record)
        elif type(record) is Finished:
            expected = self._expected.pop(record.run_key, None)
            if expected is not None and record.code in COMPLETE:
                self._add_difference(log_record.timestamp_ms, expected, record)

    def _expect(self, decision: Assigned) -> None:
        self._expected[decision.run_key] = _Expected(
            decision.worker, decision.epoch, decision.prompt_tokens,
            decision.cached_tokens_predicted, decision.block_size, decision.ttft_ms_predicted,
            decision.itl_ms_predicted,
        )  # fmt: skip
        while len(self._expected) > MAX_OPEN_DECISIONS:
            self._expected.popitem(last=False)

    def _add_difference(self, at_ms: int, expected: _Expected, end: Finished) -> None:
        if (end.worker, end.epoch) != (expected.worker, expected.epoch):
            return
        tokens = abs(expected.cached_tokens - end.cached_tokens)
        ttft_ms = abs(expected.ttft_ms - end.ttft_ms) if expected.ttft_ms else None
        if (found := self._differences.get(end.worker)) is None:
            found = self._differences[end.worker] = deque(maxlen=MAX_RUNS)
            if len(self._differences) > _WORKERS:
                self._differences.popitem(last=False)
        found.append(
            PredictionError(
                at_ms,
                tokens / expected.block_size,
                ttft_ms,
                error_share(expected.ttft_ms, end.ttft_ms),
                error_share(expected.itl_ms, end.itl_ms),
                expected.prompt_tokens,
                end.cached_tokens,
            )
        )

    def workers_with_runs(self, now_ms: int) -> list[str]:
        for worker, found in list(self._differences.items()):
            while found and found[0].at_ms <= now_ms - WINDOW_MS:
                found.popleft()
            if not found:
                del self._differences[worker]
        return sorted(self._differences)

    def summary_of(self, workers: Iterable[str], now_ms: int) -> DriftSummary:
        """Summary over the runs of these workers in the window before a broker time."""
        found = [each for worker in workers for each in self._recent(worker, now_ms)]
        ttft_ms = [each.ttft_ms for each in found if each.ttft_ms is not None]
        return DriftSummary(
            len(found), _percentile(95, [each.blocks for each in found]), _percentile(95, ttft_ms),
            error_shares([each.ttft_share for each in found]),
            error_shares([each.itl_share for each in found]),
        )  # fmt: skip

    def hit_rate(self, worker: str, now_ms: int) -> float | None:
        """Cached part of the prompt tokens of these runs, by its engine; None without a token."""
        found = self._recent(worker, now_ms)
        tokens = sum(each.prompt_tokens for each in found)
        cached = sum(min(each.cached_tokens, each.prompt_tokens) for each in found)
        return cached / tokens if tokens else None

    def _recent(self, worker: str, now_ms: int) -> list[PredictionError]:
        since_ms = now_ms - WINDOW_MS
        return [each for each in self._differences.get(worker, ()) if each.at_ms > since_ms]


class DriftAlarm:
    """Detects when the error of a worker leaves the limit, or returns to it."""

    def __init__(self) -> None:
        self._raised: set[str] = set()

    def take_changes(self, drift: DriftTracker, now_ms: int) -> list[tuple[str, DriftSummary]]:
        """Workers whose state has changed since the last call."""
        changed = []
        workers = drift.workers_with_runs(now_ms)
        for worker in workers:
            now = drift.summary_of([worker], now_ms)
            if now.is_within_limit is not None and now.is_within_limit == (worker in self._raised):
                changed.append((worker, now))
        self._raised &= {*workers}
        self._raised ^= {worker for worker, _ in changed}
        return changed


def error_share(predicted_ms: float, measured_ms: float | None) -> float | None:
    """|predicted - measured| / measured; None if either is missing."""
    if not predicted_ms or not measured_ms:
        return None
    return abs(predicted_ms - measured_ms) / measured_ms


def error_shares(found: Sequence[float | None]) -> ErrorShares | None:
    """Percentiles of error shares; None for too few values."""
    values = [each for each in found if each is not None]
    values.sort()  # once for both
    median, p90 = _percentile(50, values), _percentile(90, values)
    return None if median is None or p90 is None else ErrorShares(median, p90)


def _percentile(percent: int, values: Sequence[float]) -> float | None:
    """A percentile (nearest rank); None for too few values."""
    if len(values) < MIN_RUNS:
        return None
    return sorted(values)[-(-percent * len(values) // 100) - 1]
