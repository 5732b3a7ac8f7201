"""Tests of records of the registry: their effect on a worker that reads them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvlane.app.serving.registration import CardAction, interpret
from kvlane.streams.codecs import AnyRecord
from kvlane.streams.records import EngineConfig, LogRecord, Lost, Tombstone, WorkerCard

CARD = WorkerCard(id="w", slot=1, model="m", config=EngineConfig(model="m"), epoch=10, life="mine")
WRITTEN_AT = 11
OTHERS = replace(CARD, life="theirs")


@pytest.mark.parametrize(
    ("offset", "record", "verdict"),
    [
        (10, replace(CARD, epoch=None), "none"),  # our own first card
        (11, CARD, "none"),
        (20, CARD, "none"),  # our own, written again
        (9, replace(OTHERS, epoch=None), "none"),  # a life before ours
        (20, replace(OTHERS, id="x", epoch=19), "none"),
        (20, Tombstone(key="worker/x", epoch=10), "none"),
        (20, Tombstone(key="model/w", epoch=10), "none"),
        (20, Lost(worker="w", epoch=10), "none"),  # not here: it comes by the slot
        (20, replace(OTHERS, epoch=5), "rewrite"),
        (20, Tombstone(key="worker/w", epoch=5), "rewrite"),
        (20, Tombstone(key="worker/w", epoch=10), "renew"),
        (20, Tombstone(key="worker/w"), "renew"),  # an operator's: without an epoch
        (20, replace(CARD, epoch=None), "renew"),  # a repeat of our first card arrived late
        (20, replace(OTHERS, epoch=None), "stop"),
        (20, replace(OTHERS, epoch=15), "stop"),
    ],
)
def test_registry_record_is_classified(offset: int, record: AnyRecord, verdict: CardAction) -> None:
    assert interpret(LogRecord(offset, 0, record), CARD, WRITTEN_AT) == verdict  # type: ignore[arg-type]


def test_older_process_written_before_the_own_card_overwrites_nothing() -> None:
    before = LogRecord(8, 0, replace(OTHERS, epoch=5))
    assert interpret(before, CARD, WRITTEN_AT) == "none"
