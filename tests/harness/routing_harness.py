"""A routing harness: router state set up worker by worker, and the record of a decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvlane.app.routing.selection.decision import (
    Decision,
    Placement,
    PlannedReservations,
    RoutingState,
)
from kvlane.app.routing.selection.eligibility import CandidatePools
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.selection.select import select_worker
from kvlane.app.routing.state.active_load import ActiveLoad, WorkerLoad
from kvlane.app.routing.state.fleet import Fleet, WorkerRank
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.app.routing.state.silent_workers import SilentWorkers
from kvlane.indexer.block_hashes import derive_secret, prompt_keys
from kvlane.indexer.events import CacheEvent, EventKind, Tier, encode_events
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Heartbeat,
    LogRecord,
    RequestOffset,
    WorkerCard,
)
from kvlane.streams.request import Hints, Request

NOW_MS = 2000
TIMEOUT_MS = 5000
SECRET = derive_secret(b"test")
REGISTRY, EVENTS = Partition("registry", 0), Partition("kv-events", 0)
TOKENS = pack_tokens(list(range(160)))  # ten blocks of 16


class RoutingHarness:
    """Router state that a test sets up worker by worker; a worker's epoch is its number."""

    def __init__(self) -> None:
        self.fleet, self.index = Fleet(), KvIndexView(SECRET)
        self.got, self.own = ActiveLoad(), ActiveLoad()
        self.silent = SilentWorkers(self.fleet, TIMEOUT_MS / 1000)
        self.pools = CandidatePools(self.fleet, self.silent)
        self.fleet.apply(REGISTRY, [], 100)
        self.epochs: dict[str, int] = {}

    def worker(self, name: str, block_size: int = 16, **over: Any) -> str:
        epoch = self.epochs[name] = len(self.epochs)
        engine = over.pop("engine", {})
        engine.setdefault("transfer_lease_s", 30.0)
        config = EngineConfig(model="m", kv_cache_block_size=block_size, **engine)
        card = {"id": name, "slot": 0, "model": "m", "config": config, "epoch": epoch}
        self.registry(WorkerCard(**(card | over)))
        self.send_heartbeat(name)
        return name

    def workers(self, *names: str) -> None:
        for name in names:
            self.worker(name)

    def registry(self, record: Any) -> None:
        position = self.fleet.position(REGISTRY) or 0
        self.fleet.apply(REGISTRY, [LogRecord(position, 0, record)], position + 1)

    def event(self, record: Any, at_ms: int = 1500) -> None:
        for view in (self.fleet, self.index):
            position = view.position(EVENTS) or 0
            view.apply(EVENTS, [LogRecord(position, at_ms, record)], position + 1)
        self.silent.on_records([LogRecord(0, at_ms, record)], at_ms / 1000)

    def send_heartbeat(self, name: str, at_ms: int = 1500, **over: Any) -> None:
        fields = {"worker": name, "epoch": self.epochs[name], "slot_offset": 0} | over
        self.event(Heartbeat(**fields), at_ms)

    def add_blocks(
        self, name: str, blocks: int, tier: Tier = Tier.DEVICE, rank: int = 0, **over: Any
    ) -> None:
        """Put the first blocks of the prompt into a worker's cache."""
        local = PromptHashes(Request(id="-", token_ids=TOKENS, **over)).local_hashes(16)[:blocks]
        keys = prompt_keys(local, SECRET).tolist()
        columns = encode_events([CacheEvent(EventKind.STORED, tier, 0, tuple(keys))])
        self.event(Blocks(worker=name, epoch=self.epochs[name], first_event_id=0, rank=rank,
                          hash_fingerprint=SECRET.fingerprint, **columns._asdict()))  # fmt: skip

    def add_load(
        self, name: str, tokens: int, prefill: int = 0, rank: int = 0, since_ms: int | None = None
    ) -> None:
        """Add a run; with `since_ms` it has been waiting for its first token since then."""
        waiting = () if since_ms is None else (1, since_ms)
        self.got.add(
            WorkerRank(name, self.epochs[name], rank), WorkerLoad(1, tokens, prefill, *waiting)
        )

    def plan(
        self, tuning: RoutingConfig | str = "dynamo", seed: int = 1, now_ms: int = NOW_MS,
        request: Request | None = None, known: dict[str, Any] | None = None, **over: Any,
    ) -> Decision:  # fmt: skip
        """`known`: what else is in the view; `over`: arguments of `select_worker`."""
        self.silent.update(now_ms / 1000)
        base = RoutingState(self.fleet, self.pools, self.index, self.got, self.own, now_ms)
        view = replace(base, **known or {})
        tuning = RoutingConfig(tuning) if isinstance(tuning, str) else tuning
        request = request or Request(id="a", model="m", token_ids=TOKENS)
        return select_worker(PromptHashes(request), view, tuning, seed=seed, **over)

    def chosen(self, *args: Any, **over: Any) -> Placement:
        planned = self.plan(*args, **over)
        assert isinstance(planned, Placement), planned
        return planned

    def plan_hints(self, **over: Any) -> Decision:
        request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(**over))
        return self.plan(request=request)


def planned_reservations(each: Sequence[tuple[WorkerRank, float]]) -> PlannedReservations:
    """Reservations for these places, with the prefill of each."""
    return PlannedReservations(
        [place for place, _ in each], np.arange(len(each)), np.array([ms for _, ms in each])
    )


def reserved(planned: PlannedReservations) -> list[tuple[WorkerRank, float]]:
    """Place and prefill of the reservations that count."""
    pairs = zip(planned.numbers.tolist(), planned.prefill_ms.tolist(), strict=True)
    return [
        (planned.worker_ranks[number], prefill_ms)
        for at, (number, prefill_ms) in enumerate(pairs)
        if number >= 0 and at != planned.own
    ]


def to_assigned(decision: Placement, **over: Any) -> Assigned:
    """The ledger record of a decision."""
    worker, epoch, rank = decision.worker_rank
    fields = {"origin": RequestOffset(topic="requests", partition=0, offset=0), "responses_from": 0}
    fields |= {"id": "a", "attempt": 0, "phase": "aggregated", "deadline_ms": 0}
    fields |= {
        "candidate_rows": decision.record,
        "cached_tokens_predicted": decision.cached_tokens,
        "prefill_tokens": decision.prefill_tokens,
        "ttft_ms_predicted": decision.forecast.ttft_ms,
        "itl_ms_predicted": decision.forecast.itl_ms,
    }
    return Assigned(
        worker=worker, epoch=epoch, rank=rank, prompt_tokens=decision.tokens,
        policy=decision.policy, params=decision.params, seed=decision.seed,
        block_size=decision.block_size, **(fields | over),
    )  # fmt: skip
