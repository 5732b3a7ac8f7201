"""How classes of requests share the workers, against what their weights promise."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.classes import OTHERS, Claim, Classes, Queue, Share, Turn
from app.settings import Settings, SettingsError
from streams.records import Hints, Request

SHARES = {"batch": Share(weight=0.25), "gold": Share(weight=4.0)}


@pytest.mark.parametrize(
    ("queue_class", "tenant", "of"),
    [
        ("batch", "", "batch"),
        (None, "gold", "gold"),
        ("batch", "gold", "batch"),
        ("unknown", "gold", "gold"),
        ("unknown", "unknown", OTHERS),
        (None, "", OTHERS),
    ],
)
def test_a_request_is_in_the_class_that_it_names_or_in_its_tenants(
    queue_class: str | None, tenant: str, of: str
) -> None:
    request = Request(id="r", model="m", tenant=tenant, hints=Hints(queue_class=queue_class))
    assert Classes(SHARES).of(request) == Queue("m", of)


def queue(of: str = OTHERS, model: str = "m") -> Queue:
    return Queue(model, of)


def claim(of: str, tokens: int) -> Claim:
    return Claim(queue(of), tokens)


@given(st.lists(st.integers(1, 1000), min_size=600, max_size=600))
def test_while_all_wait_tokens_are_shared_by_weight(sizes: list[int]) -> None:
    classes, got = Classes(SHARES), Counter[str]()
    names = [OTHERS, *SHARES]
    for name in names:
        classes.wait(queue(name), 0)
    for size in sizes:
        name = min(names, key=lambda each: classes.given(queue(each)))
        classes.give(claim(name, size))
        got[name] += size
    fair = {name: got[name] / share.weight for name, share in (SHARES | {OTHERS: Share()}).items()}
    assert max(fair.values()) - min(fair.values()) <= 1000 / 0.25, "one request of the lightest"


def test_strict_priority_goes_before_classes_and_their_order_within_one_is_kept() -> None:
    turns = [
        Turn(f"{of}{number}", claim(of, 100), -(number == 4), (float(number), of == "gold"))
        for of in (OTHERS, "gold")
        for number in range(5)
    ]
    assert list(Classes(SHARES).in_turn(turns)) == [
        "4", "gold4", "gold0", "gold1", "gold2", "0", "gold3", "1", "2", "3"
    ]  # fmt: skip


def test_nobody_saves_turns_up() -> None:
    classes = Classes(SHARES)
    classes.wait(queue(), 0)
    for _ in range(100):
        classes.give(claim(OTHERS, 1000))
    assert classes.given(queue("gold")) == classes.given(queue()) - 1000, "as who was served last"
    classes.wait(queue("gold"), 0)
    classes.give(claim("gold", 4000))
    assert classes.given(queue("gold")) == classes.given(queue())


def test_what_was_given_while_nobody_waited_is_held_against_nobody() -> None:
    classes = Classes(SHARES)
    classes.give(claim(OTHERS, 1_000_000))
    classes.wait(queue("batch"), 0)
    classes.wait(queue(), 0)
    assert classes.given(queue()) == classes.given(queue("batch"))
    classes.give(claim(OTHERS, 1000))
    classes.leave(queue(), 0)
    classes.leave(queue("batch"), 0)
    assert classes.given(queue()) == 0, "nobody waits any more"


def test_models_have_nothing_to_do_with_each_other() -> None:
    classes = Classes(SHARES)
    classes.wait(queue("batch"), 0)
    classes.wait(queue(), 0)
    classes.give(Claim(queue(model="other"), 1_000_000))
    assert classes.given(queue()) == classes.given(queue("batch"))
    assert sorted(classes.queues("m", "other")) == [queue(), queue("batch")]


def test_a_class_is_crowded_by_its_own_requests_and_tokens_alone() -> None:
    classes = Classes({"few": Share(held_requests=2), "small": Share(held_tokens=100)})
    for name in ("few", "few", "small", OTHERS):
        assert not classes.is_crowded(queue(name, "other"))
        classes.wait(queue(name), 100)
    names = ["few", "small", OTHERS]
    assert [classes.is_crowded(queue(name, "other")) for name in names] == [True, True, False]
    classes.leave(queue("few"), 100)
    classes.leave(queue("small"), 100)
    assert not any(classes.is_crowded(queue(name)) for name in names)


def test_classes_are_a_setting() -> None:
    settings = Settings.model_validate({"queue_classes": {"batch": {"weight": 0.5}}})
    assert settings.queue_classes == {"batch": Share(weight=0.5)}


@pytest.mark.parametrize(
    ("share", "wrong"),
    [
        ({"weight": 0}, "above 0"),
        ({"weight": float("nan")}, "finite"),
        ({"held_tokens": -1}, "0 or more"),
        ({"wait": 1}, "wait"),
    ],
)
def test_a_share_that_cannot_be_is_refused(share: dict[str, float], wrong: str) -> None:
    with pytest.raises(SettingsError, match=wrong):
        Settings(queue_classes={"batch": share})
