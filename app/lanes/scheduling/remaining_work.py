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
from kvlane.app.settings import Settings
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
    """Broker time at which its record is appended again, if it still waits."""

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


def deadline_of(request: Request, appended_ms: int, settings: Settings) -> int:
    """The deadline of a request whose record was appended at `appended_ms`, in broker time.

    Its time limit counts from the append of its prompt. A batch request may wait for days, but its
    record must be in the log when it changes hands, so it ends `batch_run_limit_s` after the append
    of that at the latest; before that it is appended again (`renewal_of`).
    """
    limit_ms = int(request.deadline_s * 1000)
    if request.service_class != "batch":
        since_ms = min(appended_ms, request.queued_ms or appended_ms)
        return since_ms + min(limit_ms, int(settings.max_lifetime_s * 1000))
    last_ms = (request.queued_ms or appended_ms) + limit_ms
    return min(last_ms, appended_ms + int(settings.batch_run_limit_s * 1000))


def renewal_of(request: Request, deadline_ms: int, settings: Settings) -> float:
    """When a request with this deadline is appended again, in broker time, while it waits for a
    worker: half of `max_lifetime_s` after the append of its record. inf: never."""
    last_ms = request.queued_ms + int(request.deadline_s * 1000)
    if request.service_class != "batch" or not request.queued_ms or last_ms <= deadline_ms:
        return math.inf
    return deadline_ms - 1000 * (settings.batch_run_limit_s - settings.max_lifetime_s / 2)
