"""A model's card and files, offered to everybody who prepares prompts for it.

Written to the log before the worker registers, so that a model that has a worker has its files.
"""

from __future__ import annotations

from msgspec.structs import replace

from app.lifetime import Lifetime
from app.preprocess import loaded
from app.preprocess.artifacts import Artifacts
from app.preprocess.loaded import LoadedModel
from app.preprocess.modelfolder import ModelFiles, checksum_of
from app.preprocess.pool import Inline
from app.settings import Settings
from streams.outbox import Outbox
from streams.ports import Log
from streams.records import EngineConfig, ModelCard
from streams.topics import REGISTRY


class Offer:
    """The files of one model, and where they go."""

    def __init__(self, log: Log, settings: Settings, life: Lifetime, files: ModelFiles) -> None:
        self._pool = Inline()  # once, before anything is served
        self._clock = life.clock
        self._artifacts = Artifacts(log, life.clock, self._pool, settings.cache_dir / "artifacts")
        self._files = files

    async def publish(
        self, name: str, config: EngineConfig, outbox: Outbox, until: float
    ) -> LoadedModel:
        """Put files and card into the log; the model, ready to read answers.

        Raises BadModel, BrokerUnavailable, and AppendFailed past `until`.
        """
        card = await loaded.publish_files(
            name,
            self._files,
            self._artifacts,
            context_length=config.context_length,
            block_size=config.kv_cache_block_size,
        )
        await outbox.persist(REGISTRY, f"model/{name}", card, until=until)
        return await loaded.of_files(card, self._files, self._pool, self._clock)


async def publish_card(name: str, config: EngineConfig, outbox: Outbox, until: float) -> None:
    """Say what a model without files takes. Raises AppendFailed past `until`."""
    card = ModelCard(name=name, kind=config.kind, context_length=config.context_length)
    card = replace(card, checksum=checksum_of(card))
    await outbox.persist(REGISTRY, f"model/{name}", card, until=until)
