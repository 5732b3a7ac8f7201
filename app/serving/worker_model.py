"""The model that a worker serves: its files and card are in the log before the worker registers.

A model has one card, and the last one written counts. A worker with another tokenizer or a shorter
context would change the model for all others, so it is refused before it writes a card, unless the
workers with the different card leave in time. Two workers may start at the same moment, or one may
return after it was declared lost: a worker that reads a different card ends (`check_compatible`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from kvlane.app.operator_error import OperatorError
from kvlane.app.preprocess.models import model
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.byte_model import ByteModel, Model
from kvlane.app.preprocess.models.model import LoadedModel
from kvlane.app.preprocess.models.model_folder import ModelFiles, checksum_of
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.registration import REGISTER_TIMEOUT_S
from kvlane.app.settings import Settings
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.ports import Log
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import EngineConfig, ModelCard
from kvlane.streams.topics import REGISTRY
from kvlane.streams.views.follower import Follower


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
        self._parsers = {
            name: value
            for name, value in (
                ("tool_parser", settings.tool_parser),
                ("reasoning_parser", settings.reasoning_parser),
            )
            if value != "auto"
        }

    async def publish(
        self, name: str, config: EngineConfig, announce: Callable[[ModelCard], Awaitable[None]]
    ) -> LoadedModel:
        """Write the files to the log, pass the card to `announce`, and return the loaded model.
        Raises BadModel, BrokerUnavailable, and the errors of `announce`."""
        card = await model.publish_files(
            name,
            self._files,
            self._artifacts,
            context_length=config.context_length,
            block_size=config.kv_cache_block_size,
        )
        if self._parsers:
            card = replace(card, **self._parsers)
            card = replace(card, checksum=checksum_of(card))
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


log = logging.getLogger(__name__)

SHARED_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(ModelCard)
    if field.name not in ("name", "checksum")
)
"""Fields that must be equal on all workers of one model."""
REGISTRY_READ_TIMEOUT_S = 60.0
RECHECK_INTERVAL_S = 0.5


class ModelMismatch(OperatorError):
    """Other workers serve a different model under this name."""

    correction = (
        "Give this model a name of its own (KVLANE_MODEL), or stop the other workers first."
    )


async def wait_until_compatible(
    card: ModelCard, worker_id: str, kafka_log: Log, ctx: ProcessContext, timeout_s: float
) -> None:
    """Return when no other live worker serves this model with a different card. `timeout_s`: of the
    wait for such workers to leave. Raises ModelMismatch, BrokerUnavailable."""
    fleet = Fleet()
    follower = Follower(kafka_log, fleet, [REGISTRY], ctx.clock)
    reading = ctx.spawn("admission", follower.run())
    is_logged = False
    try:
        try:
            async with asyncio.timeout(REGISTRY_READ_TIMEOUT_S):
                await follower.wait_caught_up()
        except TimeoutError as e:
            raise BrokerUnavailable(
                f"the registry was not read within {REGISTRY_READ_TIMEOUT_S:g} s"
            ) from e
        until = ctx.clock.now() + timeout_s
        while others := _mismatched_workers(card, worker_id, fleet):
            why = _difference(fleet.models[card.name], card)
            if ctx.clock.now() > until:
                raise ModelMismatch(
                    f"{', '.join(others)} serve {card.name!r} with a different card: {why}"
                )
            if not is_logged:
                is_logged = True
                log.warning(
                    "%s serve %r with a different card: %s. This worker waits up to %.0f s for "
                    "them to leave, then it is refused",
                    ", ".join(others), card.name, why, timeout_s,
                )  # fmt: skip
            await ctx.clock.sleep(RECHECK_INTERVAL_S)
    finally:
        reading.cancel()
        await asyncio.wait({reading})


def check_compatible(card: ModelCard, other_card: ModelCard) -> None:
    """Compare a later card of the registry with this worker's. Raises ModelMismatch."""
    if other_card.name == card.name and _shared_values(other_card) != _shared_values(card):
        raise ModelMismatch(
            f"another worker now serves {card.name!r} with a different card: "
            f"{_difference(other_card, card)}; give this model its own name (KVLANE_MODEL)"
        )


def _mismatched_workers(card: ModelCard, worker_id: str, fleet: Fleet) -> list[str]:
    present = fleet.models.get(card.name)
    if present is None or _shared_values(present) == _shared_values(card):
        return []
    serving = (name for name, member in fleet.live_members() if member.card.model == card.name)
    return sorted(name for name in serving if name != worker_id)


def _shared_values(card: ModelCard) -> tuple[Any, ...]:
    return tuple(getattr(card, name) for name in SHARED_FIELDS)


def _difference(other_card: ModelCard, own_card: ModelCard) -> str:
    return ", ".join(
        f"their {name} is {_format(there)}, here {_format(here)}"
        for name, there, here in zip(
            SHARED_FIELDS, _shared_values(other_card), _shared_values(own_card), strict=True
        )
        if there != here
    )


def _format(value: Any) -> str:
    return getattr(value, "sha256", "")[:12] or str(value)


class WorkerModel:
    def __init__(
        self,
        log: Log,
        publisher: RecordPublisher,
        ctx: ProcessContext,
        worker_id: str,
        leaving_s: float,
        files: ModelPublisher | None,
    ) -> None:
        """`files`: publishes the files of the engine's model; without it tokens are bytes.
        `leaving_s`: how long to wait for workers with another card of this model to leave."""
        self.text_model: Model = ByteModel()
        """Tokens to text, for engines that give tokens."""
        self.card_offset = -1
        """Offset of the model card in the registry; -1: this worker has written none."""
        self._card: ModelCard | None = None
        self._log = log
        self._publisher = publisher
        self._ctx = ctx
        self._worker_id = worker_id
        self._leaving_s = leaving_s
        self._files = files

    async def publish(self, name: str, config: EngineConfig) -> None:
        """Write the files and the card of a model, if it has any. Raises BadModel, ModelMismatch,
        BrokerUnavailable, AppendFailed."""
        if self._files is not None:
            self.text_model = await self._files.publish(name, config, self._publish_card)
        elif config.kind != "tokens":
            await self._publish_card(passthrough_card(name, config))

    def check(self, other_card: ModelCard) -> None:
        """Compare a later card of the registry with that of this worker. Raises ModelMismatch."""
        if self._card is not None:
            check_compatible(self._card, other_card)

    async def _publish_card(self, card: ModelCard) -> None:
        await wait_until_compatible(card, self._worker_id, self._log, self._ctx, self._leaving_s)
        self._card = card
        until = self._ctx.clock.now() + REGISTER_TIMEOUT_S
        written = await self._publisher.publish(REGISTRY, f"model/{card.name}", card, until=until)
        self.card_offset = written.offset
