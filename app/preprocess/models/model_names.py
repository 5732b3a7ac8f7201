"""Models that prompts may name, from the registry: those with files or workers, and aliases.

A model stays known when its workers leave, and routers queue prompts for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from kvlane.app.preprocess.models.model_aliases import ModelAliases
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, UnknownModel
from kvlane.app.routing.state.fleet import Fleet
from kvlane.streams.record_base import ModelKind
from kvlane.streams.records import ModelCard, WorkerCard

MAX_LISTED_NAMES = 5
MAX_SHOWN_CHARS = 64
MAX_DEPARTED_MODELS = 1000
"""Models without files whose workers have left; the oldest are dropped."""


def unsupported_kind(name: str, takes: ModelKind, kind: str) -> str:
    """The reason why a model cannot serve requests of a kind; empty if it can."""
    if takes == "tokens":
        return f"{quote_name(name)} is for chats and completions" if kind == "embedding" else ""
    return "" if takes == kind else f"{quote_name(name)} is for {takes} requests"


def unknown_model(name: str, available: Iterable[str]) -> str:
    return f"the model {quote_name(name)} does not exist; available: {_listed(available)}"


def quote_name(name: str) -> str:
    return repr(name if len(name) <= MAX_SHOWN_CHARS else f"{name[:MAX_SHOWN_CHARS]}…")


def _listed(names: Iterable[str]) -> str:
    first = list(islice(names, MAX_LISTED_NAMES + 1))
    shown = [name[:MAX_SHOWN_CHARS] for name in first[:MAX_LISTED_NAMES]] + ["…"] * (
        len(first) > MAX_LISTED_NAMES
    )
    return ", ".join(shown) or "none"


class ModelNames:
    """The models of a deployment. `fleet` follows the registry."""

    def __init__(self, fleet: Fleet, *, needs_prefill: bool = False) -> None:
        self._fleet = fleet
        self.aliases = ModelAliases(fleet, needs_prefill=needs_prefill)
        self._seen: dict[str, int | None] = {}
        """The context of every model that a worker had, in the order in which they were seen."""

    def on_worker_card(self, card: WorkerCard) -> None:
        """Remember the model of a worker: its prompts are accepted after the worker has left."""
        self._seen.pop(card.model, None)
        self._seen[card.model] = card.config.context_length
        if len(self._seen) > MAX_DEPARTED_MODELS:
            del self._seen[next(iter(self._seen))]

    @property
    def has_any(self) -> bool:
        return bool(self._seen or self.cards())

    def cards(self) -> dict[str, ModelCard]:
        """All of them, by name. A model without files has a card of its name and context only."""
        lengths: dict[str, list[int]] = {}
        for _, member in self._fleet.live_members():
            length = member.card.config.context_length
            lengths.setdefault(member.card.model, []).extend([] if length is None else [length])
        names = sorted({*lengths, *self._fleet.models})
        return {name: self._card(name, lengths.get(name, [])) for name in names}

    def find(self, kind: str, name: str) -> ModelCard:
        """The card of the model for a prompt of a kind; "": the only one there is. Raises
        InvalidPrompt."""
        cards, name = self.cards(), name or self._only()
        if name in self._seen and name not in cards:
            if wrong := unsupported_kind(name, "tokens", kind):
                raise InvalidPrompt("model", wrong)
            return ModelCard(name=name, context_length=self._seen[name])
        if name in cards:
            card = cards[name]
            if wrong := unsupported_kind(name, card.kind, kind):
                raise InvalidPrompt("model", wrong)
            return card
        if name:
            raise UnknownModel("model", unknown_model(name, self._names(cards)))
        raise InvalidPrompt("model", f"is needed; available: {_listed(self._names(cards))}")

    def is_passthrough(self, name: object) -> bool:
        """Whether bodies are forwarded unchanged to the model of a name."""
        return self.aliases.kind(name or self._only()) != "tokens"

    def _names(self, cards: Iterable[str]) -> list[str]:
        return sorted({*cards, *(alias.name for alias in self.aliases.present())})

    def _only(self) -> str:
        """The only model that is served, or else that is known; "" where there are several."""
        served = {member.card.model for _, member in self._fleet.live_members()}
        names = served or self._fleet.models or self._seen
        return next(iter(names)) if len(names) == 1 else ""

    def with_files(self) -> Iterator[ModelCard]:
        """Those that have to be loaded before a prompt can be read."""
        return (card for card in self.cards().values() if card.tokenizer is not None)

    def _card(self, name: str, lengths: list[int]) -> ModelCard:
        card = self._fleet.models.get(name) or ModelCard(name=name)
        if card.context_length is None and lengths:
            return replace(card, context_length=min(lengths))
        return card
