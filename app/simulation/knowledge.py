"""What routers know of the simulated fleet: the folds that they have, told by the same records.

All routers read the same records equally late, so they share their folds (`Folds`, `Books`), and
differ in what each has decided and not yet read back (`Knowledge`). Heartbeats come once in
`HEARTBEAT_MS`, as from real workers, so the tokens that are being made are known as of the last
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.engine.batch import Shape, Step
from app.routing.burdens import Burdens
from app.routing.decisions import Chosen, Planned, View
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import KnownRun
from app.routing.paces import Paces
from app.routing.policies import Place
from app.routing.turns import NOT_LATER, Crowding
from app.simulation.traffic import SECRET
from app.simulation.worker import Worker
from indexer.events import CLEARED, Event, Kind, Tier, encode
from streams.ports import Partition
from streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Fact,
    Finished,
    Heartbeat,
    Inner,
    Origin,
    PrefillDone,
    RunProgress,
    WorkerCard,
)

HEARTBEAT_MS = 1000.0
TIMEOUT_MS = 5000
MODEL = "simulated"
REGISTRY, EVENTS = Partition("registry", 0), Partition("kv-events", 0)
_ORIGIN = Origin(topic="requests", partition=0, offset=0)

Told = Assigned | PrefillDone | Finished


class Folds:
    """Workers and their caches. `keys`: that of each chunk in the index."""

    def __init__(
        self,
        workers: Sequence[Worker],
        shape: Shape,
        keys: Mapping[int, int],
        *,
        tells_curves: bool,
    ) -> None:
        self.fleet = Fleet()
        self._index = Index(SECRET)
        self._unread: dict[Worker, list[Event]] = {}
        self._keys = keys
        self._positions: dict[Partition, int] = {}
        self._event_ids = dict.fromkeys([worker.epoch for worker in workers], 0)
        config = EngineConfig(
            model=MODEL, kv_cache_block_size=shape.block_size, total_kv_blocks=shape.blocks,
            max_num_seqs=shape.max_sequences, max_num_batched_tokens=shape.max_batched_tokens,
            curve=shape.curves.numbers() if tells_curves else None,
        )  # fmt: skip
        for worker in workers:
            card = WorkerCard(
                id=worker.name, slot=worker.epoch, model=MODEL, config=config, epoch=worker.epoch
            )
            self._tell(self.fleet, REGISTRY, card, 0.0)
            self._unread[worker] = [CLEARED]

    @property
    def index(self) -> Index:
        """The caches as they are told of until now.

        What came since somebody looked last is read now, in one record of each worker: a cache
        changes more often than a router looks.
        """
        if self._unread:
            for worker, events in self._unread.items():
                self._tell_blocks(worker, events)
            self._unread.clear()
        return self._index

    def beat(self, worker: Worker, now_ms: float) -> None:
        """A heartbeat; all its runs stand in one, since only their sum is looked at."""
        tokens = worker.output_tokens(now_ms)
        runs = RunProgress(id="all", attempt=0, phase="aggregated", output_tokens=tokens)
        self._tell(self.fleet, EVENTS, Heartbeat(
            worker=worker.name, epoch=worker.epoch, slot_offset=0, running=(runs,)
        ), now_ms)  # fmt: skip

    def cache_changed(self, worker: Worker, done: Step) -> None:
        """What a step evicted and computed, by its end."""
        keys, events = self._keys, self._unread.setdefault(worker, [])
        if done.removed:
            gone = tuple([keys[chunk] for chunk in done.removed])
            events.append(Event(Kind.REMOVED, keys=gone))
        for sequence, start, end in done.stored:
            stored = tuple([keys[chunk] for chunk in sequence.identities[start:end]])
            events.append(Event(Kind.STORED, Tier.DEVICE, start, stored))

    def _tell_blocks(self, worker: Worker, events: Sequence[Event]) -> None:
        first = self._event_ids[worker.epoch]
        self._event_ids[worker.epoch] = first + len(events)
        columns = encode(events)
        # Its time says only who is forgotten after a day of silence: nobody here.
        self._tell(self._index, EVENTS, Blocks(
            worker=worker.name, epoch=worker.epoch, first_event_id=first,
            hash_fingerprint=SECRET.fingerprint, kinds=columns.kinds, tiers=columns.tiers,
            positions=columns.positions, counts=columns.counts, keys=columns.keys,
        ), 0.0)  # fmt: skip

    def _tell(self, fold: Fleet | Index, source: Partition, record: Inner, at_ms: float) -> None:
        offset = self._positions.get(source, 0)
        self._positions[source] = offset + 1
        fold.apply(source, [Fact(offset, int(at_ms), record)], offset + 1)


class Books:
    """The ledger, as far as it was read.

    `burdens` are those of `app/routing/load.py`, whose rules make no difference here: each request
    has one run, each record comes once and in its order. To fold them cost a tenth of a replay.
    """

    def __init__(self, lag_ms: float = 0.0) -> None:
        self.burdens = Burdens()
        self.paces = Paces()
        self.crowding = Crowding(lag_ms)
        self._open: dict[str, KnownRun] = {}
        self._position = 0

    def told(self, record: Told, at_ms: float) -> None:
        """A record is read that was written at a time."""
        fact = Fact(self._position, int(at_ms), record)
        self._position += 1
        self._weigh(record, fact.timestamp_ms)
        self.paces.told(fact)
        self.crowding.told(fact)

    def _weigh(self, record: Told, at_ms: int) -> None:
        if isinstance(record, Assigned):
            place = Place(record.worker, record.epoch, record.rank)
            run = self._open[record.id] = KnownRun(
                "assigned", at_ms, record.prompt_tokens, record.rank, record.prefill_tokens
            )
            self.burdens.add(place, run.burden)
            return
        run = self._open[record.id]
        place, before = Place(record.worker, record.epoch, run.rank), run.burden
        if isinstance(record, Finished):
            self.burdens.remove(place, before)
            del self._open[record.id]
            return
        run.state, run.since_ms = "prefilled", at_ms
        self.burdens.add(place, run.burden.less(before))
        self.burdens.prefilled(place, at_ms)


class Knowledge:
    """What one router knows. `own`: its decisions that `books` do not tell yet."""

    def __init__(
        self, folds: Folds, books: Books, later_ms: Mapping[str, float] = NOT_LATER
    ) -> None:
        """`later_ms`: see `View`; it counts while requests come in bursts."""
        self._later_ms = later_ms
        self.folds = folds
        self.books = books
        self.own = Burdens()
        self._pools = Pools(folds.fleet, TIMEOUT_MS)

    def view(self, now_ms: float, others: Sequence[Planned]) -> View:
        """For `plan`, right until something is told. `others`: see `View`."""
        folds, books = self.folds, self.books
        return View(
            folds.fleet, self._pools, folds.index, books.burdens, self.own, int(now_ms),
            books.paces.output_tokens, books.paces.slowness, others,
            later_ms=self._later_ms if books.crowding.is_crowded else NOT_LATER,
            leads_to=books.paces.leads_to,
        )  # fmt: skip


def assigned(request_id: str, decision: Chosen) -> Assigned:
    """The record that a request was sent to a worker, with no candidate but that: none is read."""
    worker, epoch, rank = decision.place
    chosen = decision.inputs.candidate(decision.place)
    return Assigned(
        id=request_id, attempt=0, phase="aggregated", worker=worker, epoch=epoch, rank=rank,
        origin=_ORIGIN, responses_from=0, deadline_ms=0, prompt_tokens=decision.tokens,
        policy=decision.policy, params=decision.params, seed=decision.seed,
        block_size=decision.block_size, cached_tokens_predicted=decision.cached_tokens,
        prefill_tokens=decision.prefill_tokens, candidates=() if chosen is None else (chosen,),
        held_ms=decision.outlook.held_ms,
    )  # fmt: skip


def prefilled(
    request_id: str, worker: Worker, cached_tokens: int, prefill_ms: float
) -> PrefillDone:
    """The record of a first token, so long after its worker had the request."""
    return PrefillDone(
        id=request_id, attempt=0, phase="aggregated", worker=worker.name, epoch=worker.epoch,
        run=0, cached_tokens=cached_tokens, ttft_ms=prefill_ms, prefill_ms=prefill_ms,
    )  # fmt: skip


def finished(request_id: str, worker: Worker, output_tokens: int) -> Finished:
    """The record of a last token."""
    return Finished(
        id=request_id, attempt=0, phase="aggregated", worker=worker.name, epoch=worker.epoch,
        code="length", output_tokens=output_tokens,
    )  # fmt: skip
