"""Which models prompts may name, by the registry: those with files, and those with workers.

A model stays known when its workers leave: prompts for it wait where routers hold them. One with
files has a card of its own in the registry; of others the cards of their workers are remembered.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from app.preprocess.errors import InvalidPrompt
from app.routing.fleet import Fleet
from streams.records import ModelCard, ModelKind, WorkerCard

NAMED = 5
"""How many names an error lists."""
REMEMBERED = 1000
"""Models without files whose workers have left; of more, those seen longest ago are forgotten."""


def misfit(takes: ModelKind, kind: str) -> str:
    """What a model is for that cannot be asked for requests of a kind; "" when it can."""
    if takes == "tokens":
        return "it is for chats and completions" if kind == "embedding" else ""
    return "" if takes == kind else f"it is for {takes} requests"


class Models:
    """The models of a deployment. `fleet` follows the registry."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: dict[str, int | None] = {}
        """The context of every model that a worker had, in the order in which they were seen."""

    def saw(self, card: WorkerCard) -> None:
        """A worker has this model; its prompts are taken also when it has left."""
        self._seen.pop(card.model, None)
        self._seen[card.model] = card.config.context_length
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]

    @property
    def has_any(self) -> bool:
        """Whether there is a model, or was."""
        return bool(self._seen or self.cards())

    def cards(self) -> dict[str, ModelCard]:
        """All of them, by name. A model without files has a card of its name and context only."""
        lengths: dict[str, list[int]] = {}
        for _, member in self._fleet.living():
            length = member.card.config.context_length
            lengths.setdefault(member.card.model, []).extend([] if length is None else [length])
        names = sorted({*lengths, *self._fleet.models})
        return {name: self._card(name, lengths.get(name, [])) for name in names}

    def find(self, kind: str, name: str) -> ModelCard:
        """The card of the model for a prompt of a kind; "" stands for the only one there is.

        Raises InvalidPrompt.
        """
        cards, name = self.cards(), name or self._only()
        if name in self._seen and name not in cards:
            if wrong := misfit("tokens", kind):
                raise InvalidPrompt("model", wrong)
            return ModelCard(name=name, context_length=self._seen[name])
        if name in cards:
            card = cards[name]
            if wrong := misfit(card.kind, kind):
                raise InvalidPrompt("model", wrong)
            return card
        wrong = "there is no such model" if name else "is needed, there are several"
        raise InvalidPrompt("model", f"{wrong}: {', '.join(_some(iter(cards)))}")

    def passes_on(self, name: object) -> bool:
        """Whether the model of a name gets the bodies of prompts as they come."""
        name = name or self._only()
        card = self._fleet.models.get(name) if isinstance(name, str) else None
        return card is not None and card.kind != "tokens"

    def _only(self) -> str:
        """The only model that is served, or else that is known; "" where there are several."""
        served = {member.card.model for _, member in self._fleet.living()}
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


def _some(names: Iterator[str]) -> list[str]:
    """The first names, and a sign if there are more."""
    named = [name for name, _ in zip(names, range(NAMED), strict=False)]
    return [*named, "…"] if next(names, None) is not None else named
