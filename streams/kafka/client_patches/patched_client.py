"""aiokafka with replaced parts: the queue, sender, fetcher and parser of this folder, and
connections that are watched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest

from kvlane.streams.kafka.client_patches.batch_queue import BatchQueue
from kvlane.streams.kafka.client_patches.connections import patch_connections
from kvlane.streams.kafka.client_patches.producer_queue import ProducerQueue, TranslateError
from kvlane.streams.kafka.client_patches.record_batches import patch_parser
from kvlane.streams.kafka.client_patches.session_fetcher import SessionFetcher


class PatchedClient:
    """Implements `ClientParts`. Replaces connections and parser in the whole process."""

    def __init__(self) -> None:
        patch_connections()
        patch_parser()

    def new_queue(
        self,
        translate: TranslateError,
        on_broken: Callable[[BaseException], None],
        leader_timeout_s: float,
    ) -> ProducerQueue:
        return BatchQueue(translate, on_broken, leader_timeout_s)

    def prepare(self, consumer: AIOKafkaConsumer) -> None:
        """Make aiokafka count polls that end by an error or by cancellation.

        It counts pending polls without a `finally`: after such a poll, a member that is never
        polled again would stay in its group for ever.
        """
        state = consumer._subscription

        @contextmanager
        def fetch_context() -> Iterator[None]:
            state._fetch_count += 1
            try:
                yield
            finally:
                state._fetch_count -= 1
                if state._fetch_count == 0:
                    state._last_fetch_ended = time.monotonic()  # the client's clock

        state.fetch_context = fetch_context

    def fetch_in_sessions(self, consumer: AIOKafkaConsumer) -> None:
        SessionFetcher.install(consumer)

    def set_gather_s(self, consumer: AIOKafkaConsumer, gather_s: float) -> None:
        SessionFetcher.set_gather_s(consumer, gather_s)

    def observe_answers(
        self, consumer: AIOKafkaConsumer, on_answer: Callable[[str, float], None]
    ) -> bool:
        coordinator, clock = consumer._coordinator, asyncio.get_running_loop()
        send = coordinator._send_req

        async def send_and_report(request: Any) -> Any:
            sent_at = clock.time()
            answer = await send(request)
            if isinstance(request, HeartbeatRequest | SyncGroupRequest) and answer.error_code == 0:
                kind = "heartbeat" if isinstance(request, HeartbeatRequest) else "sync"
                on_answer(kind, sent_at)
            return answer

        coordinator._send_req = send_and_report
        return True

    def position(self, consumer: AIOKafkaConsumer, tp: TopicPartition) -> int | None:
        assignment = consumer._subscription.subscription.assignment
        if assignment is None or not assignment.active:
            return None
        state = assignment.state_value(tp)
        if state is None or not state.has_valid_position:
            return None
        return int(state.position)

    async def committed(
        self, consumer: AIOKafkaConsumer, tps: Sequence[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """With one request; `consumer.committed` asks for each partition by itself."""
        found = await consumer._coordinator.fetch_committed_offsets(list(tps))
        return {tp: found[tp].offset for tp in tps if tp in found}

    def transaction_error(self, producer: AIOKafkaProducer) -> BaseException | None:
        end = producer._txn_manager.wait_for_transaction_end()
        if end is None or not end.done():
            return None
        error: BaseException | None = end.exception()
        return error
