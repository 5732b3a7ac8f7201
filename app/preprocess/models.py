"""What a preprocessor knows of the models that are served: read from the registry, card by card."""

from __future__ import annotations

from streams.records import Fact, Tombstone, WorkerCard


class Models:
    """Context lengths by model, as the cards of the workers say."""

    def __init__(self) -> None:
        self._cards: dict[str, WorkerCard] = {}

    def apply(self, fact: Fact) -> None:
        """Take in one record of the registry."""
        record = fact.record
        if isinstance(record, WorkerCard):
            self._cards[record.id] = record
        elif isinstance(record, Tombstone):
            card = self._cards.get(record.key.removeprefix("worker/"))
            if card is not None and (record.epoch or fact.offset) >= (card.epoch or 0):
                del self._cards[card.id]

    def context_length(self, model: str) -> int | None:
        """The shortest context among the workers of a model; any model for ""; None if unknown."""
        lengths = [
            card.config.context_length
            for card in self._cards.values()
            if model in ("", card.model) and card.config.context_length is not None
        ]
        return min(lengths, default=None)
