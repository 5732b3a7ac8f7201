"""The parts of a collector that all its lanes share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvlane.app.metrics.collector_metrics import CollectorMetrics
from kvlane.app.preprocess.models.byte_model import Model
from kvlane.app.results.reply_sender import ReplySender
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import BrokerClock
from kvlane.streams.ports import Log
from kvlane.streams.reading.dead_letter_format import DeadLetterWriter
from kvlane.streams.reading.group_consumer import PartitionClaim


class CollectorContext(NamedTuple):
    """`remembered_ms`: for how long ids of finished requests are recognised. `find_model`: the
    model of a name, None if it cannot be had. `resume`: start reading the requests of a lane."""

    log: Log
    ctx: ProcessContext
    broker_clock: BrokerClock
    metrics: CollectorMetrics
    replies: ReplySender
    remembered_ms: int
    resume: Callable[[PartitionClaim], None]
    find_model: Callable[[str], Awaitable[Model | None]]
    dead_letters: DeadLetterWriter
