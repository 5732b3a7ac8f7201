"""Whether routers know of load and caches what the log says: each at its own positions.

    router ── /metrics ──► View: its positions in the log, and what it knows there
    ledger, kv-events ──► the same folds, read to the same positions ──► must be the same

A page is made in one step, so positions and figures belong together whatever is under way; no
router has to stand still. Caches are compared by the hashes of their state. Reads no broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from app.http.folds import HASH_SHIFT
from app.routing.index import Index
from app.routing.load import Load
from streams.follow import Fold
from streams.ports import Partition
from streams.records import Fact
from streams.topics import LEDGER

K = TypeVar("K", str, Partition)

RUNS, TOKENS, PREFILL = "open_runs", "open_tokens", "prefill_tokens"
_LOADS = {f"kvlane_router_{name}": place for place, name in enumerate((RUNS, TOKENS, PREFILL))}


class Lies(NamedTuple):
    """What lies on a worker."""

    open_runs: int = 0
    open_tokens: int = 0
    prefill_tokens: int = 0


class Known(NamedTuple):
    """What somebody knows. `loads`: of workers on which something lies; `caches`: by partition of
    kv-events the upper bits of the state's hash."""

    loads: dict[str, Lies]
    caches: dict[Partition, int]


class View(NamedTuple):
    """What a router said of itself. `waiting`: requests; `undelivered`: own decisions unread."""

    router: str
    positions: dict[Partition, int]
    known: Known
    waiting: int = 0
    undelivered: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing lies on any worker, nor waits, as far as this router knows."""
        return not (self.known.loads or self.waiting or self.undelivered)


def view_of(router: str, page: str) -> View:
    """A page of metrics, in Prometheus' text format."""
    loads: dict[str, list[int]] = {}
    caches: dict[Partition, int] = {}
    positions: dict[Partition, int] = {}
    single: dict[str, int] = {}
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            if (place := _LOADS.get(name)) is not None:
                loads.setdefault(labels["worker"], [0, 0, 0])[place] = int(value)
            elif name == "kvlane_fold_position" and labels["fold"] in (Load.name, Index.name):
                positions[_source(labels)] = int(value)
            elif name == "kvlane_fold_state_hash":
                caches[_source(labels)] = int(value)
            elif name in ("kvlane_router_waiting_requests", "kvlane_router_undelivered_runs"):
                single[name.removeprefix("kvlane_router_")] = int(value)
    known = Known({w: Lies(*lies) for w, lies in loads.items() if any(lies)}, caches)
    return View(router, positions, known, single["waiting_requests"], single["undelivered_runs"])


def _source(labels: Mapping[str, str]) -> Partition:
    return Partition(labels["topic"], int(labels["partition"]))


class Truth:
    """The folds of a router, made of the log; positions only grow."""

    def __init__(
        self, records: Mapping[Partition, Sequence[Fact]], load: Load, index: Index
    ) -> None:
        """`records`: of the ledger and of kv-events, by partition, from its start on; the folds are
        empty."""
        self._records = records
        self._load, self._index = load, index
        self._read: dict[Partition, int] = {}

    def at(self, positions: Mapping[Partition, int]) -> Known:
        """What is known when so much is read."""
        for source, position in positions.items():
            self._advance(self._fold(source), source, position)
        loads = {
            worker: Lies(burden.runs, burden.tokens, burden.prefill_tokens)
            for worker, burden in self._load.burdens.by_worker().items()
        }
        caches = {
            source: int(self._index.state_hash(source), 16) >> HASH_SHIFT
            for source in positions
            if source.topic != LEDGER
        }
        return Known({worker: lies for worker, lies in loads.items() if any(lies)}, caches)

    def _fold(self, source: Partition) -> Fold:
        return self._load if source.topic == LEDGER else self._index

    def _advance(self, fold: Fold, source: Partition, position: int) -> None:
        records, read = self._records.get(source, ()), self._read.get(source, 0)
        first = read
        while read < len(records) and records[read].offset < position:
            read += 1
        self._read[source] = read
        fold.apply(source, records[first:read], position)


class Difference(NamedTuple):
    """Of a view from the log, about a worker's load or a partition's caches."""

    router: str
    about: str
    known: object
    true: object


def differences(views: Iterable[View], truth: Truth) -> Iterator[Difference]:
    """Of the views of one router, in the order in which they were taken, from the log."""
    for view in views:
        true = truth.at(view.positions)
        yield from _between(view.router, view.known, true)


def disagreements(views: Sequence[View]) -> Iterator[Difference]:
    """Of views of several routers from the first one, all taken at the same positions."""
    first = views[0]
    for view in views[1:]:
        if view.positions != first.positions:
            yield Difference(view.router, "positions", view.positions, first.positions)
        yield from _between(view.router, view.known, first.known)


def _between(router: str, known: Known, true: Known) -> Iterator[Difference]:
    yield from _unlike(router, known.loads, true.loads)
    yield from _unlike(router, known.caches, true.caches)


def _unlike(
    router: str, known: Mapping[K, object], true: Mapping[K, object]
) -> Iterator[Difference]:
    for about in {**known, **true}:
        if known.get(about) != true.get(about):
            yield Difference(router, str(about), known.get(about), true.get(about))
