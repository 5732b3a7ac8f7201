"""aiokafka's own parts, by public names alone: for versions without tested replacements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from kvlane.streams.kafka.client_patches.plain_queue import PlainQueue
from kvlane.streams.kafka.client_patches.producer_queue import ProducerQueue, TranslateError


class PlainClient:
    """Implements `ClientParts`. What aiokafka does not offer is left out."""

    def new_queue(
        self,
        translate: TranslateError,
        on_broken: Callable[[BaseException], None],
        leader_timeout_s: float,  # noqa: ARG002  # bounded by the producer
    ) -> ProducerQueue:
        return PlainQueue(translate, on_broken)

    def prepare(self, consumer: AIOKafkaConsumer) -> None: ...

    def fetch_in_sessions(self, consumer: AIOKafkaConsumer) -> None: ...

    def set_gather_s(self, consumer: AIOKafkaConsumer, gather_s: float) -> None: ...

    def observe_answers(
        self,
        consumer: AIOKafkaConsumer,  # noqa: ARG002
        on_answer: Callable[[str, float], None],  # noqa: ARG002
    ) -> bool:
        return False

    def position(self, consumer: AIOKafkaConsumer, tp: TopicPartition) -> int | None: ...

    async def committed(
        self, consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        offsets = await asyncio.gather(*map(consumer.committed, tps))
        return {tp: o for tp, o in zip(tps, offsets, strict=True) if o is not None}

    def transaction_error(self, producer: AIOKafkaProducer) -> BaseException | None: ...
