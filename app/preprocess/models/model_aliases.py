"""Aliases of models: the model that serves a request for an alias (`ModelAlias`). No clock, no I/O.

A name that a client gives is an alias before it is a model; a target is always a model, so an alias
of a model's name may list that model, and no alias leads to another one.

A request gets its model once, where it gets its tokens, and its record has both names: so failover,
renewals and every reader have the same model. The choice follows from the record of the alias, the
targets with a worker, and a key of the request, by weighted rendezvous hashing: of a changed weight
no more requests than its share change their model, and the same key has the same model everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import log

from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.preprocess.requests.passthrough import PassthroughRequest
from kvlane.app.routing.state.fleet import Fleet, FleetMember
from kvlane.indexer.xxh3 import xxh3
from kvlane.streams.record_base import ModelKind
from kvlane.streams.records import AliasTarget, ModelAlias

_HASHES = 2.0**64


class ModelAliases:
    """The aliases of a deployment. `fleet` follows the registry. `needs_prefill`: no model is
    served without a prefill worker."""

    def __init__(self, fleet: Fleet, *, needs_prefill: bool = False) -> None:
        self._fleet = fleet
        self._needs_prefill = needs_prefill
        self._served = frozenset[str]()
        self._version = -1

    def find(self, name: object) -> ModelAlias | None:
        """The alias of this name, whether or not a model has it too; None without a target."""
        alias = self._fleet.aliases.get(name) if isinstance(name, str) else None
        return alias if alias is not None and alias.targets else None

    def present(self) -> Iterator[ModelAlias]:
        """The aliases that are in effect, by name."""
        return (alias for name in sorted(self._fleet.aliases) if (alias := self.find(name)))

    def kind(self, name: object) -> ModelKind:
        """The kind of requests that an alias or a model takes; tokens by default."""
        if (alias := self.find(name)) is not None:
            return self._model_kind(alias.targets[0].model)
        return self._model_kind(name) if isinstance(name, str) else "tokens"

    def model(self, name: str, key: str) -> str:
        """The model of a request with a key: of an alias one of its targets, else the name."""
        alias = self.find(name)
        return name if alias is None else choose_target(name, self.usable(alias), key)

    def serving(self, alias: ModelAlias) -> Sequence[AliasTarget]:
        """The targets that get requests now, with their weights; none if no model is served."""
        self._refresh()
        return serving_targets(self._alike(alias), self._served)

    def usable(self, alias: ModelAlias) -> Sequence[AliasTarget]:
        """The targets that requests may get. Without a worker requests wait, or fail, as those of
        the models themselves do."""
        alike = self._alike(alias)
        return self.serving(alias) or [each for each in alike if each.weight > 0] or alike[:1]

    def _alike(self, alias: ModelAlias) -> Sequence[AliasTarget]:
        """The targets that take requests of the same kind as the first."""
        kind = self._model_kind(alias.targets[0].model)
        return [each for each in alias.targets if self._model_kind(each.model) == kind]

    def _model_kind(self, name: str) -> ModelKind:
        card = self._fleet.models.get(name)
        return "tokens" if card is None else card.kind

    def _refresh(self) -> None:
        fleet = self._fleet
        if self._version != fleet.version:
            members = complete_members(fleet, needs_prefill=self._needs_prefill)
            self._served = frozenset(
                m.card.model for m in members if m.card.id not in fleet.cordons
            )
            self._version = fleet.version


def complete_members(fleet: Fleet, *, needs_prefill: bool) -> Iterator[FleetMember]:
    """The workers that can complete a request; a card without an epoch is not complete yet."""
    live = [m for _, m in fleet.live_members() if m.card.epoch is not None]
    prefilled = {m.card.model for m in live if m.card.role == "prefill"}
    for member in live:
        is_served = not needs_prefill or member.card.model in prefilled
        if member.card.role != "prefill" and is_served:
            yield member


def serving_targets(
    targets: Sequence[AliasTarget], served: AbstractSet[str]
) -> Sequence[AliasTarget]:
    """The targets that get requests: those with a weight that are served, else the first other."""
    present = [each for each in targets if each.model in served]
    return [each for each in present if each.weight > 0] or present[:1]


def choose_target(alias: str, targets: Sequence[AliasTarget], key: str) -> str:
    """The target of a key, by weighted rendezvous hashing: the first of independent exponential
    times whose rates are the weights. Each target has the share of its weight of all keys."""

    def time(target: AliasTarget) -> float:
        digest = xxh3(f"{alias}\0{key}\0{target.model}".encode(errors="surrogatepass"))
        return -log((digest + 0.5) / _HASHES) / target.weight

    return targets[0].model if len(targets) == 1 else min(targets, key=time).model


def choice_key(request: OpenAIRequest | PassthroughRequest, tenant: str, request_id: str) -> str:
    """The key of a request: its session, else its user, else its id. Both belong to a tenant."""
    if (session := request.ext.session_control) is not None:
        return f"session\0{tenant}\0{session.session_id}"
    user = request.body.user if isinstance(request, OpenAIRequest) else request.fields.get("user")
    return f"user\0{tenant}\0{user}" if user else f"id\0{request_id}"
