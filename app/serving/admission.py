"""Whether a worker may join those that serve its model: its card has to say what theirs says.

A model has one card. The last one written counts, so a worker that splits prompts otherwise, or
takes shorter ones, would take the model from all others. It is refused before it has written a
card. Those that serve it may just be leaving, which is waited for.

Where that comes too late, of two that start at the same moment or of one that comes back from the
dead, the last card counts: whoever reads one there that is not its own leaves (`check`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from app.lifetime import Lifetime, OperatorError
from app.routing.fleet import Fleet
from streams.errors import BrokerUnavailable
from streams.follow import Follower
from streams.ports import Log
from streams.records import ModelCard
from streams.topics import REGISTRY

log = logging.getLogger(__name__)

COMMON = tuple(
    field.name
    for field in msgspec.structs.fields(ModelCard)
    if field.name not in ("name", "checksum")
)
"""What workers of one model agree on."""
READ_S = 60.0
LOOK_S = 0.5


class PoolDiffers(OperatorError):
    """Other workers serve another model under this name.

    Give the model a name of its own (KVLANE_MODEL), or stop them first.
    """


async def admit(
    card: ModelCard, worker_id: str, records: Log, life: Lifetime, patience_s: float
) -> None:
    """Return when no other worker serves this model by another card.

    `patience_s`: how long that takes at most which are leaving. Raises PoolDiffers when they are
    not, BrokerUnavailable.
    """
    fleet = Fleet()
    follower = Follower(records, fleet, [REGISTRY], life.clock)
    reading = life.spawn("admission", follower.run())
    told = False
    try:
        try:
            async with asyncio.timeout(READ_S):
                await follower.wait_caught_up()
        except TimeoutError as e:
            raise BrokerUnavailable(f"the registry was not read within {READ_S:g} s") from e
        until = life.clock.now() + patience_s
        while others := _who_differ(card, worker_id, fleet):
            why = _difference(fleet.models[card.name], card)
            if life.clock.now() > until:
                raise PoolDiffers(
                    f"{', '.join(others)} serve {card.name!r}, and differ: {why}; give this model "
                    "a name of its own (KVLANE_MODEL), or stop them first"
                )
            if not told:
                told = True
                log.warning("waiting for %s to leave, who differ: %s", ", ".join(others), why)
            await life.clock.sleep(LOOK_S)
    finally:
        reading.cancel()
        await asyncio.wait({reading})


def check(card: ModelCard, written: ModelCard) -> None:
    """Raises PoolDiffers when a card that was written after this one of a model is another."""
    if written.name == card.name and _common(written) != _common(card):
        raise PoolDiffers(
            f"another worker serves {card.name!r} now, and differs: {_difference(written, card)}; "
            "give this model a name of its own (KVLANE_MODEL)"
        )


def _who_differ(card: ModelCard, worker_id: str, fleet: Fleet) -> list[str]:
    present = fleet.models.get(card.name)
    if present is None or _common(present) == _common(card):
        return []
    serving = (name for name, member in fleet.living() if member.card.model == card.name)
    return sorted(name for name in serving if name != worker_id)


def _common(card: ModelCard) -> tuple[Any, ...]:
    return tuple(getattr(card, name) for name in COMMON)


def _difference(theirs: ModelCard, ours: ModelCard) -> str:
    return ", ".join(
        f"their {name} is {_shown(there)}, here {_shown(here)}"
        for name, there, here in zip(COMMON, _common(theirs), _common(ours), strict=True)
        if there != here
    )


def _shown(value: Any) -> str:
    return getattr(value, "sha256", "")[:12] or str(value)
