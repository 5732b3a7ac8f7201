"""The work of a request that waits in a router: `RemainingWork` is ready to be dispatched, all of
it or the rest after a failure; a `DeferredRequest` waits in the log until there is room
(`app/routing/queueing/deferred_prompts.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvlane.app.routing.queueing.deferred_prompts import QueueSize
from kvlane.app.routing.queueing.fair_share import QueueKey
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import RequestOffset
from kvlane.streams.request import Request


class RemainingWork(NamedTuple):
    """The remaining work of a request: all of it, or the rest after the tokens already emitted."""

    request: Request
    attempt: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str] = frozenset()
    """Workers on which it failed."""
    emitted: Sequence[int] = ()
    """Token ids that readers have; `emitted_chars`: the length of their text; `emitted_data`: the
    number of their items of `Chunk.data`."""
    emitted_chars: int = 0
    emitted_data: int = 0
    renewal_ms: float = math.inf
    """Broker time at which it is appended again, if no worker has begun it."""

    @property
    def has_begun(self) -> bool:
        return bool(self.emitted or self.emitted_chars or self.excluded)

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens


class DeferredRequest(NamedTuple):
    """A `RemainingWork` without emitted tokens and without its request, which is in the log."""

    id: str
    attempt: int
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    excluded: frozenset[str]
    queue_key: QueueKey
    size: QueueSize
    service_class: ServiceClass
    renewal_ms: float
