"""The order among requests that are held: planned by arrival, sent the shortest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.classes import OTHERS, Claim, Classes, Queue, Share
from app.routing.decisions import Hold, Planned
from app.routing.held import WOKEN, Held, QueueOrder, Sketch, Wanted
from app.routing.policies import Place
from app.routing.prompt import Prompt
from streams.records import Hints, Request

W1, W2 = Place("w1", 1), Place("w2", 2)


def planned(place: Place, prefill_ms: float) -> Planned:
    return Planned(place, prefill_ms, until_ms=10_000)


def wanted(key: str, number: int = 0) -> Wanted[str]:
    return Wanted(key, number, Prompt(Request(id=key)), seed=0, since_ms=0)


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


@pytest.mark.parametrize(
    ("order", "went"),
    [
        ("shortest", ["strict", "short", "jumped", "first", "long"]),
        ("fcfs", ["strict", "jumped", "first", "long", "short"]),
        ("wspt", ["strict", "jumped", "short", "first", "long"]),
    ],
)
def test_the_order_of_the_queue_is_a_setting_and_strict_priority_comes_first(
    order: QueueOrder, went: list[str]
) -> None:
    held = Held[str](order)
    coming = {
        "first": (60.0, Hints()), "long": (90.0, Hints()),
        "jumped": (70.0, Hints(priority_jump=0.8)), "short": (20.0, Hints()),
        "strict": (500.0, Hints(strict_priority=2)),
    }  # fmt: skip
    for number, (key, (prefill_ms, hints)) in enumerate(coming.items()):
        prompt = Prompt(Request(id=key, hints=hints))
        held.intend(Wanted(key, number, prompt, 0, 100 * number), planned(W1, prefill_ms))
    assert held.in_turn() == went


def test_the_class_that_was_given_least_goes_first() -> None:
    classes = Classes({"batch": Share(weight=0.5)})
    held, claims = Held[str]("fcfs", classes), dict[str, Claim]()
    for number, name in enumerate(["b1", "b2", "b3", "o1", "o2", "o3", "o4"]):
        claims[name] = Claim(Queue("m", "batch" if name[0] == "b" else OTHERS), 100)
        held.hold(name, number, number, planned(W1, 10.0), claim=claims[name])
        classes.wait(claims[name].queue, 0)
    expected = ["b1", "o1", "o2", "b2", "o3", "o4", "b3"]
    assert held.in_turn() == expected
    went = []
    while len(held):
        went.append(name := held.first(W1))
        assert name is not None
        classes.give(claims[name])
        held.drop(name)
    assert went == expected


def test_one_sees_what_all_others_have_in_mind() -> None:
    held = Held[str]()
    held.hold("a", 0, 0, planned(W1, 10.0))
    held.hold("b", 1, 0, planned(W2, 20.0))
    held.hold("c", 2, 0, planned(W1, 30.0))
    held.hold("b", 1, 0, planned(W2, 20.0))
    assert held.others("a") == [planned(W2, 20.0), planned(W1, 30.0)]
    assert held.others("b") == [planned(W1, 10.0), planned(W1, 30.0)], "by arrival"
    assert held.others("new") == [planned(W1, 10.0), planned(W2, 20.0), planned(W1, 30.0)]


def test_a_new_plan_takes_the_place_of_the_old_one() -> None:
    held = Held[str]()
    held.hold("a", 0, 0, planned(W1, 10.0))
    held.hold("a", 0, 0, planned(W2, 5.0))
    assert held.others("b") == [planned(W2, 5.0)]
    assert list(held.places()) == [W2]
    assert held.place("a") == W2
    held.drop("a")
    held.drop("a")
    assert (len(held), held.in_turn(), list(held.places())) == (0, [], [])
    assert held.place("a") is None


def test_who_has_another_turn_than_before_looks_again() -> None:
    held = Held[str]()
    a, b, c = (wanted(key, number) for number, key in enumerate("abc"))
    assert held.intend(a, planned(W1, 50.0)) == []
    assert held.intend(b, planned(W1, 60.0)) == [], "behind, so nothing changes for a"
    assert held.intend(c, planned(W1, 40.0)) == ["a"], "no longer first"
    assert held.intend(c, planned(W1, 45.0)) == []
    assert held.intend(c, planned(W2, 45.0)) == ["a"], "first again"
    assert held.intend(a, None) == ["b"]
    assert list(held.intend(wanted("unknown", 3), None)) == []
    assert held.intend(b, None) == []


def test_who_looks_at_one_moment_is_planned_by_arrival_and_goes_the_shortest_first() -> None:
    held, seen = Held[str](), dict[str, list[float]]()

    def survey(looking: Sequence[Wanted[str]]) -> Iterator[Sketch | None]:
        lengths = {"long": 90.0, "short": 10.0, "middle": 40.0}
        for each in looking:
            seen[each.key] = [other.prefill_ms for other in held.others(each.key)]
            yield Sketch(planned(W1, lengths[each.key])) if each.key in lengths else None

    coming = [wanted(key, n) for n, key in enumerate(["long", "any", "short", "middle", "all"])]
    lined_up = held.line_up(reversed(coming), survey)
    assert lined_up.held == {}
    assert lined_up.order == ["short", "middle", "long", "any", "all"]
    assert (seen["long"], seen["any"]) == ([], [90.0])
    assert seen["short"] == [90.0]
    assert seen["middle"] == [90.0, 10.0]


def test_those_who_do_not_look_are_woken_when_their_turn_changes() -> None:
    held = Held[str]()
    for number, (key, length) in enumerate([("first", 10.0), ("second", 20.0), ("third", 30.0)]):
        held.hold(key, number, 0, planned(W1, length))
    lined_up = held.line_up(
        [wanted("first", 0), wanted("new", 9)],
        lambda _: iter([Sketch(planned(W2, 40.0)), Sketch(planned(W1, 40.0))]),
    )
    assert (lined_up.order, lined_up.woken) == (["first", "new"], ["second"])


def test_those_for_whom_it_is_too_early_are_held_and_do_not_go() -> None:
    held, busy = Held[str](), Hold("busy", 70, planned(W1, 40.0))
    sketches = [Sketch(planned(W1, 40.0), busy), Sketch(planned(W2, 50.0)), None]
    looking = [wanted(key, n) for n, key in enumerate("abc")]
    lined_up = held.line_up(looking, lambda _: iter(sketches))
    assert (lined_up.order, lined_up.held) == (["b", "c"], {"a": busy})
    assert (held.place("a"), held.place("b"), held.place("c")) == (W1, W2, None)


def test_a_line_has_those_who_join_where_they_came() -> None:
    held = Held[str]()
    for number, key in enumerate("abcd"):
        held.hold(key, number, 0, planned(W1, float(number)))
    line = held.line({"e": 9, "b": 1})
    assert line.planned == [*(planned(W1, float(number)) for number in range(4)), None]
    assert line.places == {"b": 1, "e": 4}


def test_one_who_looks_alone_and_those_of_other_policies_are_not_planned_twice() -> None:
    def survey(_: Sequence[Wanted[str]]) -> Iterator[Sketch | None]:
        raise AssertionError("nobody is to be planned")

    held = Held[str]()
    assert held.line_up([wanted("a")], survey).order == ["a"]
    assert held.line_up([wanted("b", 1), wanted("a")], None).order == ["a", "b"]


def test_the_next_in_turn_looks_by_itself_and_others_when_they_are_held_no_longer() -> None:
    held = Held[str]()
    held.hold("a", 0, 0, planned(W1, 10.0))
    held.hold("b", 1, 0, planned(W1, 20.0))
    assert held.looks_ms("a", Hold("busy", 70, planned(W1, 10.0))) == 70
    assert held.looks_ms("b", Hold("busy", 70, planned(W1, 20.0))) == 10_000
    assert held.looks_ms("c", Hold("full", 80)) == 80


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
def test_what_others_have_in_mind_is_what_is_held_of_them_by_arrival(
    plans: list[tuple[int, Place, float]], number: int
) -> None:
    held, last = Held[int](), dict[int, tuple[Place, float]]()
    for key, place, prefill_ms in plans:
        held.hold(key, key, 0, planned(place, prefill_ms))
        last[key] = (place, prefill_ms)
    assert sorted(held.in_turn()) == sorted(last)
    found = [(each.place, each.prefill_ms) for each in held.others(number)]
    assert found == [last[key] for key in sorted(last) if key != number]
