"""Models that are served, and their tokenizers and templates, for one gateway.

A model is served while the registry has the card of a worker for it, busy or not; an alias while
one of its targets is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.http.api_errors import ApiError, error_of_stream, invalid_request, unavailable
from kvlane.app.http.openai.openai_responses import EndpointKind
from kvlane.app.preprocess.models.byte_model import Model, byte_model_of
from kvlane.app.preprocess.models.model import ModelLoader
from kvlane.app.preprocess.models.model_aliases import ModelAliases, complete_members
from kvlane.app.preprocess.models.model_names import quote_name, unknown_model, unsupported_kind
from kvlane.app.preprocess.request_reader import lacking_features
from kvlane.app.routing.state.fleet import Fleet, FleetMember
from kvlane.streams.errors import StreamError
from kvlane.streams.ports import Partition
from kvlane.streams.records import LogRecord, ModelAlias, ModelCard, WorkerCard
from kvlane.streams.topics import REGISTRY

MAX_KNOWN_NAMES = 10_000


class ServedModel(NamedTuple):
    """A model with a live worker. `created`: seconds since 1970 of its oldest worker's card;
    `context_length`: the shortest of its workers; `unsupported`: the features that one or more of
    them lack, with an engine's name."""

    name: str
    created: int
    context_length: int | None
    card: ModelCard | None
    unsupported: Mapping[str, str]


class ServedModels:
    """The models of the live workers of a fleet, which follows the registry. `needs_prefill`: none
    is served without a prefill worker."""

    def __init__(self, fleet: Fleet, *, needs_prefill: bool = False) -> None:
        self._fleet = fleet
        self._needs_prefill = needs_prefill
        self.aliases = ModelAliases(fleet, needs_prefill=needs_prefill)
        self._known: dict[str, None] = {}
        self._models: dict[str, ServedModel] = {}
        self._listed: dict[str, ServedModel] = {}
        self._as_of: int | None = None

    def on_records(self, _: Partition, log_records: Sequence[LogRecord]) -> None:
        """Keep the names of models in new records of the registry."""
        for log_record in log_records:
            if isinstance(log_record.record, WorkerCard):
                self._known[log_record.record.model] = None
            elif isinstance(log_record.record, ModelCard):
                self._known[log_record.record.name] = None
        while len(self._known) > MAX_KNOWN_NAMES:
            self._known.pop(next(iter(self._known)))

    def models(self) -> list[ServedModel]:
        """The aliases and models that clients can name; an alias hides the model of its name."""
        self._refresh()
        return list(self._listed.values())

    def listed(self, name: str) -> ServedModel:
        """The alias or model that a client names. Raises ApiError, as `model`."""
        self._refresh()
        return self._listed.get(name) or self.model(name)

    def cards(self) -> Iterator[ModelCard]:
        """The cards of the models that have files."""
        self._refresh()
        cards = map(_card, self._models.values())
        return (card for card in cards if byte_model_of(card) is None)

    def model(self, name: str) -> ServedModel:
        """The model of this name. Raises ApiError: 404 for an unknown model, 503 for one that had a
        worker before, and for any name without a single worker: its workers may be starting."""
        self._refresh()
        models = self._models
        if name in models:
            return models[name]
        if not models or name in self._known:
            message = f"no worker serves the model {quote_name(name)} at the moment"
            raise unavailable(message, "no_workers", "model")
        message = unknown_model(name, self._listed)
        raise ApiError(HTTPStatus.NOT_FOUND, message, code="model_not_found", param="model")

    def _refresh(self) -> None:
        position = self._fleet.position(Partition(REGISTRY, 0))
        if position is None or position != self._as_of:
            members: dict[str, list[FleetMember]] = {}
            for member in complete_members(self._fleet, needs_prefill=self._needs_prefill):
                members.setdefault(member.card.model, []).append(member)
            cards = self._fleet.models
            self._models = {
                name: _served(name, members[name], cards.get(name)) for name in sorted(members)
            }
            aliases = [self._alias(each, self._models) for each in self.aliases.present()]
            self._listed = self._models | {each.name: each for each in aliases if each}
            self._as_of = position

    def _alias(self, alias: ModelAlias, models: Mapping[str, ServedModel]) -> ServedModel | None:
        """An alias as a model of the bounds that all targets have which get requests now, or wait
        for cordoned workers."""
        usable = self.aliases.usable(alias)
        targets = [models[each.model] for each in usable if each.model in models]
        if not targets:
            return None
        lengths = [each.context_length for each in targets if each.context_length]
        created = min(each.created for each in targets)
        return ServedModel(alias.name, created, min(lengths, default=None), None, {})


def _served(name: str, members: Sequence[FleetMember], card: ModelCard | None) -> ServedModel:
    lengths = [m.card.config.context_length for m in members if m.card.config.context_length]
    created = min(m.since_ms for m in members) // 1000
    unsupported = lacking_features(member.card for member in members)
    return ServedModel(name, created, min(lengths, default=None), card, unsupported)


class ModelCatalog:
    def __init__(self, served: ServedModels, loader: ModelLoader) -> None:
        self._served = served
        self._loader = loader

    def refresh(self) -> None:
        """Start loading new models, and drop those that are no longer served."""
        self._loader.sync(self._served.cards())

    async def model(self, kind: EndpointKind, name: str) -> Model:
        """The model of a request, by its own name. Raises ApiError, BadModel."""
        if not name:
            raise invalid_request("model: is needed", "model")
        served = self._served.model(name)
        takes = "tokens" if served.card is None else served.card.kind
        if wrong := unsupported_kind(name, takes, kind):
            raise invalid_request(f"model: {wrong}", "model", code="model_not_supported")
        card = _card(served)
        if (model := byte_model_of(card)) is not None:
            return model
        try:
            return await self._loader.model(card)
        except TimeoutError:
            message = "the model is still being loaded"
            raise unavailable(message, "model_unavailable", "model") from None
        except StreamError as e:
            raise error_of_stream(e) from e


def _card(served: ServedModel) -> ModelCard:
    """The card of a model, or one of its name alone. Its context is that of its workers, if it
    names none."""
    card = served.card or ModelCard(name=served.name)
    if card.context_length is None and served.context_length is not None:
        return replace(card, context_length=served.context_length)
    return card
