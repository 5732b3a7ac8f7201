"""The model that a worker serves: its files and card are in the log before the worker registers.

Owns the model card that this process has written. Never here: the files (`model_publisher.py`) and
the rules of agreement with other workers (`model_compatibility.py`).
"""

from __future__ import annotations

from kvlane.app.preprocess.models.byte_model import ByteModel, Model
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.model_compatibility import check_compatible, wait_until_compatible
from kvlane.app.serving.model_publisher import ModelPublisher, passthrough_card
from kvlane.app.serving.registration import REGISTER_TIMEOUT_S
from kvlane.streams.ports import Log
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import EngineConfig, ModelCard
from kvlane.streams.topics import REGISTRY


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

        `leaving_s`: how long to wait for workers with another card of this model to leave.
        """
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
        """Write the files and the card of a model, if it has any.

        Raises BadModel, ModelMismatch, BrokerUnavailable, AppendFailed.
        """
        if self._files is not None:
            self.text_model = await self._files.publish(name, config, self._publish_card)
        elif config.kind != "tokens":
            await self._publish_card(passthrough_card(name, config))

    def check(self, written: ModelCard) -> None:
        """Compare a later card of the registry with that of this worker. Raises ModelMismatch."""
        if self._card is not None:
            check_compatible(self._card, written)

    async def _publish_card(self, card: ModelCard) -> None:
        await wait_until_compatible(card, self._worker_id, self._log, self._ctx, self._leaving_s)
        self._card = card
        until = self._ctx.clock.now() + REGISTER_TIMEOUT_S
        written = await self._publisher.publish(REGISTRY, f"model/{card.name}", card, until=until)
        self.card_offset = written.offset
