"""Eligibility and the least loaded worker."""

from __future__ import annotations

from app.routing.fleet import Fleet
from app.routing.load import Burden
from app.routing.plan import choose, eligible
from streams.ports import Partition
from streams.records import EngineConfig, Fact, Heartbeat, Hints, Lost, Request, WorkerCard

NOW_MS = 2000


def fleet(**models: str) -> Fleet:
    """Workers by name, all alive, each with its model."""
    fold = Fleet()
    config = EngineConfig(model="m")
    cards = [
        Fact(100 + n, 0, WorkerCard(id=w, slot=0, model=m, config=config, epoch=n))
        for n, (w, m) in enumerate(models.items())
    ]
    beats = [
        Fact(n, 1500, Heartbeat(worker=w, epoch=n, slot_offset=0)) for n, w in enumerate(models)
    ]
    fold.apply(Partition("registry", 0), cards, 200)
    fold.apply(Partition("kv-events", 0), beats, len(beats))
    return fold


def names(request: Request, fold: Fleet, excluded: tuple[str, ...] = ()) -> list[str]:
    return [w for w, _ in eligible(request, fold, NOW_MS, 5000, excluded)]


def test_only_workers_that_serve_the_model_are_eligible() -> None:
    assert names(Request(id="a", model="x"), fleet(w1="x", w2="y")) == ["w1"]


def test_lost_workers_are_not_eligible() -> None:
    fold = fleet(w1="x", w2="x")
    fold.apply(Partition("kv-events", 0), [Fact(9, 1600, Lost(worker="w1", epoch=0))], 10)
    assert names(Request(id="a", model="x"), fold) == ["w2"]


def test_workers_that_failed_are_excluded_while_there_is_another() -> None:
    fold = fleet(w1="x", w2="x")
    assert names(Request(id="a", model="x"), fold, ("w1",)) == ["w2"]
    assert names(Request(id="a", model="x"), fold, ("w1", "w2")) == ["w1", "w2"]


def test_pins_and_allowed_workers_are_kept_to() -> None:
    fold = fleet(w1="x", w2="x", w3="x")
    pinned = Request(id="a", model="x", hints=Hints(backend_instance_id="w2"))
    allowed = Request(id="a", model="x", hints=Hints(allowed_worker_ids=("w1", "w3")))
    assert names(pinned, fold) == ["w2"]
    assert names(allowed, fold) == ["w1", "w3"]


def test_the_worker_with_the_fewest_open_tokens_is_chosen() -> None:
    burdens = {"w1": Burden(1, 900), "w2": Burden(5, 100), "w3": Burden(2, 100)}
    workers = eligible(Request(id="a"), fleet(w1="x", w2="x", w3="x"), NOW_MS, 5000, ())
    choice = choose(workers, lambda w, _: burdens[w], seed=1)
    assert choice is not None
    assert choice.worker == "w3"
    assert [c.worker for c in choice.candidates] == ["w3", "w2", "w1"]
    assert choice.candidates[0].open_tokens == 100


def test_ties_are_drawn_from_the_seed_and_reach_every_worker() -> None:
    workers = eligible(Request(id="a"), fleet(w1="x", w2="x", w3="x"), NOW_MS, 5000, ())
    drawn = [choose(workers, lambda *_: Burden(), seed) for seed in range(50)]
    again = [choose(workers, lambda *_: Burden(), seed) for seed in range(50)]
    assert drawn == again
    assert {c.worker for c in drawn if c} == {"w1", "w2", "w3"}


def test_without_workers_there_is_no_choice() -> None:
    assert choose([], lambda *_: Burden(), 1) is None
