"""Registration of a worker: its card in the registry, and the reaction to records about it.

An *epoch* is the offset of a process's first card, so epochs are unique and increase. A newer card
of a worker ends its older epochs for every reader, so a process that reads one of another process
with its id stops at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Literal

import msgspec

from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings, SettingsError
from kvlane.app.text.answer_parsers import PARSER_VERSION
from kvlane.streams.errors import AppendFailed
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import EngineConfig, LogRecord, Tombstone, WorkerCard
from kvlane.streams.topics import REGISTRY

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_S = 60.0
"""Time limit of the registration at the start of a process, in seconds. Later registrations have
none: a loaded engine outlasts an outage of the broker."""

CardAction = Literal["none", "rewrite", "renew", "stop"]
"""The action that a registry record demands: none; write the overwritten card again; begin a new
epoch; stop, since another process has this worker id."""


def registry_key(worker: str) -> str:
    return f"worker/{worker}"


def interpret(log_record: LogRecord, card: WorkerCard, written_at: int) -> CardAction:
    """The action for a registry record; this worker's newest card is at offset `written_at`."""
    record = log_record.record
    if isinstance(record, WorkerCard) and record.id == card.id:
        epoch = log_record.offset if record.epoch is None else record.epoch
        own = record.life == card.life
    elif isinstance(record, Tombstone) and record.key == registry_key(card.id):
        epoch = log_record.offset if record.epoch is None else record.epoch
        own = True  # a tombstone ends an epoch without claiming the id
    else:
        return "none"
    assert card.epoch is not None, "the worker is not registered yet"
    if epoch > card.epoch:
        return "renew" if own else "stop"
    if isinstance(record, Tombstone) and epoch == card.epoch:
        return "renew"
    return "rewrite" if epoch < card.epoch and log_record.offset > written_at else "none"


def worker_card(
    worker_id: str,
    slot: int,
    config: EngineConfig,
    settings: Settings,
    versions: Mapping[str, str],
    max_runs: int,
) -> WorkerCard:
    """The card of a worker before its first epoch. `versions`: of its engine, by name."""
    return WorkerCard(
        id=worker_id,
        slot=slot,
        model=config.served_model_name or config.model,
        config=config,
        ranks=config.data_parallel_size or 1,
        role=settings.worker_role,
        taints=settings.taint_names,
        versions={"kvlane": version("kvlane"), **versions},
        busy_cache=settings.max_cache_usage,
        busy_prefill_tokens=settings.max_pending_prefill_tokens,
        max_runs=max_runs,
        parser_version=PARSER_VERSION,
    )


def check_role(config: EngineConfig, settings: Settings, worker_id: str) -> None:
    """Raises SettingsError for a role that the engine cannot take."""
    role = settings.worker_role
    if role != "aggregated" and config.transfer_lease_s is None:
        raise SettingsError(
            f"KVLANE_WORKER_ROLE={role}: the engine of {worker_id} can neither hand a prompt over "
            "nor fetch one: use the engine vllm with a kv_transfer_config in KVLANE_ENGINE_ARGS, "
            "attached with KVLANE_ATTACH_TRANSFER_LEASE_S, simulated, or an own one with a "
            "transfer_lease_s"
        )


def with_adapters(
    config: EngineConfig, loaded: tuple[str, ...] | None, settings: Settings
) -> EngineConfig:
    """The engine's configuration, with the adapters of the settings if the engine names none.

    `loaded`: as the engine reports them (`Engine.adapters`), which count also when there are none.
    """
    is_named = config.lora_names is not None or loaded is not None
    if is_named or not (settings.adapters or settings.max_loras):
        return config
    return msgspec.structs.replace(
        config, lora_names=tuple(settings.adapters), max_loras=settings.max_loras
    )


class Registration:
    """Writes the card of one process; all its epochs share the same random `life`."""

    def __init__(
        self,
        publisher: RecordPublisher,
        ctx: ProcessContext,
        card: WorkerCard,
        adapters: tuple[str, ...] | None = None,
    ) -> None:
        """`adapters`: the list that the engine reports at its start; None: it reports none."""
        self._publisher = publisher
        self._adapters = adapters
        self.card = msgspec.structs.replace(card, life=f"{ctx.rng.getrandbits(64):016x}")
        self.card_offset = -1

    @property
    def epoch(self) -> int:
        assert self.card.epoch is not None, "not registered yet"
        return self.card.epoch

    async def begin_epoch(self, until: float | None = None) -> int:
        """Begin an epoch: the offset of a card without epoch is the epoch of the card after it.
        Raises AppendFailed past `until`."""
        unregistered = msgspec.structs.replace(self.card, epoch=None)
        first = await self._publisher.publish(
            REGISTRY, registry_key(unregistered.id), unregistered, until=until
        )
        self.card = msgspec.structs.replace(unregistered, epoch=first.offset)
        await self.rewrite_card(until)
        return first.offset

    async def rewrite_card(self, until: float | None = None) -> None:
        """Write the card again, unchanged. Raises AppendFailed past `until`."""
        key = registry_key(self.card.id)
        self.card_offset = (
            await self._publisher.publish(REGISTRY, key, self.card, until=until)
        ).offset

    async def update_adapters(self, adapters: tuple[str, ...] | None, until: float) -> None:
        """Write the card again if the engine's adapters have changed; the epoch stays. Past `until`
        the card stays as it was, which is logged; the next call tries again."""
        if adapters == self._adapters:
            return
        before = self.card.config
        config = msgspec.structs.replace(before, lora_names=adapters or None)
        self.card = msgspec.structs.replace(self.card, config=config)
        try:
            await self.rewrite_card(until)
        except BaseException as e:
            self.card = msgspec.structs.replace(self.card, config=before)
            if not isinstance(e, AppendFailed):
                raise
            log.warning("the adapters of %s are not on its card yet: %s", self.card.id, e)
        else:
            self._adapters = adapters

    async def write_tombstone(self, until: float) -> None:
        """Write the tombstone of this epoch. Raises AppendFailed past `until`."""
        key = registry_key(self.card.id)
        await self._publisher.publish(
            REGISTRY, key, Tombstone(key=key, epoch=self.epoch), until=until
        )
