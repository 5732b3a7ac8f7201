"""Publication of a model's files and card, for the processes that prepare prompts for it.

The files are in the log before the card, which the caller writes, and the card before the worker
registers: the files of a model with a worker are always available.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from kvlane.app.preprocess.models import model
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import LoadedModel
from kvlane.app.preprocess.models.model_folder import ModelFiles, checksum_of
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.ports import Log
from kvlane.streams.records import EngineConfig, ModelCard


class ModelPublisher:
    def __init__(
        self, log: Log, settings: Settings, ctx: ProcessContext, files: ModelFiles
    ) -> None:
        self._pool = InlinePool()  # runs once, before any request
        self._clock = ctx.clock
        self._artifacts = ArtifactStore(
            log, ctx.clock, self._pool, settings.cache_dir / "artifacts"
        )
        self._files = files

    async def publish(
        self, name: str, config: EngineConfig, announce: Callable[[ModelCard], Awaitable[None]]
    ) -> LoadedModel:
        """Write the files to the log, pass the card to `announce`, and return the loaded model.

        Raises BadModel, BrokerUnavailable, and the errors of `announce`.
        """
        card = await model.publish_files(
            name,
            self._files,
            self._artifacts,
            context_length=config.context_length,
            block_size=config.kv_cache_block_size,
        )
        await announce(card)
        return await model.model_of_files(card, self._files, self._pool, self._clock)


def passthrough_card(name: str, config: EngineConfig) -> ModelCard:
    """The card of a model whose server receives request bodies unchanged: the kind of request, and
    the properties that are known. Workers of one model must agree on them."""
    card = ModelCard(
        name=name, kind=config.kind, context_length=config.context_length,
        block_size=config.kv_cache_block_size, served_as=config.model,
    )  # fmt: skip
    return replace(card, checksum=checksum_of(card))
