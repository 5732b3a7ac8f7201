"""The work that is left of a request, in the forms in which it waits in a router.

`RemainingWork` is ready to be dispatched; a `DeferredRequest` waits in the log until there is room;
a `HandOver` is the decode whose prompt a prefill worker holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from app.lanes.deferred_prompts import QueueSize
from app.routing.queueing.fair_share import QueueKey
from app.routing.state.ledger import RunId
from streams.record_base import ServiceClass
from streams.records import LogRecord, PrefillDone, RequestOffset
from streams.request import Request

MAX_PREFILL_BYTES = 64 * 1024 * 1024
"""Prompts of a lane that are kept while prefill workers compute them. With more of them requests
are dispatched whole, unless disaggregation is enforced."""
LEASE_SHARE = 0.8
"""The part of an engine's lease that a hand-over may take: the rest is for clocks that differ."""


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
    """Token ids that readers have; `emitted_chars`: the length of their text."""
    emitted_chars: int = 0
    renewal_ms: float = math.inf
    """Broker time at which it is appended again, if no worker has begun it."""

    @property
    def has_begun(self) -> bool:
        """Whether a worker has worked on it, successfully or not."""
        return bool(self.emitted or self.emitted_chars or self.excluded)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
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


class HandOver(NamedTuple):
    """A prompt that a prefill worker holds for a decode worker.

    `since_ms`: when the prefill was dispatched, which keeps the request's place among those that
    wait. `params`: transfer parameters of its engine. `until_ms`: broker time until which decode
    may begin. `cached_tokens`: of the prompt, at the prefill worker.
    """

    rest: RemainingWork
    prefill: RunId
    since_ms: int
    params: bytes = b""
    until_ms: int = 0
    cached_tokens: int = 0


class HandOvers:
    """The hand-overs that the owner of a lane has begun: each is taken once, by itself alone.

    An owner that did not begin one never uses it: its predecessor may be doing so still.
    """

    def __init__(self, timeout_ms: int) -> None:
        """`timeout_ms`: longest time between the end of prefill and the begin of decode."""
        self._timeout_ms = timeout_ms
        self._open: dict[str, HandOver] = {}
        self._bytes = 0

    @property
    def open_count(self) -> int:
        """Hand-overs that are neither taken nor dropped."""
        return len(self._open)

    @property
    def has_room(self) -> bool:
        """Whether another prompt may be kept."""
        return self._bytes < MAX_PREFILL_BYTES

    def begin(self, rest: RemainingWork, prefill: RunId, now_ms: int) -> None:
        """Keep what is left of a request while a worker computes its prompt."""
        self.drop(rest.request.id)
        self._open[rest.request.id] = HandOver(rest, prefill, now_ms)
        self._bytes += rest.request.prompt_bytes

    def on_record(self, fact: LogRecord) -> None:
        """A record of the ledger was applied: the prompt may be computed."""
        done = fact.record
        if not (isinstance(done, PrefillDone) and done.phase == "prefill"):
            return
        known = self._open.get(done.id)
        if known is None or known.prefill != RunId(
            done.attempt, "prefill", done.worker, done.epoch
        ):
            return
        left_ms = float(self._timeout_ms)
        if done.lease_until_ms:
            left_ms = min(left_ms, LEASE_SHARE * (done.lease_until_ms - fact.timestamp_ms))
        until_ms = max(fact.timestamp_ms + int(left_ms), 1)
        self._open[done.id] = known._replace(
            params=done.handoff, until_ms=until_ms, cached_tokens=done.cached_tokens
        )

    def take(self, request_id: str, attempt: int) -> HandOver | None:
        """The hand-over of an attempt, if its prompt is computed; only once."""
        known = self._open.get(request_id)
        if known is None or known.rest.attempt != attempt or not known.until_ms:
            return None
        self.drop(request_id)
        return known

    def drop_others(self, request_id: str, attempt: int) -> None:
        """Forget a hand-over of another attempt."""
        known = self._open.get(request_id)
        if known is not None and known.rest.attempt != attempt:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Forget the hand-over of a request."""
        known = self._open.pop(request_id, None)
        if known is not None:
            self._bytes -= known.rest.request.prompt_bytes
