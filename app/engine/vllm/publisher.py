"""The publisher of cache events that runs inside vLLM's engine core.

vLLM's own ZMQ publisher, with its frames, numbers and replay, so whoever reads that one reads this
one; but a step of the engine never waits for it. Which endpoints are its own says `plugin.py`.
"""

from __future__ import annotations

import queue
from typing import Any

from vllm.distributed.kv_events import ZmqEventPublisher

from app.engine.vllm.plugin import SCHEME


class Publisher(ZmqEventPublisher):  # type: ignore[misc]
    """Never blocks: a batch that finds the queue full is dropped, and shows as a gap in numbers.

    Endpoints with a `*` are bound, all others connected to, those of `ipc` as well; so several
    ranks can speak to one listener, and what they say carries their rank.
    """

    def __init__(self, data_parallel_rank: int, endpoint: str, **options: Any) -> None:
        super().__init__(data_parallel_rank, endpoint.removeprefix(SCHEME), **options)
        self.dropped = 0

    def publish(self, events: Any) -> None:
        """Put a step's events on their way; a few microseconds."""
        events.data_parallel_rank = self._data_parallel_rank
        try:
            self._event_queue.put_nowait(events)
        except queue.Full:
            next(self._seq_gen)
            self.dropped += 1

    @staticmethod
    def _is_bind_endpoint(endpoint: str) -> bool:
        return "*" in endpoint

    @staticmethod
    def offset_endpoint_port(endpoint: str | None, data_parallel_rank: int) -> str | None:
        """Bound ports differ by rank, as vLLM's do; listeners are the same for all ranks."""
        if endpoint is None or "*" not in endpoint:
            return endpoint
        moved: str | None = ZmqEventPublisher.offset_endpoint_port(endpoint, data_parallel_rank)
        return moved
