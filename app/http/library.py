"""The models that requests can be made for, with their tokenizers and templates at hand.

A model is loaded when it appears in the registry, in the background, so that its first request need
not wait; one whose files cannot be used is tried again later. Which models there are is
`app/http/served.py`'s to say, what is done with one is `app/preprocess/loaded.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from msgspec.structs import replace

from app.http.answers import Kind
from app.http.errors import RETRY_AFTER_S, ApiError, invalid, of_error
from app.http.served import Served, ServedModel
from app.lifetime import Lifetime
from app.preprocess import loaded
from app.preprocess.artifacts import Artifacts
from app.preprocess.byte_model import ByteModel, Model
from app.preprocess.errors import BadModel
from app.preprocess.loaded import LoadedModel
from app.preprocess.pool import Pool
from streams.errors import StreamError
from streams.records import ModelCard

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""How long a request waits for a model that is being loaded. The largest tokenizers take 4 s."""
RETRY_S = 10.0
"""After so long a model that could not be loaded is tried again."""
KEPT = 8
"""Loaded models that may be more than are served: their workers may only be restarting. A large
tokenizer takes 100 MB."""


class Failed(Exception):
    """A model could not be loaded, at this point of the clock; the cause says why."""

    def __init__(self, at: float) -> None:
        super().__init__("it could not be loaded")
        self.at = at


class Library:
    """The models of one gateway."""

    def __init__(self, served: Served, artifacts: Artifacts, pool: Pool, life: Lifetime) -> None:
        self._served = served
        self._artifacts = artifacts
        self._pool = pool
        self._life = life
        self._loads: dict[str, asyncio.Task[LoadedModel | Failed]] = {}

    def refresh(self) -> None:
        """Begin to load what is served and new; forget what is not served any more."""
        wanted = {_key(card): card for m in self._served.models() if (card := _files(m))}
        for card in wanted.values():
            self._load(card)
        spare = [key for key, load in self._loads.items() if key not in wanted and load.done()]
        for key in spare[: max(0, len(spare) - KEPT)]:
            del self._loads[key]

    async def model(self, kind: Kind, name: str) -> Model:
        """The model of a request. Raises ApiError, BadModel."""
        if not name:
            raise invalid("model: is needed", "model")
        served = self._served.model(name)
        if served.card is not None and served.card.kind not in ("tokens", kind):
            message = f"model: it is for {served.card.kind} requests"
            raise invalid(message, "model", code="model_not_supported")
        card = _files(served)
        if card is None:
            return ByteModel(served.name, served.context_length)
        try:
            async with asyncio.timeout(WAIT_S):
                model = await asyncio.shield(self._load(card))
        except TimeoutError:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the model is still being loaded",
                code="model_unavailable",
                param="model",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        if not isinstance(model, Failed):
            return model
        if isinstance(model.__cause__, StreamError):
            raise of_error(model.__cause__)
        raise BadModel(f"{name}: {model}")

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


def _files(served: ServedModel) -> ModelCard | None:
    """The card of a model that has files. Its context is that of its workers, if it names none."""
    card = served.card
    if card is None or card.tokenizer is None:
        return None
    if card.context_length is None and served.context_length is not None:
        return replace(card, context_length=served.context_length)
    return card
