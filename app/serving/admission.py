"""Whether a worker may join those that serve its model: its card has to say what theirs says.

A model has one card. The last one written counts, so a worker that splits prompts otherwise, or
takes shorter ones, would take the model from all others. It is refused before it has written
anything. Those that serve it may just be leaving, which is waited for.

Two that start at the same moment are not told apart: then the last card counts, and routers leave
out who has another kind or another block size.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from app.lifetime import Lifetime
from app.routing.fleet import Fleet
from streams.follow import Follower
from streams.ports import Log
from streams.records import ModelCard
from streams.topics import REGISTRY

log = logging.getLogger(__name__)

COMMON = ("kind", "block_size", "context_length", "tokenizer", "template")
"""What workers of one model agree on."""
LEAVING_S = 20.0
"""Until then a worker that was killed is declared lost and its card taken away, at the shipped
time-outs."""
LOOK_S = 0.5


class PoolDiffers(Exception):
    """Other workers serve another model under this name.

    Give the model a name of its own (KVLANE_MODEL), or stop them first.
    """


async def admit(card: ModelCard, worker_id: str, records: Log, life: Lifetime) -> None:
    """Return when no other worker serves this model by another card.

    Raises PoolDiffers when they do not leave, and what reading the registry raises.
    """
    fleet = Fleet()
    follower = Follower(records, fleet, [REGISTRY], life.clock)
    reading = life.spawn("admission", follower.run())
    until = life.clock.now() + LEAVING_S
    told = False
    try:
        await follower.wait_caught_up()
        while others := _who_differ(card, worker_id, fleet):
            why = _difference(fleet.models[card.name], card)
            if life.clock.now() > until:
                raise PoolDiffers(
                    f"{', '.join(others)} serve {card.name!r}, and differ: {why}. Give this model "
                    "a name of its own (KVLANE_MODEL), or stop them first"
                )
            if not told:
                told = True
                log.warning("waiting for %s to leave, who differ: %s", ", ".join(others), why)
            await life.clock.sleep(LOOK_S)
    finally:
        reading.cancel()
        await asyncio.wait({reading})


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
