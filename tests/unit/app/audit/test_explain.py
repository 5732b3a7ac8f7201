"""Tests of the order of a timeline whose steps are in three partitions, its fields, and its
waits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvlane.app.audit.timeline import TimelineStep, _in_order, fields_of
from kvlane.app.audit.waits import unassigned_since_ms
from kvlane.streams.ports import Partition
from kvlane.streams.records import Finished, Refused
from kvlane.streams.request import (
    GuidedDecoding,
    Hints,
    ReplyAddress,
    Request,
    ResultOptions,
    SamplingOptions,
    StopConditions,
)
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES


def steps(topic: str, *named: tuple[int, str]) -> list[TimelineStep]:
    source = Partition(topic, 0)
    return [
        TimelineStep(at_ms, source, offset, name, {}) for offset, (at_ms, name) in enumerate(named)
    ]


def names(*topics: list[TimelineStep]) -> list[str]:
    return [step.name for step in _in_order(*topics)]


def test_records_of_one_millisecond_are_in_causal_order() -> None:
    sent, shown = steps(REQUESTS, (5, "Request")), steps(RESPONSES, (5, "Shown"))
    decided = steps(LEDGER, (5, "Assigned"), (5, "Started"), (5, "Finished"), (5, "Ended"))
    assert names(sent, decided, shown) == [
        "Request", "Assigned", "Started", "Shown", "Finished", "Ended",
    ]  # fmt: skip


def test_partition_keeps_its_order_for_any_timestamps() -> None:
    rng = random.Random(1)
    for _ in range(200):
        kinds = ["Assigned", "Started", "Finished", "Fencing", "Ended"]
        ledger = steps(LEDGER, *((rng.randrange(3), rng.choice(kinds)) for _ in range(8)))
        shown = steps(RESPONSES, *((rng.randrange(3), "Shown") for _ in range(4)))
        got = _in_order([], ledger, shown)
        assert [step for step in got if step.source.topic == LEDGER] == ledger
        assert [step for step in got if step.source.topic == RESPONSES] == shown


def test_run_after_the_end_of_another_one_stays_behind_it() -> None:
    decided = steps(LEDGER, (5, "Finished"), (5, "Assigned"), (6, "Started"))
    assert names([], decided, steps(RESPONSES, (5, "Shown"), (6, "Shown"))) == [
        "Shown", "Finished", "Assigned", "Started", "Shown",
    ]  # fmt: skip


def test_engine_message_of_a_failed_run_is_hidden_since_it_may_quote_the_prompt() -> None:
    run = Finished(
        id="a", attempt=0, phase="aggregated", worker="w", epoch=1, code="error",
        message="cannot parse 'mellon'",
    )  # fmt: skip
    assert "mellon" not in repr(fields_of(run))


FULL = {"code": "worker_full", "retryable": True}


@pytest.mark.parametrize(
    ("events", "since_ms"),
    [
        ([("Request", {})], 0),
        ([("Request", {}), ("Assigned", {})], None),
        ([("Request", {}), ("Assigned", {}), ("Finished", FULL)], 2),
        ([("Request", {}), ("Assigned", {}), ("Fencing", {"attempt": 1})], 2),
        (
            [
                ("Request", {}), ("Assigned", {}), ("Fencing", {"attempt": 1}),
                ("Assigned", {"attempt": 1}), ("Finished", FULL),
            ],
            None,
        ),
        (
            [
                ("Request", {}), ("Assigned", {"phase": "prefill"}),
                ("Finished", {"code": "handed_off", "phase": "prefill"}),
            ],
            2,
        ),
        (
            [
                ("Request", {}), ("Assigned", {"phase": "prefill"}),
                ("Assigned", {"phase": "decode"}),
                ("Finished", {"code": "handed_off", "phase": "prefill"}),
            ],
            None,
        ),
        ([("Request", {}), ("Ended", {"code": "queue_full"})], None),
    ],
)  # fmt: skip
def test_wait_for_a_worker_is_found(
    events: list[tuple[str, dict[str, Any]]], since_ms: int | None
) -> None:
    source = Partition(LEDGER, 0)
    timeline = [
        TimelineStep(at_ms, source, at_ms, name, fields)
        for at_ms, (name, fields) in enumerate(events)
    ]
    assert unassigned_since_ms(timeline) == since_ms


class LaterRequest(Request, frozen=True):
    """A request of a version with one more field."""

    note: str = ""


@pytest.mark.parametrize(
    "record",
    [
        LaterRequest(id="a", note="mellon"),
        Request(id="a", stop=StopConditions(stop=("mellon",))),
        Request(id="a", annotations=("mellon",)),
        Request(
            id="a",
            sampling=SamplingOptions(
                guided_decoding=GuidedDecoding(choice=("mellon",), regex="mellon", grammar="mellon")
            ),
        ),
        Request(id="a", result=ResultOptions(echo="mellon")),
        Refused(id="a", code="invalid", result=ResultOptions(echo="mellon")),
        Request(
            id="a", result=ResultOptions(reply=ReplyAddress(topic="t", headers=(("a", b"mellon"),)))
        ),
    ],
)
def test_text_of_a_client_is_shown_only_if_it_is_listed(record: Request | Refused) -> None:
    assert "mellon" not in repr(fields_of(record))


def test_options_that_decide_the_place_of_a_request_are_shown() -> None:
    request = Request(
        id="a", model="m", stop=StopConditions(max_tokens=7), hints=Hints(lora_name="sql"),
        result=ResultOptions(custom_id="line-7"),
    )  # fmt: skip
    assert fields_of(request) == {
        "prompt_tokens": 0, "model": "m", "stop": {"max_tokens": 7}, "hints": {"lora_name": "sql"},
        "result": {"custom_id": "line-7"},
    }  # fmt: skip
