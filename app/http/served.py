"""Which models are served: those of the workers that live, by the registry.

A worker that leaves, or that routers found dead, has no card any more. So the registry alone says
which models a request can be for; who of the workers is busy or draining is the routers' matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple

from app.http.errors import RETRY_AFTER_S, ApiError
from app.routing.fleet import Fleet, FleetWorker
from streams.ports import Partition
from streams.records import Fact, ModelCard, ModelKind, WorkerCard
from streams.topics import REGISTRY

REMEMBERED = 10_000
"""Names of models that were served once; more than any registry has."""


class ServedModel(NamedTuple):
    """A model with a live worker. `created`: seconds since 1970 of its oldest worker's card.

    `card` is the model's own, if it has one; the context is the shortest of its workers.
    """

    name: str
    created: int
    context_length: int | None
    card: ModelCard | None


class Served:
    """What the fleet serves. `fleet` follows the registry."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[str, None] = {}
        self._models: dict[str, ServedModel] = {}
        self._as_of: int | None = None

    def applied(self, _: Partition, facts: Sequence[Fact]) -> None:
        """Records of the registry were folded: remember the names in them."""
        for fact in facts:
            if isinstance(fact.record, WorkerCard):
                self._known[fact.record.model] = None
            elif isinstance(fact.record, ModelCard):
                self._known[fact.record.name] = None
        while len(self._known) > REMEMBERED:
            self._known.pop(next(iter(self._known)))

    def models(self) -> list[ServedModel]:
        """All of them, by name."""
        return list(self._present().values())

    def model(self, name: str) -> ServedModel:
        """The model of this name.

        Raises ApiError: 404 when there is none, 503 when there was, or might be: without a single
        worker, nobody can tell a wrong name from one whose workers are still to come.
        """
        models = self._present()
        if name in models:
            return models[name]
        if not models or name in self._known:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "no worker serves this model at the moment",
                code="no_workers",
                param="model",
                retry_after_s=RETRY_AFTER_S,
            )
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            "there is no such model; GET /v1/models lists those that are served",
            code="model_not_found",
            param="model",
        )

    def kind(self, name: object) -> ModelKind:
        """What the model of this name takes, also while it has no worker; tokens, if it says
        nothing else."""
        card = self._fleet.models.get(name) if isinstance(name, str) else None
        return "tokens" if card is None else card.kind

    def _present(self) -> dict[str, ServedModel]:
        """What is served, as of the registry's last record."""
        position = self._fleet.position(Partition(REGISTRY, 0))
        if position is None or position != self._as_of:
            members: dict[str, list[FleetWorker]] = {}
            for member in self._members():
                members.setdefault(member.card.model, []).append(member)
            cards = self._fleet.models
            self._models = {
                name: _served(name, members[name], cards.get(name)) for name in sorted(members)
            }
            self._as_of = position
        return self._models

    def _members(self) -> Iterator[FleetWorker]:
        """The workers that can finish an answer; a card without epoch is not complete yet."""
        for _, member in self._fleet.living():
            if member.card.epoch is not None and member.card.role != "prefill":
                yield member


def _served(name: str, members: Sequence[FleetWorker], card: ModelCard | None) -> ServedModel:
    lengths = [m.card.config.context_length for m in members if m.card.config.context_length]
    created = min(m.since_ms for m in members) // 1000
    return ServedModel(name, created, min(lengths, default=None), card)
