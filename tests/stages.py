"""A view to plan in, set up worker by worker, and what the ledger gets of a decision."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from app.routing.burdens import Burden, Burdens
from app.routing.decisions import Chosen, Plan, Tuning, View
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.plan import plan
from app.routing.policies import Place
from app.routing.prompt import Prompt
from indexer.events import Event, Kind, Tier, encode
from indexer.keys import derive, prompt_keys
from streams.codecs import pack_tokens
from streams.ports import Partition
from streams.records import (
    Assigned,
    Blocks,
    EngineConfig,
    Fact,
    Heartbeat,
    Hints,
    Origin,
    Request,
    WorkerCard,
)

NOW_MS = 2000
TIMEOUT_MS = 5000
SECRET = derive(b"test")
REGISTRY, EVENTS = Partition("registry", 0), Partition("kv-events", 0)
TOKENS = pack_tokens(list(range(160)))  # ten blocks of 16


class Stage:
    """A view that a test sets up worker by worker; a worker's epoch is its number."""

    def __init__(self) -> None:
        self.fleet, self.index = Fleet(), Index(SECRET)
        self.told, self.own = Burdens(), Burdens()
        self.pools = Pools(self.fleet, TIMEOUT_MS)
        self.fleet.apply(REGISTRY, [], 100)
        self.epochs: dict[str, int] = {}

    def worker(self, name: str, block_size: int = 16, **over: Any) -> str:
        epoch = self.epochs[name] = len(self.epochs)
        engine = over.pop("engine", {})
        config = EngineConfig(model="m", kv_cache_block_size=block_size, **engine)
        card = {"id": name, "slot": 0, "model": "m", "config": config, "epoch": epoch}
        self.registry(WorkerCard(**(card | over)))
        self.beat(name)
        return name

    def registry(self, record: Any) -> None:
        position = self.fleet.position(REGISTRY) or 0
        self.fleet.apply(REGISTRY, [Fact(position, 0, record)], position + 1)

    def event(self, record: Any, at_ms: int = 1500) -> None:
        for fold in (self.fleet, self.index):
            position = fold.position(EVENTS) or 0
            fold.apply(EVENTS, [Fact(position, at_ms, record)], position + 1)

    def beat(self, name: str, at_ms: int = 1500, **over: Any) -> None:
        fields = {"worker": name, "epoch": self.epochs[name], "slot_offset": 0} | over
        self.event(Heartbeat(**fields), at_ms)

    def holds(
        self, name: str, blocks: int, tier: Tier = Tier.DEVICE, rank: int = 0, **over: Any
    ) -> None:
        """The worker has the first blocks of the prompt."""
        local = Prompt(Request(id="-", token_ids=TOKENS, **over)).local(16)[:blocks]
        keys = prompt_keys(local, SECRET).tolist()
        columns = encode([Event(Kind.STORED, tier, 0, tuple(keys))])
        self.event(Blocks(worker=name, epoch=self.epochs[name], first_event_id=0, rank=rank,
                          hash_fingerprint=SECRET.fingerprint, **columns._asdict()))  # fmt: skip

    def burden(
        self, name: str, tokens: int, prefill: int = 0, rank: int = 0, since_ms: int | None = None
    ) -> None:
        """One more run; with `since_ms` it waits for its first token since then."""
        waiting = () if since_ms is None else (1, since_ms)
        self.told.add(Place(name, self.epochs[name], rank), Burden(1, tokens, prefill, *waiting))

    def plan(
        self, tuning: Tuning | str = "dynamo", seed: int = 1, now_ms: int = NOW_MS,
        request: Request | None = None, known: dict[str, Any] | None = None, **over: Any,
    ) -> Plan:  # fmt: skip
        """`known`: what else is in the view; `over`: arguments of `plan`."""
        base = View(self.fleet, self.pools, self.index, self.told, self.own, now_ms)
        view = replace(base, **known or {})
        tuning = Tuning(tuning) if isinstance(tuning, str) else tuning
        request = request or Request(id="a", model="m", token_ids=TOKENS)
        return plan(Prompt(request), view, tuning, seed=seed, **over)

    def chosen(self, *args: Any, **over: Any) -> Chosen:
        planned = self.plan(*args, **over)
        assert isinstance(planned, Chosen), planned
        return planned

    def ask(self, **over: Any) -> Plan:
        """Plan a request with these hints."""
        request = Request(id="a", model="m", token_ids=TOKENS, hints=Hints(**over))
        return self.plan(request=request)


def recorded(decision: Chosen, **over: Any) -> Assigned:
    """What the ledger gets of a decision."""
    worker, epoch, rank = decision.place
    fields = {"origin": Origin(topic="requests", partition=0, offset=0), "responses_from": 0}
    fields |= {"id": "a", "attempt": 0, "phase": "aggregated", "deadline_ms": 0}
    fields |= {
        "candidates": decision.candidates,
        "cached_tokens_predicted": decision.cached_tokens,
        "prefill_tokens": decision.prefill_tokens,
        "ttft_ms_predicted": decision.outlook.ttft_ms,
    }
    return Assigned(
        worker=worker, epoch=epoch, rank=rank, prompt_tokens=decision.tokens,
        policy=decision.policy, params=decision.params, seed=decision.seed,
        block_size=decision.block_size, **(fields | over),
    )  # fmt: skip
