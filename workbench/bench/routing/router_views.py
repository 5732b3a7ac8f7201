"""Comparison of the load and cache state of routers with the log, at each router's positions.

    router ── /metrics ──► RouterView: its positions in the log, and its state there
    ledger, kv-events ──► the same views, applied up to the same positions ──► must be equal

A metrics page is rendered in one step of the event loop, so its positions and figures are
consistent, and no router has to be paused. Caches are compared by the hashes of their state. Reads
no broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from kvlane.app.metrics.indexer_metrics import HASH_SHIFT
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.ledger import LedgerState
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord
from kvlane.streams.topics import LEDGER
from kvlane.streams.views.view import MaterializedView

K = TypeVar("K", str, Partition)

ACTIVE_REQUESTS, ACTIVE_TOKENS, PENDING_PREFILL_TOKENS = (
    "active_requests",
    "active_tokens",
    "pending_prefill_tokens",
)
_LOADS = {
    f"kvlane_router_{name}": place
    for place, name in enumerate((ACTIVE_REQUESTS, ACTIVE_TOKENS, PENDING_PREFILL_TOKENS))
}


class LoadFigures(NamedTuple):
    open_runs: int = 0
    open_tokens: int = 0
    prefill_tokens: int = 0


class RouterFigures(NamedTuple):
    """State of a router. `loads`: of workers with active load; `caches`: upper bits of the state
    hash, by partition of kv-events."""

    loads: dict[str, LoadFigures]
    caches: dict[Partition, int]


class RouterView(NamedTuple):
    """State that a router reports.

    `queued`: queued requests; `unconfirmed`: its own decisions that it has not read back yet.
    """

    router: str
    positions: dict[Partition, int]
    figures: RouterFigures
    queued: int = 0
    unconfirmed: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether this router has no active load and no queued request."""
        return not (self.figures.loads or self.queued or self.unconfirmed)


def parse_view(router: str, page: str) -> RouterView:
    """Parse a page of metrics, in Prometheus' text format."""
    loads: dict[str, list[int]] = {}
    caches: dict[Partition, int] = {}
    positions: dict[Partition, int] = {}
    single: dict[str, int] = {}
    for family in text_string_to_metric_families(page):
        for name, labels, value, *_ in family.samples:
            if (place := _LOADS.get(name)) is not None:
                loads.setdefault(labels["worker"], [0, 0, 0])[place] = int(value)
            elif name == "kvlane_view_offset" and labels["view"] in (
                LedgerState.name,
                KvIndexView.name,
            ):
                positions[_source(labels)] = int(value)
            elif name == "kvlane_view_state_hash":
                caches[_source(labels)] = int(value)
            elif name in ("kvlane_router_queued_requests", "kvlane_router_unconfirmed_assignments"):
                single[name.removeprefix("kvlane_router_")] = int(value)
    known = RouterFigures({w: LoadFigures(*lies) for w, lies in loads.items() if any(lies)}, caches)
    return RouterView(
        router, positions, known, single["queued_requests"], single["unconfirmed_assignments"]
    )


def _source(labels: Mapping[str, str]) -> Partition:
    return Partition(labels["topic"], int(labels["partition"]))


class ReferenceState:
    """The views of a router, applied from the log; positions only grow."""

    def __init__(
        self,
        records: Mapping[Partition, Sequence[LogRecord]],
        load: LedgerState,
        index: KvIndexView,
    ) -> None:
        """`records`: ledger and kv-events by partition, from offset 0; the views are empty."""
        self._records = records
        self._load, self._index = load, index
        self._read: dict[Partition, int] = {}

    def at(self, positions: Mapping[Partition, int]) -> RouterFigures:
        """The state after reading up to these positions."""
        for source, position in positions.items():
            self._advance(self._view(source), source, position)
        loads = {
            worker: LoadFigures(load.runs, load.tokens, load.prefill_tokens)
            for worker, load in self._load.active_load.by_worker().items()
        }
        caches = {
            source: int(self._index.state_hash(source), 16) >> HASH_SHIFT
            for source in positions
            if source.topic != LEDGER
        }
        return RouterFigures({worker: lies for worker, lies in loads.items() if any(lies)}, caches)

    def _view(self, source: Partition) -> MaterializedView:
        return self._load if source.topic == LEDGER else self._index

    def _advance(self, view: MaterializedView, source: Partition, position: int) -> None:
        records, read = self._records.get(source, ()), self._read.get(source, 0)
        first = read
        while read < len(records) and records[read].offset < position:
            read += 1
        self._read[source] = read
        view.apply(source, records[first:read], position)


class StateDifference(NamedTuple):
    """A difference in the load of a worker or in the caches of a partition."""

    router: str
    key: str
    actual: object
    expected: object


def differences(views: Iterable[RouterView], truth: ReferenceState) -> Iterator[StateDifference]:
    """Differences of the views of one router, in the order of scraping, from the log."""
    for view in views:
        true = truth.at(view.positions)
        yield from _between(view.router, view.figures, true)


def disagreements(views: Sequence[RouterView]) -> Iterator[StateDifference]:
    """Differences of the views of several routers from the first one, at the same positions."""
    first = views[0]
    for view in views[1:]:
        if view.positions != first.positions:
            yield StateDifference(view.router, "positions", view.positions, first.positions)
        yield from _between(view.router, view.figures, first.figures)


def _between(router: str, known: RouterFigures, true: RouterFigures) -> Iterator[StateDifference]:
    yield from _unlike(router, known.loads, true.loads)
    yield from _unlike(router, known.caches, true.caches)


def _unlike(
    router: str, known: Mapping[K, object], true: Mapping[K, object]
) -> Iterator[StateDifference]:
    for about in {**known, **true}:
        if known.get(about) != true.get(about):
            yield StateDifference(router, str(about), known.get(about), true.get(about))
