"""Tests of fair share: classes get the workers by their weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.routing.queueing.fair_share import (
    DEFAULT_CLASS,
    ClassConfig,
    FairQueue,
    QueueEntry,
    QueueKey,
    ShareCost,
)
from kvlane.app.settings import Settings, SettingsError
from kvlane.streams.request import Hints, Request

SHARES = {"batch": ClassConfig(weight=0.25), "gold": ClassConfig(weight=4.0)}


@pytest.mark.parametrize(
    ("queue_class", "tenant", "of"),
    [
        ("batch", "", "batch"),
        (None, "gold", "gold"),
        ("batch", "gold", "batch"),
        ("unknown", "gold", "gold"),
        ("unknown", "unknown", DEFAULT_CLASS),
        (None, "", DEFAULT_CLASS),
    ],
)
def test_request_is_in_the_class_that_it_names_or_in_its_tenants(
    queue_class: str | None, tenant: str, of: str
) -> None:
    request = Request(id="r", model="m", tenant=tenant, hints=Hints(queue_class=queue_class))
    assert FairQueue(SHARES).classify(request) == QueueKey("m", of)


def queue(of: str = DEFAULT_CLASS, model: str = "m") -> QueueKey:
    return QueueKey(model, of)


def claim(of: str, tokens: int) -> ShareCost:
    return ShareCost(queue(of), tokens)


@given(st.lists(st.integers(1, 1000), min_size=600, max_size=600))
def test_waiting_classes_share_tokens_by_weight(sizes: list[int]) -> None:
    classes, got = FairQueue(SHARES), Counter[str]()
    names = [DEFAULT_CLASS, *SHARES]
    for name in names:
        classes.add_waiting(queue(name), 0)
    for size in sizes:
        name = min(names, key=lambda each: classes.virtual_time(queue(each)))
        classes.charge(claim(name, size))
        got[name] += size
    fair = {
        name: got[name] / share.weight
        for name, share in (SHARES | {DEFAULT_CLASS: ClassConfig()}).items()
    }
    assert max(fair.values()) - min(fair.values()) <= 1000 / 0.25, "one request of the lightest"


def test_strict_priority_goes_before_classes_and_their_order_within_one_is_kept() -> None:
    turns = [
        QueueEntry(f"{of}{number}", claim(of, 100), -(number == 4), (float(number), of == "gold"))
        for of in (DEFAULT_CLASS, "gold")
        for number in range(5)
    ]
    assert list(FairQueue(SHARES).in_dispatch_order(turns)) == [
        "4", "gold4", "gold0", "gold1", "gold2", "0", "gold3", "1", "2", "3"
    ]  # fmt: skip


def test_idle_class_accumulates_no_share() -> None:
    classes = FairQueue(SHARES)
    classes.add_waiting(queue(), 0)
    for _ in range(100):
        classes.charge(claim(DEFAULT_CLASS, 1000))
    assert classes.virtual_time(queue("gold")) == classes.virtual_time(queue()) - 1000, (
        "as who was served last"
    )
    classes.add_waiting(queue("gold"), 0)
    classes.charge(claim("gold", 4000))
    assert classes.virtual_time(queue("gold")) == classes.virtual_time(queue())


def test_service_without_waiting_requests_is_not_charged() -> None:
    classes = FairQueue(SHARES)
    classes.charge(claim(DEFAULT_CLASS, 1_000_000))
    classes.add_waiting(queue("batch"), 0)
    classes.add_waiting(queue(), 0)
    assert classes.virtual_time(queue()) == classes.virtual_time(queue("batch"))
    classes.charge(claim(DEFAULT_CLASS, 1000))
    classes.remove_waiting(queue(), 0)
    classes.remove_waiting(queue("batch"), 0)
    assert classes.virtual_time(queue()) == 0, "nobody waits any more"


def test_models_have_independent_shares() -> None:
    classes = FairQueue(SHARES)
    classes.add_waiting(queue("batch"), 0)
    classes.add_waiting(queue(), 0)
    classes.charge(ShareCost(queue(model="other"), 1_000_000))
    assert classes.virtual_time(queue()) == classes.virtual_time(queue("batch"))
    assert sorted(classes.waiting_queues("m", "other")) == [queue(), queue("batch")]


def test_class_is_crowded_by_its_own_requests_and_tokens_alone() -> None:
    classes = FairQueue(
        {"few": ClassConfig(max_queued_requests=2), "small": ClassConfig(max_queued_tokens=100)}
    )
    for name in ("few", "few", "small", DEFAULT_CLASS):
        assert not classes.is_full(queue(name, "other"))
        classes.add_waiting(queue(name), 100)
    names = ["few", "small", DEFAULT_CLASS]
    assert [classes.is_full(queue(name, "other")) for name in names] == [True, True, False]
    classes.remove_waiting(queue("few"), 100)
    classes.remove_waiting(queue("small"), 100)
    assert not any(classes.is_full(queue(name)) for name in names)


def test_classes_are_a_setting() -> None:
    settings = Settings.model_validate({"queue_classes": {"batch": {"weight": 0.5}}})
    assert settings.queue_classes == {"batch": ClassConfig(weight=0.5)}


@pytest.mark.parametrize(
    ("share", "wrong"),
    [
        ({"weight": 0}, "above 0"),
        ({"weight": float("nan")}, "finite"),
        ({"max_queued_tokens": -1}, "bounds from 0 to"),
        ({"wait": 1}, "wait"),
    ],
)
def test_invalid_share_is_refused(share: dict[str, float], wrong: str) -> None:
    with pytest.raises(SettingsError, match=wrong):
        Settings(queue_classes={"batch": share})
