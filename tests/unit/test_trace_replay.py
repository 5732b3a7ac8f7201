"""Traces against simulated fleets: figures that were worked out by hand, and what always holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.batch import Curves, Sequence, Shape
from app.routing.decisions import Hold, Plan, Refuse, Tuning
from app.routing.load import Load
from app.routing.plan import plan
from app.routing.policies import Place
from app.simulation import router, worker
from app.simulation.conditions import Conditions
from app.simulation.figures import figures
from app.simulation.generated import Size, generated
from app.simulation.knowledge import Told
from app.simulation.replay import Life, Replay, prepared
from app.simulation.router import SimulationFailed
from app.simulation.runs import NAMES, Run, Trace, lived
from app.simulation.traffic import Pace, arrivals, asks_for_sessions, traced
from app.simulation.worker import Worker
from app.trace import BadTrace, TraceRow
from indexer.lives import Holder, Overlap
from streams.ports import Partition
from streams.records import Fact

# A step takes 10 ms and a hundredth of one a new token, and 4 ms more if anybody decodes.
SIMPLE = Shape(512, 64, curves=Curves(prefill=(0.0, 0.01, 10.0), decode=(0.0, 0.0, 4.0)))
RECORDED = Pace()


def row(at_ms: float, tokens: int, output: int, first: int = 0) -> TraceRow:
    return TraceRow(at_ms, tokens, output, list(range(first, first - (-tokens // 512))))


def played(
    rows: list[TraceRow], workers: int = 1, policy: str = "dynamo", seed: int = 0,
    shape: Shape = SIMPLE, pace: Pace = RECORDED,
) -> list[Life]:  # fmt: skip
    requests = traced(rows, in_sessions=asks_for_sessions(policy))
    coming = arrivals(rows, requests, pace, seed)
    return prepared(coming, workers, shape, Tuning(policy), seed).run()


def told(lives: list[Life]) -> list[tuple[Any, ...]]:
    return [
        (x.id, x.worker, x.sent_ms, x.first_token_ms, x.last_token_ms, x.cached_tokens)
        for x in lives
    ]


# --- by hand -------------------------------------------------------------------------------------


def test_a_lone_request_takes_its_prefill_and_a_step_a_token() -> None:
    (life,) = played([row(100, 1000, 3)])
    assert life.first_token_ms == pytest.approx(100 + 20)
    assert life.last_token_ms == pytest.approx(100 + 20 + 2 * 4)


def test_two_requests_share_steps_and_the_cached_beginning() -> None:
    lives = played([row(0, 1000, 3), row(5, 1000, 3)])
    # The second waits for the step that the first is in (20), finds 512 tokens, computes 488 in a
    # step that decodes as well (10 + 4.88 + 4), and decodes twice beside or after the first.
    assert [x.first_token_ms for x in lives] == pytest.approx([20, 38.88])
    assert [x.last_token_ms for x in lives] == pytest.approx([42.88, 46.88])
    found = figures(lives)
    assert found.requests == 2
    assert found.reuse == 512 / 2000
    assert found.ttft_mean == pytest.approx((20 + 33.88) / 2)
    assert found.ttft_p50 == pytest.approx((20 + 33.88) / 2)
    assert found.ttft_p99 == pytest.approx(20 + 0.99 * 13.88)
    assert found.itl_mean == pytest.approx((22.88 + 8) / 4)
    assert found.e2e_mean == pytest.approx((42.88 + 41.88) / 2)


def test_round_robin_goes_in_turn_and_same_moments_share_a_step() -> None:
    lives = played([row(0, 100, 1, 10 * i) for i in range(5)], workers=2, policy="round_robin")
    assert [x.worker for x in lives] == [f"worker-{i}" for i in (0, 1, 0, 1, 0)]
    assert [x.first_token_ms for x in lives] == pytest.approx([13, 12, 13, 12, 13])


def test_workers_stand_in_the_order_of_their_numbers() -> None:
    lives = played([row(0, 100, 1, i) for i in range(11)], workers=11, policy="round_robin")
    assert [int(x.worker.removeprefix("worker-")) for x in lives] == list(range(11))


def test_a_request_goes_where_its_beginning_is_cached() -> None:
    rows = [row(0, 5000, 1), row(0, 5000, 1, 100), row(5000, 5100, 1, 100), row(9000, 5200, 1)]
    one, two, again_two, again_one = played(rows, workers=2)
    assert one.worker != two.worker
    assert (again_two.worker, again_one.worker) == (two.worker, one.worker)
    assert (again_two.cached_tokens, again_one.cached_tokens) == (9 * 512, 9 * 512)


def test_what_was_evicted_is_not_counted_on() -> None:
    small = SIMPLE._replace(blocks=10)
    rows = [row(0, 5000, 1), row(5000, 5000, 1, 100), row(9000, 5000, 1)]
    assert [x.cached_tokens for x in played(rows, shape=small)] == [0, 0, 0]


def test_a_session_stays_where_it_is() -> None:
    rows = [TraceRow(1000.0 * i, 1024, 1, [0, 1 + i % 3]) for i in range(30)]  # three conversations
    lives = played(rows, workers=8, policy="session_hash")
    assert [x.worker for x in lives[3:]] == [x.worker for x in lives[:-3]]


@given(st.lists(st.builds(row, st.just(0), st.integers(1, 9000), st.just(9)), min_size=2))
def test_requests_planned_at_once_go_where_they_would_one_by_one(rows: list[TraceRow]) -> None:
    at_once, one_by_one = (
        told(prepared(coming, 3, SIMPLE, Tuning("predictive"), 0).run())
        for coming in (
            arrivals(rows, traced(rows, in_sessions=named), RECORDED, 0) for named in (False, True)
        )
    )
    assert at_once == one_by_one


def test_speed_brings_arrivals_together_and_leaves_engines_as_they_are() -> None:
    (life,) = played([row(1000, 1000, 3)], pace=Pace(speed=4))
    assert (life.arrived_ms, life.last_token_ms) == (250, pytest.approx(278))


def test_jitter_puts_off_arrivals_by_less_than_it_says_and_by_the_seed() -> None:
    rows = [row(0, 100, 1, i) for i in range(50)]
    lives = played(rows, pace=Pace(speed=2, jitter_s=3))
    times = [x.arrived_ms for x in lives]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] < 1500
    assert [x.arrived_ms for x in played(rows, pace=Pace(2, 3), seed=1)] != times


# --- always --------------------------------------------------------------------------------------

ROWS = st.lists(
    st.builds(
        row,
        at_ms=st.integers(0, 2000),
        tokens=st.integers(1, 6000),
        output=st.integers(0, 300),
        first=st.sampled_from([0, 0, 100, 200]),
    ),
    min_size=1,
    max_size=25,
)


@given(ROWS, st.sampled_from(NAMES), st.integers(1, 4), st.integers(0, 3), st.sampled_from([0, 2]))
def test_every_request_comes_to_its_end_the_same_way_every_time(
    rows: list[TraceRow], policy: str, workers: int, seed: int, jitter_s: float
) -> None:
    shape = SIMPLE._replace(blocks=20, max_sequences=4)

    def play() -> list[Life]:
        return played(rows, workers, policy, seed, shape, Pace(1.0, jitter_s))

    lives = play()
    assert sorted(x.id for x in lives) == [f"{i:06}" for i in range(len(rows))]
    for life in lives:
        assert (
            life.arrived_ms <= life.sent_ms < life.first_token_ms <= life.last_token_ms < math.inf
        )
        assert 0 <= life.cached_tokens < life.request.prompt.tokens
    assert told(play()) == told(lives)


@given(ROWS, st.sampled_from(NAMES))
def test_taking_quiet_steps_together_changes_nothing(rows: list[TraceRow], policy: str) -> None:
    together = told(played(rows, 2, policy))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "FEW", 10**9)
        assert told(played(rows, 2, policy)) == together


@given(ROWS, st.sampled_from(NAMES))
def test_in_the_end_the_router_knows_what_the_caches_hold(
    rows: list[TraceRow], policy: str
) -> None:
    requests = traced(rows)
    played_out = prepared(
        arrivals(rows, requests, RECORDED, 0), 2, SIMPLE._replace(blocks=14), Tuning(policy), 0
    )
    played_out.run()
    for request in requests:
        known = played_out.folds.index.overlaps(request.prompt.local(512))
        for each in played_out.workers:
            held = each.state.cache.match(request.chunks, len(request.chunks)).blocks
            assert known.get(Holder(each.name, 0), Overlap()).device == held
    assert not any(seat.knowledge.books.burdens for seat in played_out.seats)


@given(ROWS, st.sampled_from(NAMES))
def test_its_books_weigh_runs_as_the_ledger_does(rows: list[TraceRow], policy: str) -> None:
    coming = arrivals(rows, traced(rows), RECORDED, 0)
    replay = prepared(coming, 2, SIMPLE, Tuning(policy), 0)
    books, load, read = replay.seats[0].knowledge.books, Load(60_000), count()
    told = books.told

    def tell(record: Told, at_ms: float) -> None:
        told(record, at_ms)
        position = next(read)
        load.apply(Partition("ledger", 0), [Fact(position, int(at_ms), record)], position + 1)
        for each in replay.workers:
            place = Place(each.name, each.epoch)
            assert books.burdens.there(place) == load.burdens.there(place)
        assert books.burdens.prefilled_ms == load.burdens.prefilled_ms

    books.told = tell  # type: ignore[method-assign]
    replay.run()
    assert next(read) == 3 * len(rows)


# --- a worker ------------------------------------------------------------------------------------


def decoding(output: int) -> Worker:
    """A worker with one request, from its first token at 11 ms on; each one more takes 4."""
    alone = Worker("alone", 0, SIMPLE)
    alone.admit(Sequence("first", 100, output), 0.0)
    alone.begin(0.0)
    assert alone.ends_at_ms == 11
    alone.end()
    alone.begin(11.0)
    return alone


@pytest.mark.parametrize(("at_ms", "joins_ms"), [(11.5, 15), (14.9, 15), (15, 19), (18, 19)])
def test_who_comes_in_quiet_steps_waits_for_the_end_of_one(at_ms: float, joins_ms: float) -> None:
    alone = decoding(100)
    assert alone.ends_at_ms > 100
    alone.admit(Sequence("second", 100, 1), at_ms)
    assert alone.ends_at_ms == joins_ms
    alone.end()
    alone.begin(joins_ms)
    assert alone.ends_at_ms == joins_ms + 11 + 4


@pytest.mark.parametrize("output", [3, 100])
@pytest.mark.parametrize(("at_ms", "tokens"), [(11, 1), (14.9, 1)])
def test_tokens_of_the_step_under_way_are_not_there_yet(
    output: int, at_ms: float, tokens: int
) -> None:
    assert decoding(output).output_tokens(at_ms) == tokens


def test_tokens_are_there_when_their_quiet_step_is_over() -> None:
    alone = decoding(100)
    assert [alone.output_tokens(at_ms) for at_ms in (15.1, 18.9, 19.1)] == [2, 2, 3]


# --- holding -------------------------------------------------------------------------------------


def holding(
    monkeypatch: pytest.MonkeyPatch, until: Callable[[str, Any], Hold | Refuse | None]
) -> None:
    """Requests go where they would, but first `until` is asked, with the id and the view."""

    def planned(prompt: Any, view: Any, tuning: Any, **about: Any) -> Plan:
        return until(prompt.request.id, view) or plan(prompt, view, tuning, **about)

    monkeypatch.setattr(router, "plan", planned)


def test_a_held_request_is_looked_at_again_when_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda _, view: Hold("later", 70) if view.now_ms < 70 else None)
    (life,) = played([row(0, 1000, 1)])
    assert (life.sent_ms, life.first_token_ms) == (70, pytest.approx(90))


def test_a_held_request_is_looked_at_when_another_gets_a_token_and_joins_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def until(name: str, view: Any) -> Hold | None:
        busy = view.told.of("worker-0", 0).prefill_tokens
        return Hold("busy") if name == "000001" and busy else None

    holding(monkeypatch, until)
    _, held = played([row(0, 1000, 9), row(0, 1000, 9, 100)])
    assert held.sent_ms == pytest.approx(20)
    assert held.first_token_ms == pytest.approx(20 + 20 + 4)


def test_a_time_that_has_come_already_does_not_stop_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holding(monkeypatch, lambda _, view: Hold("now", 0) if view.now_ms < 5 else None)
    (life,) = played([row(0, 1000, 1)])
    assert life.sent_ms == 5


def test_requests_that_are_held_for_ever_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda *_: Hold("never"))
    with pytest.raises(SimulationFailed, match="2 requests are held for ever"):
        played([row(0, 100, 1), row(1, 100, 1)])


def test_policy_predictive_holds_the_longer_of_two_and_none_for_ever() -> None:
    rows = [row(0, 8000, 1), row(1, 8000, 1, 100), row(2, 3000, 1, 200)]
    lives = played(rows, policy="predictive")
    first, long, short = lives
    assert first.sent_ms == 0
    assert first.sent_ms < short.sent_ms < long.sent_ms
    assert short.sent_ms == pytest.approx(first.first_token_ms, abs=1)


def test_under_policy_predictive_the_shortest_of_those_that_come_together_goes_first() -> None:
    rows = [row(0, 8000, 1), row(0, 3000, 1, 100), row(0, 5000, 1, 200)]
    long, short, middle = played(rows, policy="predictive")
    assert short.sent_ms == 0
    assert short.sent_ms < middle.sent_ms < long.sent_ms


def test_a_refusal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    holding(monkeypatch, lambda *_: Refuse("invalid", "because"))
    with pytest.raises(SimulationFailed, match="000000 is refused: because"):
        played([row(0, 100, 1)])


def test_a_request_that_no_cache_can_hold_is_reported() -> None:
    with pytest.raises(BadTrace, match="000000 fits no worker"):
        played([row(0, 64 * 512, 2)])


# --- what takes time -----------------------------------------------------------------------------


def under(
    conditions: Conditions, rows: list[TraceRow], workers: int = 1, policy: str = "dynamo"
) -> list[Life]:
    coming = arrivals(rows, traced(rows), RECORDED, 0)
    return prepared(
        coming, workers, SIMPLE, Tuning(policy), 0, conditions=conditions
    ).run()  # fmt: skip


def test_a_hop_comes_before_the_prefill_and_is_no_part_of_what_a_worker_measures() -> None:
    rows = [row(0, 1000, 1), row(100, 1000, 1, 100)]
    one, two = under(Conditions(hop_ms=3), rows)
    assert (one.sent_ms, one.first_token_ms) == (0, pytest.approx(23))
    assert (two.sent_ms, two.first_token_ms) == (100, pytest.approx(123))


def test_requests_that_hop_together_share_a_step() -> None:
    lives = under(Conditions(hop_ms=3), [row(0, 1000, 1), row(0, 1000, 1, 100)])
    assert [x.first_token_ms for x in lives] == pytest.approx([33, 33])


def test_a_request_that_is_held_for_news_goes_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def until(name: str, view: Any) -> Hold | None:
        busy = view.told.of("worker-0", 0).prefill_tokens
        return Hold("busy") if name == "000001" and busy else None

    holding(monkeypatch, until)
    rows = [row(0, 1000, 9), row(0, 1000, 9, 100)]
    _, held = under(Conditions(notice_ms=7), rows)
    assert held.sent_ms == pytest.approx(27)


def test_what_a_late_record_says_happened_when_it_happened() -> None:
    rows = [row(0, 1000, 1), row(500, 1000, 1)]
    coming = arrivals(rows, traced(rows), RECORDED, 0)
    late = prepared(coming, 1, SIMPLE, Tuning("dynamo"), 0, conditions=Conditions(notice_ms=100))
    seen = []
    late.seats[0].knowledge.books.told = lambda record, at_ms: seen.append(  # type: ignore[method-assign]
        (type(record).__name__, at_ms)
    )
    late.run()
    assert seen[:3] == [("Assigned", 0), ("PrefillDone", 20), ("Finished", 20)]


def workers_of(conditions: Conditions, gap_ms: float) -> list[str]:
    """Where eight requests go that come one by one, to two workers."""
    rows = [row(gap_ms * i, 5000, 1, 100 * i) for i in range(8)]
    return [x.worker for x in under(conditions, rows, 2, "least_loaded")]


def test_a_router_counts_its_own_decisions_at_once() -> None:
    late = workers_of(Conditions(lag_ms=50), 1.0)
    assert late == workers_of(Conditions(), 1.0)
    assert len(set(late[:2])) == 2


def test_it_counts_those_of_others_when_it_reads_them() -> None:
    rows = [row(i, 5000, 1, 100 * i) for i in range(30)]
    late = under(Conditions(routers=2, lag_ms=1000), rows, 2, "least_loaded")
    assert {x.router for x in late} == {0, 1}
    for number in (0, 1):  # each divides its own as if it were alone
        own = [x.worker for x in late if x.router == number]
        counts = {worker: own.count(worker) for worker in own}
        assert max(counts.values()) - min(counts.values()) <= 1
    alone = under(Conditions(routers=2), rows, 2, "least_loaded")
    assert [x.worker for x in alone] == [
        x.worker for x in under(Conditions(), rows, 2, "least_loaded")
    ]


def test_routers_that_read_nothing_of_each_other_know_of_their_own_requests_alone() -> None:
    apart = Conditions(routers=2, shares_ledger=False)
    coming = arrivals(rows := [row(i, 100, 1) for i in range(20)], traced(rows), RECORDED, 0)
    replay = prepared(coming, 2, SIMPLE, Tuning("dynamo"), 0, conditions=apart)
    heard: list[set[str]] = [set(), set()]
    for seat, own in zip(replay.seats, heard, strict=True):
        seat.knowledge.books.told = lambda record, _, own=own: own.add(record.id)  # type: ignore[misc]
    lives = replay.run()
    assert heard == [{x.id for x in lives if x.router == n} for n in (0, 1)]


@pytest.mark.parametrize("seed", [0, 1])
def test_where_engines_are_faster_than_anybody_said_none_of_them_is_left_out(seed: int) -> None:
    trace = Trace(generated("shared-prefixes", Size(1000)))
    twice_as_fast = Curves((2.1e-7, 7.592e-3, 8.251), (-12.87, 27.0, 2.87), 0.5)
    run = Run("predictive", 6, seed=seed, curves=twice_as_fast, warm=400)
    lives = lived(trace, run._replace(conditions=Conditions(tells_curves=False)))
    shares = Counter(life.worker for life in lives)
    assert len(shares) == 6
    assert min(shares.values()) > 30


CONDITIONS = st.builds(
    Conditions,
    hop_ms=st.sampled_from([0, 1]),
    notice_ms=st.sampled_from([0, 5, 300]),
    routers=st.integers(1, 3),
    lag_ms=st.sampled_from([0, 5]),
    shares_ledger=st.booleans(),
    tells_curves=st.booleans(),
)


@given(ROWS, st.sampled_from(NAMES), CONDITIONS)
def test_late_or_not_every_request_ends_and_no_load_remains(
    rows: list[TraceRow], policy: str, conditions: Conditions
) -> None:
    shape = SIMPLE._replace(blocks=20, max_sequences=4)

    def play() -> Replay:
        coming = arrivals(rows, traced(rows), RECORDED, 0)
        return prepared(coming, 2, shape, Tuning(policy), 0, conditions=conditions)

    once, again = play(), play()
    lives = once.run()
    assert len(lives) == len(rows)
    assert all(x.sent_ms + conditions.hop_ms < x.first_token_ms < math.inf for x in lives)
    assert told(again.run()) == told(lives)
    for seat in once.seats:
        assert not seat.knowledge.own
        assert not seat.knowledge.books.burdens
