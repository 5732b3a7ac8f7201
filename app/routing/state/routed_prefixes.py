"""Routed prefixes: prompts that count as cached where they were sent, from the decision on.

The index has the blocks of a prompt only when its first cache event is read, and never those of an
engine without events. A decision therefore records the keys of its prompt at some depths (*marks*,
8 an octave), and prompts that begin alike are estimated by the deepest mark that they share. A mark
counts until the first token of its run; without events of that cache, for `TIME_TO_LIVE_MS`. A run
that ends without a first token leaves none.

The cached tokens that workers report correct the estimate: of engines without events none counts
before one has reported a hit; and where less than half of the estimate was true, lately, none
counts on that worker, until it is tried again.

A fold of the ledger, so that routers agree and a restarted one has the same marks; besides, the
decisions of this router that are not read back. Bounded by `MAX_MARKS`: the oldest are dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.indexer.block_hashes import prompt_keys
from kvlane.streams.records import Assigned, Finished, LogRecord, PrefillDone, RunKey

TIME_TO_LIVE_MS = 120_000
MAX_MARKS = 100_000
"""About 35 MB; two minutes of 20 prompts a second with 600 blocks."""
MAX_PLACES = 16
"""Places that are found for a prompt, those with most of it first."""
MAX_WORKERS = 10_000
MAX_BLOCKS = 1 << 20
"""Blocks of the prompts whose keys are remembered: 8 MB of hashes."""
TRUST_STEP, MIN_TRUST = 0.125, 0.5
"""Share of the last report in the mean share of estimates that were true; and the least mean."""


def _depths() -> list[int]:
    found = [1]
    while found[-1] < 1 << 24:
        found.append(max(found[-1] + 1, int(found[-1] * 2 ** (1 / 8))))
    return found


DEPTHS = _depths()
"""Depths of marks, in blocks."""
_PLACES = np.array(DEPTHS) - 1
_KEY = np.dtype("<u8")


class _Routed(msgspec.Struct, eq=False):
    """A prompt that was sent to a place. `until_ms`: how long it counts. `predicted`, `estimated`:
    its tokens that were expected in the cache, and the part of them by other routed prompts.
    """

    place: WorkerRank
    keys: list[int]
    until_ms: int
    predicted: int
    estimated: float
    is_read: bool = False
    is_computed: bool = False


class _Trust(msgspec.Struct):
    """The mean share of the estimates for a worker that were true, and its last change."""

    share: float
    at_ms: int


class RoutedPrefixes:
    def __init__(self, caches: KvIndexView) -> None:
        self._caches = caches
        self._runs: OrderedDict[RunKey, _Routed] = OrderedDict()
        """Without a first token, and those whose caches have no events: in order of time."""
        self._holders: dict[int, dict[WorkerRank, list[_Routed]]] = {}
        """By key, the prompts with that mark at each place."""
        self._marks = 0
        self._has_hits = False
        self._trust: OrderedDict[str, _Trust] = OrderedDict()
        self._keys: dict[int, tuple[NDArray[np.uint64], list[int]]] = {}
        """By the identity of a prompt's hashes, unique for as long as they are here."""
        self._key_blocks = 0

    def __len__(self) -> int:
        return self._marks

    def marks_of(self, local: NDArray[np.uint64]) -> bytes:
        """The marks of a prompt by its local hashes, as `Assigned` records them."""
        return np.array(self._keys_of(local), _KEY).tobytes()

    def find(self, local: NDArray[np.uint64], now_ms: int) -> Collection[tuple[WorkerRank, int]]:
        """The places that a prompt with this beginning was sent to, with its blocks there."""
        if not self._holders or not len(local):
            return ()
        keys, holders = self._keys_of(local), self._holders
        low, high = 0, len(keys)
        while low < high:  # a prompt has all marks up to its last one
            middle = (low + high) // 2
            low, high = (middle + 1, high) if keys[middle] in holders else (low, middle)
        found: dict[WorkerRank, int] = {}
        for n in range(low - 1, -1, -1):
            for place, prompts in holders.get(keys[n], {}).items():
                if place not in found and any(
                    self._counts(routed, now_ms) for routed in reversed(prompts)
                ):
                    found[place] = DEPTHS[n]
            if len(found) >= MAX_PLACES:
                break
        return found.items()

    def _counts(self, routed: _Routed, now_ms: int) -> bool:
        if now_ms >= routed.until_ms:
            return False
        has_events = routed.place.worker in self._caches.publishing
        if not (has_events or self._has_hits):
            return False
        trust = self._trust.get(routed.place.worker)
        if trust is not None and trust.share < MIN_TRUST:
            return now_ms - trust.at_ms > TIME_TO_LIVE_MS
        return not (routed.is_computed and has_events)

    def _keys_of(self, local: NDArray[np.uint64]) -> list[int]:
        if not len(local):
            return []
        known = self._keys.get(id(local))
        if known is None:
            self._key_blocks += len(local)
            if self._key_blocks > MAX_BLOCKS:
                self._keys.clear()
                self._key_blocks = len(local)
            places = _PLACES[: bisect_right(DEPTHS, len(local))]
            known = self._keys[id(local)] = (
                local,
                prompt_keys(local, self._caches.secret)[places].tolist(),
            )
        return known[1]

    # --- changes ---------------------------------------------------------------------------------

    def add(
        self, run: RunKey, place: WorkerRank, marks: bytes, at_ms: int, *,
        predicted: int = 0, estimated: float = 0.0, is_read: bool = False,
    ) -> None:  # fmt: skip
        """Let a prompt count at a place. `is_read`: its decision is in the ledger."""
        if (known := self._runs.get(run)) is not None and known.place == place:
            known.predicted, known.estimated, known.is_read = predicted, estimated, is_read
            known.until_ms = at_ms + TIME_TO_LIVE_MS
            self._runs.move_to_end(run)
            return
        self._drop(run)
        if len(marks) % _KEY.itemsize:
            return
        keys: list[int] = np.frombuffer(marks, _KEY).tolist()
        if not keys:
            return
        until_ms = at_ms + TIME_TO_LIVE_MS
        routed = _Routed(place, keys, until_ms, predicted, estimated, is_read)
        self._runs[run] = routed
        self._marks += len(keys)
        for key in keys:
            self._holders.setdefault(key, {}).setdefault(place, []).append(routed)
        while self._marks > MAX_MARKS:
            self._drop(next(iter(self._runs)))

    def discard_unread(self, run: RunKey) -> None:
        """Forget a decision of this router that was not written."""
        if (routed := self._runs.get(run)) is not None and not routed.is_read:
            self._drop(run)

    def on_record(self, log_record: LogRecord) -> None:
        record, at_ms = log_record.record, log_record.timestamp_ms
        if type(record) is Assigned:
            if record.prefix_marks:
                self.add(
                    record.run_key, WorkerRank(record.worker, record.epoch, record.rank),
                    record.prefix_marks, at_ms, predicted=record.cached_tokens_predicted,
                    estimated=record.params.get("estimated_tokens", 0.0), is_read=True,
                )  # fmt: skip
            self._expire(at_ms)
        elif type(record) is PrefillDone:
            self._has_hits |= record.cached_tokens > 0
            self._on_first_token(record, at_ms)
        elif type(record) is Finished:
            routed = self._run(record)
            if routed is not None and not routed.is_computed:
                self._drop(record.run_key)

    def _run(self, record: PrefillDone | Finished) -> _Routed | None:
        routed = self._runs.get(record.run_key)
        is_there = routed is not None and routed.place[:2] == (record.worker, record.epoch)
        return routed if is_there else None

    def _on_first_token(self, done: PrefillDone, at_ms: int) -> None:
        if (routed := self._run(done)) is None:
            return
        if routed.estimated > 0:
            true = (done.cached_tokens - routed.predicted) / routed.estimated + 1.0
            self._report(done.worker, min(max(true, 0.0), 1.0), at_ms)
        if routed.place.worker in self._caches.publishing:
            self._drop(done.run_key)
            return
        routed.is_computed = True
        routed.until_ms = at_ms + TIME_TO_LIVE_MS
        self._runs.move_to_end(done.run_key)

    def _report(self, worker: str, share: float, at_ms: int) -> None:
        trust = self._trust.setdefault(worker, _Trust(1.0, at_ms))
        if at_ms - trust.at_ms > TIME_TO_LIVE_MS:
            trust.share = 1.0
        trust.share += TRUST_STEP * (share - trust.share)
        trust.at_ms = at_ms
        if len(self._trust) > MAX_WORKERS:
            self._trust.popitem(last=False)

    def _expire(self, at_ms: int) -> None:
        while self._runs and next(iter(self._runs.values())).until_ms <= at_ms:
            self._drop(next(iter(self._runs)))

    def _drop(self, run: RunKey) -> None:
        routed = self._runs.pop(run, None)
        if routed is None:
            return
        self._marks -= len(routed.keys)
        for key in routed.keys:
            places = self._holders[key]
            places[routed.place].remove(routed)
            if not places[routed.place]:
                del places[routed.place]
                if not places:
                    del self._holders[key]
