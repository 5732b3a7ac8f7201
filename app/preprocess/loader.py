"""Models loaded from the log, each once: for whatever prepares prompts.

A model is loaded when it is asked to be kept, in the background, so that its first prompt need not
wait; one whose files cannot be used is tried again later. Which models there are is for the owner
to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from app.lifetime import Lifetime
from app.preprocess import loaded
from app.preprocess.artifacts import Artifacts
from app.preprocess.errors import BadModel
from app.preprocess.loaded import LoadedModel
from app.preprocess.pool import Pool
from streams.errors import StreamError
from streams.records import ModelCard

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long a prompt waits for a model that is being loaded. The largest tokenizers take 4 s."""
RETRY_S = 10.0
"""After so long a model that could not be loaded is tried again."""
KEPT = 8
"""Loaded models that may be more than are wanted: their workers may only be restarting. A large
tokenizer takes 100 MB."""


class Failed(Exception):
    """A model could not be loaded, at this point of the clock; the cause says why."""

    def __init__(self, at: float) -> None:
        super().__init__("it could not be loaded")
        self.at = at


class Loader:
    """The models of one process."""

    def __init__(self, artifacts: Artifacts, pool: Pool, life: Lifetime) -> None:
        self._artifacts = artifacts
        self._pool = pool
        self._life = life
        self._loads: dict[str, asyncio.Task[LoadedModel | Failed]] = {}

    def keep(self, cards: Iterable[ModelCard]) -> None:
        """Begin to load what is new among these; forget what is not among them any more."""
        wanted = {_key(card): card for card in cards}
        for card in wanted.values():
            self._load(card)
        spare = [key for key, load in self._loads.items() if key not in wanted and load.done()]
        for key in spare[: max(0, len(spare) - KEPT)]:
            del self._loads[key]

    async def model(self, card: ModelCard) -> LoadedModel:
        """The model of a card that names files.

        Raises TimeoutError after WAIT_S; BadModel, and StreamError when the log does not answer.
        """
        async with asyncio.timeout(WAIT_S):
            model = await asyncio.shield(self._load(card))
        if not isinstance(model, Failed):
            return model
        if isinstance(model.__cause__, StreamError):
            raise model.__cause__
        raise BadModel(f"{card.name}: {model}")

    def _load(self, card: ModelCard) -> asyncio.Task[LoadedModel | Failed]:
        """The load of a model: under way, done, or begun now."""
        load = self._loads.get(_key(card))
        if load is not None and load.done():
            model = load.result()
            if isinstance(model, Failed) and self._life.clock.now() - model.at >= RETRY_S:
                load = None
        if load is None:
            load = self._life.spawn(f"load {card.name}", self._loaded(card))
            self._loads[_key(card)] = load
        return load

    async def _loaded(self, card: ModelCard) -> LoadedModel | Failed:
        try:
            model = await loaded.load(card, self._artifacts, self._pool, self._life.clock)
        except Exception as e:
            log.exception("model %s cannot be used", card.name)
            failed = Failed(self._life.clock.now())
            failed.__cause__ = e
            return failed
        log.info("model %s is loaded", card.name)
        return model


def _key(card: ModelCard) -> str:
    """Equal checksums, equal models, whatever their names."""
    return card.checksum or card.name
