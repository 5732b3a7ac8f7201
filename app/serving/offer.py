"""A model's card and files, offered to everybody who prepares prompts for it.

The files are in the log before the card, which is the caller's to write, and that before the worker
registers: a model that has a worker has its files.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from app.lifetime import Lifetime
from app.preprocess import loaded
from app.preprocess.artifacts import Artifacts
from app.preprocess.loaded import LoadedModel
from app.preprocess.modelfolder import ModelFiles, checksum_of
from app.preprocess.pool import Inline
from app.settings import Settings
from streams.ports import Log
from streams.records import EngineConfig, ModelCard


class Offer:
    """The files of one model, and where they go."""

    def __init__(self, log: Log, settings: Settings, life: Lifetime, files: ModelFiles) -> None:
        self._pool = Inline()  # once, before anything is served
        self._clock = life.clock
        self._artifacts = Artifacts(log, life.clock, self._pool, settings.cache_dir / "artifacts")
        self._files = files

    async def publish(
        self, name: str, config: EngineConfig, announce: Callable[[ModelCard], Awaitable[None]]
    ) -> LoadedModel:
        """Put the files into the log and announce the card; the model, ready to read answers.

        Raises BadModel, BrokerUnavailable, and what `announce` raises.
        """
        card = await loaded.publish_files(
            name,
            self._files,
            self._artifacts,
            context_length=config.context_length,
            block_size=config.kv_cache_block_size,
        )
        await announce(card)
        return await loaded.of_files(card, self._files, self._pool, self._clock)


def card_without_files(name: str, config: EngineConfig) -> ModelCard:
    """What a model takes whose server is asked in the client's own words, and what can be told of
    it: workers of one model agree on that."""
    card = ModelCard(
        name=name, kind=config.kind, context_length=config.context_length,
        block_size=config.kv_cache_block_size, served_as=config.model,
    )  # fmt: skip
    return replace(card, checksum=checksum_of(card))
