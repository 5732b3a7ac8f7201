"""Loader of models from the log, each loaded once, in the background before its first prompt.

A failed load is retried later. The owner decides which models are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kvlane.app.preprocess.models import model as loaded
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import LoadedModel
from kvlane.app.preprocess.prompt_errors import BadModel
from kvlane.app.preprocess.text.piece_cache import PieceCache
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.errors import StreamError
from kvlane.streams.records import ModelCard

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 30.0
"""Time limit of a prompt for a loading model. The largest tokenizers take 4 s."""
LOAD_RETRY_S = 10.0
"""Delay before a failed load is retried."""
MAX_SPARE_MODELS = 8
"""Loaded models kept beyond those in use: their workers may be restarting. A large tokenizer takes
100 MB."""


class LoadFailed(Exception):
    """A model could not be loaded, at this point of the clock; the cause has the reason."""

    def __init__(self, at: float) -> None:
        super().__init__("it could not be loaded")
        self.at = at


class ModelLoader:
    def __init__(self, artifacts: ArtifactStore, pool: WorkPool, ctx: ProcessContext) -> None:
        self._artifacts = artifacts
        self._pool = pool
        self._ctx = ctx
        self._pieces = PieceCache()
        self._loads: dict[str, asyncio.Task[LoadedModel | LoadFailed]] = {}

    def sync(self, cards: Iterable[ModelCard]) -> None:
        """Start loading new models, and drop those that are not listed."""
        wanted = {_key(card): card for card in cards}
        for card in wanted.values():
            self._load(card)
        spare = [key for key, load in self._loads.items() if key not in wanted and load.done()]
        for key in spare[: max(0, len(spare) - MAX_SPARE_MODELS)]:
            del self._loads[key]

    async def model(self, card: ModelCard) -> LoadedModel:
        """The model of a card that names files. Raises TimeoutError after LOAD_TIMEOUT_S, BadModel,
        StreamError."""
        load = self._load(card)
        if not load.done():
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await asyncio.shield(load)
        model = load.result()
        if not isinstance(model, LoadFailed):
            return model
        if isinstance(model.__cause__, StreamError):
            raise model.__cause__
        raise BadModel(f"{card.name}: {model}")

    def _load(self, card: ModelCard) -> asyncio.Task[LoadedModel | LoadFailed]:
        """The load of a model: under way, done, or begun now."""
        load = self._loads.get(_key(card))
        if load is not None and load.done():
            model = load.result()
            if isinstance(model, LoadFailed) and self._ctx.clock.now() - model.at >= LOAD_RETRY_S:
                load = None
        if load is None:
            load = self._ctx.spawn(f"load {card.name}", self._loaded(card))
            self._loads[_key(card)] = load
        return load

    async def _loaded(self, card: ModelCard) -> LoadedModel | LoadFailed:
        try:
            model = await loaded.load_model(
                card, self._artifacts, self._pool, self._ctx.clock, self._pieces
            )
        except Exception as e:
            log.exception("model %s cannot be used", card.name)
            failed = LoadFailed(self._ctx.clock.now())
            failed.__cause__ = e
            return failed
        log.info("model %s is loaded", card.name)
        return model


def _key(card: ModelCard) -> str:
    """Equal checksums mean equal models under any names."""
    return card.checksum or card.name
