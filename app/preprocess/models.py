"""Which models prompts may name, by the registry: those with files, and those with workers.

A model with files stays known when its workers leave: prompts for it wait where routers hold them.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from app.preprocess.errors import InvalidPrompt
from app.routing.fleet import Fleet
from streams.records import ModelCard

NAMED = 5
"""How many names an error lists."""


class Models:
    """The models of a deployment. `fleet` follows the registry."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

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
        cards = self.cards()
        if not name and len(cards) == 1:
            name = next(iter(cards))
        if name in cards:
            card = cards[name]
            if card.kind not in ("tokens", kind):
                raise InvalidPrompt("model", f"it is for {card.kind} requests")
            return card
        wrong = "there is no such model" if name else "is needed, there are several"
        raise InvalidPrompt("model", f"{wrong}: {', '.join(_some(iter(cards)))}")

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
