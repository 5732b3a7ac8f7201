"""Compatibility of a worker with the other workers of its model: their model cards must agree.

A model has one card, and the last one written counts. A worker with another tokenizer or a shorter
context would therefore change the model for all others, so it is refused before it writes a card.
Workers with a different card may be about to leave; the check waits for them.

The check can come too late: two workers may start at the same moment, or one may return after it
was declared lost. Then the last card counts: a worker that reads a different one ends
(`check_compatible`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from kvlane.app.operator_error import OperatorError
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log
from kvlane.streams.records import ModelCard
from kvlane.streams.topics import REGISTRY
from kvlane.streams.views.follower import Follower

log = logging.getLogger(__name__)

SHARED_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(ModelCard)
    if field.name not in ("name", "checksum")
)
"""Fields that must be equal on all workers of one model."""
REGISTRY_READ_TIMEOUT_S = 60.0
RECHECK_INTERVAL_S = 0.5


class ModelMismatch(OperatorError):
    """Other workers serve a different model under this name."""

    correction = (
        "Give this model a name of its own (KVLANE_MODEL), or stop the other workers first."
    )


async def wait_until_compatible(
    card: ModelCard, worker_id: str, kafka_log: Log, ctx: ProcessContext, timeout_s: float
) -> None:
    """Return when no other live worker serves this model with a different card.

    `timeout_s`: limit of the wait for such workers to leave. Raises ModelMismatch after that, and
    BrokerUnavailable.
    """
    fleet = Fleet()
    follower = Follower(kafka_log, fleet, [REGISTRY], ctx.clock)
    reading = ctx.spawn("admission", follower.run())
    is_logged = False
    try:
        try:
            async with asyncio.timeout(REGISTRY_READ_TIMEOUT_S):
                await follower.wait_caught_up()
        except TimeoutError as e:
            raise BrokerUnavailable(
                f"the registry was not read within {REGISTRY_READ_TIMEOUT_S:g} s"
            ) from e
        until = ctx.clock.now() + timeout_s
        while others := _mismatched_workers(card, worker_id, fleet):
            why = _difference(fleet.models[card.name], card)
            if ctx.clock.now() > until:
                raise ModelMismatch(
                    f"{', '.join(others)} serve {card.name!r} with a different card: {why}"
                )
            if not is_logged:
                is_logged = True
                log.warning(
                    "%s serve %r with a different card: %s. This worker waits up to %.0f s for "
                    "them to leave, then it is refused",
                    ", ".join(others), card.name, why, timeout_s,
                )  # fmt: skip
            await ctx.clock.sleep(RECHECK_INTERVAL_S)
    finally:
        reading.cancel()
        await asyncio.wait({reading})


def check_compatible(card: ModelCard, written: ModelCard) -> None:
    """Compare a later card of the registry with this worker's. Raises ModelMismatch."""
    if written.name == card.name and _shared_values(written) != _shared_values(card):
        raise ModelMismatch(
            f"another worker now serves {card.name!r} with a different card: "
            f"{_difference(written, card)}; give this model its own name (KVLANE_MODEL)"
        )


def _mismatched_workers(card: ModelCard, worker_id: str, fleet: Fleet) -> list[str]:
    present = fleet.models.get(card.name)
    if present is None or _shared_values(present) == _shared_values(card):
        return []
    serving = (name for name, member in fleet.live_members() if member.card.model == card.name)
    return sorted(name for name in serving if name != worker_id)


def _shared_values(card: ModelCard) -> tuple[Any, ...]:
    return tuple(getattr(card, name) for name in SHARED_FIELDS)


def _difference(theirs: ModelCard, ours: ModelCard) -> str:
    return ", ".join(
        f"their {name} is {_format(there)}, here {_format(here)}"
        for name, there, here in zip(
            SHARED_FIELDS, _shared_values(theirs), _shared_values(ours), strict=True
        )
        if there != here
    )


def _format(value: Any) -> str:
    return getattr(value, "sha256", "")[:12] or str(value)
