"""What a router knows of the simulated fleet: the folds that it has, told by the same records.

Nothing is late here: what happens is read at once. Heartbeats come once in `HEARTBEAT_MS`, as from
real workers, so the tokens that are being made are known as of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.engine.batch import Shape, Step
from app.routing.burdens import Burdens
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.load import Load
from app.routing.paces import Paces
from app.routing.plan import Chosen, View
from app.routing.policies import Place
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
LEDGER = Partition("ledger", 0)
_KEPT_MS = 60_000
"""How long ended requests are remembered; no id comes twice here."""
_ORIGIN = Origin(topic="requests", partition=0, offset=0)


class Knowledge:
    """See the module. `keys`: that of each chunk in the index."""

    def __init__(self, workers: Sequence[Worker], shape: Shape, keys: Mapping[int, int]) -> None:
        self.load = Load(_KEPT_MS)
        self.fleet = Fleet()
        self.index = Index(SECRET)
        self.paces = Paces()
        self._pools = Pools(self.fleet, TIMEOUT_MS)
        self._own = Burdens()
        self._keys = keys
        self._positions: dict[Partition, int] = {}
        self._event_ids = dict.fromkeys([worker.epoch for worker in workers], 0)
        config = EngineConfig(
            model=MODEL, kv_cache_block_size=shape.block_size, total_kv_blocks=shape.blocks,
            max_num_seqs=shape.max_sequences, max_num_batched_tokens=shape.max_batched_tokens,
            curve=shape.curves.numbers(),
        )  # fmt: skip
        for worker in workers:
            card = WorkerCard(
                id=worker.name, slot=worker.epoch, model=MODEL, config=config, epoch=worker.epoch
            )
            self._tell(self.fleet, REGISTRY, card, 0.0)
            self._tell_blocks(worker, [CLEARED], 0.0)

    def view(self, now_ms: float, ahead_ms: Mapping[Place, Sequence[float]]) -> View:
        """For `plan`, right until something is told. `ahead_ms`: see `View`."""
        return View(
            self.fleet, self._pools, self.index, self.load.burdens, self._own, int(now_ms),
            self.paces.output_tokens, self.paces.slowness, ahead_ms,
        )  # fmt: skip

    def decided(self, request_id: str, decision: Chosen, now_ms: float) -> None:
        """A request was sent to a worker."""
        worker, epoch, rank = decision.place
        self._tell(self.load, LEDGER, Assigned(
            id=request_id, attempt=0, phase="aggregated", worker=worker, epoch=epoch, rank=rank,
            origin=_ORIGIN, responses_from=0, deadline_ms=0, prompt_tokens=decision.tokens,
            policy=decision.policy, params=decision.params, seed=decision.seed,
            block_size=decision.block_size, cached_tokens_predicted=decision.cached_tokens,
            prefill_tokens=decision.prefill_tokens, candidates=decision.candidates,
        ), now_ms)  # fmt: skip

    def prefilled(
        self, request_id: str, worker: Worker, cached_tokens: int, prefill_ms: float, now_ms: float
    ) -> None:
        """A request got its first token, so long after it was sent."""
        self._tell(self.load, LEDGER, PrefillDone(
            id=request_id, attempt=0, phase="aggregated", worker=worker.name, epoch=worker.epoch,
            run=0, cached_tokens=cached_tokens, ttft_ms=prefill_ms, prefill_ms=prefill_ms,
        ), now_ms)  # fmt: skip

    def finished(self, request_id: str, worker: Worker, output_tokens: int, now_ms: float) -> None:
        """A request got its last token."""
        self._tell(self.load, LEDGER, Finished(
            id=request_id, attempt=0, phase="aggregated", worker=worker.name, epoch=worker.epoch,
            code="length", output_tokens=output_tokens,
        ), now_ms)  # fmt: skip

    def beat(self, worker: Worker, now_ms: float) -> None:
        """A heartbeat; all its runs stand in one, since only their sum is looked at."""
        tokens = worker.output_tokens(now_ms)
        runs = RunProgress(id="all", attempt=0, phase="aggregated", output_tokens=tokens)
        self._tell(self.fleet, EVENTS, Heartbeat(
            worker=worker.name, epoch=worker.epoch, slot_offset=0, running=(runs,)
        ), now_ms)  # fmt: skip

    def cache_changed(self, worker: Worker, done: Step, now_ms: float) -> None:
        """What a step evicted and computed is known when it ends."""
        keys, events = self._keys, []
        if done.removed:
            gone = tuple([keys[chunk] for chunk in done.removed])
            events.append(Event(Kind.REMOVED, keys=gone))
        for sequence, start, end in done.stored:
            stored = tuple([keys[chunk] for chunk in sequence.identities[start:end]])
            events.append(Event(Kind.STORED, Tier.DEVICE, start, stored))
        if events:
            self._tell_blocks(worker, events, now_ms)

    def _tell_blocks(self, worker: Worker, events: Sequence[Event], now_ms: float) -> None:
        first = self._event_ids[worker.epoch]
        self._event_ids[worker.epoch] = first + len(events)
        columns = encode(events)
        self._tell(self.index, EVENTS, Blocks(
            worker=worker.name, epoch=worker.epoch, first_event_id=first,
            hash_fingerprint=SECRET.fingerprint, kinds=columns.kinds, tiers=columns.tiers,
            positions=columns.positions, counts=columns.counts, keys=columns.keys,
        ), now_ms)  # fmt: skip

    def _tell(
        self, fold: Load | Fleet | Index, source: Partition, record: Inner, now_ms: float
    ) -> None:
        offset = self._positions.get(source, 0)
        self._positions[source] = offset + 1
        fact = Fact(offset, int(now_ms), record)
        fold.apply(source, [fact], offset + 1)
        if fold is self.load:
            self.paces.told(fact)
