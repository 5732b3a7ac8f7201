"""The order among requests that are held: planned by arrival, sent the shortest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.routing.held import WOKEN, Held
from app.routing.plan import Planned
from app.routing.policies import Place

W1, W2 = Place("w1", 1), Place("w2", 2)


def planned(place: Place, prefill_ms: float) -> Planned:
    return Planned(place, prefill_ms, until_ms=10_000)


def test_the_shortest_goes_first() -> None:
    held = Held[str]()
    for number, (name, prefill_ms) in enumerate([("a", 90.0), ("b", 30.0), ("c", 30.0)]):
        held.hold(name, number, 1000, planned(W1, prefill_ms))
    held.hold("d", 3, 1000, planned(W2, 1.0))
    assert held.in_turn([W1]) == ["b", "c", "a"]
    assert held.in_turn() == ["d", "b", "c", "a"]
    assert (held.first(W1), held.first(W2), held.first(Place("w3", 3))) == ("b", "d", None)


def test_who_has_waited_long_is_overtaken_no_more() -> None:
    held = Held[str]()
    held.hold("old", 0, 0, planned(W1, 90.0))
    held.hold("new", 1, 800, planned(W1, 45.0))
    assert held.first(W1) == "new"
    held.hold("newer", 2, 1400, planned(W1, 45.0))
    held.drop("new")
    assert held.first(W1) == "old"


def test_one_sees_what_those_before_it_have_in_mind() -> None:
    held = Held[str]()
    held.hold("a", 0, 0, planned(W1, 10.0))
    held.hold("b", 1, 0, planned(W2, 20.0))
    held.hold("c", 2, 0, planned(W1, 30.0))
    assert held.ahead_ms(0) == {}
    assert held.ahead_ms(2) == {W1: [10.0], W2: [20.0]}
    assert held.ahead_ms(3) == {W1: [10.0, 30.0], W2: [20.0]}


def test_a_new_plan_takes_the_place_of_the_old_one() -> None:
    held = Held[str]()
    held.hold("a", 0, 0, planned(W1, 10.0))
    held.hold("a", 0, 0, planned(W2, 5.0))
    assert held.ahead_ms(1) == {W2: [5.0]}
    assert list(held.places()) == [W2]
    assert held.place("a") == W2
    held.drop("a")
    held.drop("a")
    assert (len(held), held.in_turn(), list(held.places())) == (0, [], [])
    assert held.place("a") is None


def test_who_has_another_turn_than_before_looks_again() -> None:
    held = Held[str]()
    assert held.intend("a", 0, 0, planned(W1, 50.0)) == []
    assert held.intend("b", 1, 0, planned(W1, 60.0)) == [], "behind, so nothing changes for a"
    assert held.intend("c", 2, 0, planned(W1, 40.0)) == ["a"], "no longer first"
    assert held.intend("c", 2, 0, planned(W1, 45.0)) == []
    assert held.intend("c", 2, 0, planned(W2, 45.0)) == ["a"], "first again"
    assert held.intend("a", 0, 0, None) == ["b"]
    assert list(held.intend("unknown", 3, 0, None)) == []
    assert held.intend("b", 1, 0, None) == []


def test_news_of_a_worker_wake_those_planned_for_it_and_everybody_while_they_are_few() -> None:
    held = Held[int]()
    for n in range(WOKEN):
        held.hold(n, n, 0, planned(W2, float(WOKEN - n)))
    assert held.woken("w1") == list(reversed(range(WOKEN)))
    held.hold(99, 99, 0, planned(W1, 1.0))
    assert held.woken("w1") == [99]
    held.hold(98, 98, 0, planned(W2, 0.0))
    assert held.woken("w2") == [98, *reversed(range(1, WOKEN))]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([W1, W2]), st.floats(0, 100))),
    st.integers(0, 6),
)
def test_what_is_ahead_is_what_is_held_of_those_before(
    plans: list[tuple[int, Place, float]], number: int
) -> None:
    held, last = Held[int](), dict[int, tuple[Place, float]]()
    for key, place, prefill_ms in plans:
        held.hold(key, key, 0, planned(place, prefill_ms))
        last[key] = (place, prefill_ms)
    assert sorted(held.in_turn()) == sorted(last)
    found = sorted((p, ms) for p, all_ms in held.ahead_ms(number).items() for ms in all_ms)
    assert found == sorted(each for key, each in last.items() if key < number)
