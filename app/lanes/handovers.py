"""Hand-overs of a lane: prompts that prefill workers compute for a decode that is still to come.

On the sequential path decode is due after `PrefillDone`, with its transfer parameters. On the
bootstrap path it is due at once: decode waits for the blocks in a room of the prefill engine
(`kvlane.streams.request.BootstrapInfo`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvlane.app.lanes.remaining_work import RemainingWork
from kvlane.app.routing.selection.handover_rules import (
    HandOverRules,
    decode_request,
    within_domains,
)
from kvlane.app.routing.state.request_state import RunId
from kvlane.streams.records import LogRecord, PrefillDone, WorkerCard
from kvlane.streams.request import BootstrapInfo

MAX_PREFILL_BYTES = 64 * 1024 * 1024
"""Prompts of a lane that are kept while prefill workers compute them; beyond, requests stay
whole."""
LEASE_SHARE = 0.8
"""The part of an engine's lease that a hand-over may take: the rest is for clocks that differ."""
ROOM_BITS = 63
"""Width of a room id: engines read it as a signed number of 64 bits."""


class HandOver(NamedTuple):
    """A prompt that a prefill worker holds, or computes, for a decode worker. `since_ms`: dispatch
    of the prefill. `params`: transfer parameters of its engine. `until_ms`: broker time until which
    decode may begin; 0 while it may not. `cached_tokens`: at the prefill worker. `bootstrap`: the
    room of the bootstrap path."""

    rest: RemainingWork
    prefill: RunId
    since_ms: int
    params: bytes = b""
    until_ms: int = 0
    cached_tokens: int = 0
    bootstrap: BootstrapInfo | None = None

    def decode_work(self, taints: Sequence[str], rules: HandOverRules) -> RemainingWork:
        """The work of the decode worker. `taints`: of the prefill worker."""
        request = decode_request(
            self.rest.request,
            self.prefill.worker,
            self.bootstrap or self.params,
            self.cached_tokens,
        )
        return self.rest._replace(request=within_domains(request, taints, rules))


class HandOvers:
    """The hand-overs that the owner of a lane has begun: each is used once, by this owner alone."""

    def __init__(
        self, timeout_ms: int, count_awaited: Callable[[int], None] = lambda _: None
    ) -> None:
        """`timeout_ms`: longest time between the end of prefill and the begin of decode.
        `count_awaited`: called with each change of the number of prefills whose end is awaited."""
        self._timeout_ms = timeout_ms
        self._count_awaited = count_awaited
        self._open: dict[str, HandOver] = {}
        self._awaited: set[str] = set()
        """Those of the sequential path whose prefill has not ended."""
        self._bytes = 0

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def has_room(self) -> bool:
        return self._bytes < MAX_PREFILL_BYTES

    def begin(
        self, rest: RemainingWork, prefill_run: RunId, now_ms: int, bootstrap: BootstrapInfo | None,
        ttft_ms: float,
    ) -> HandOver:  # fmt: skip
        """Keep the rest of a request while a worker computes its prompt. `ttft_ms`: predicted time
        until that is done."""
        self.drop(rest.request.id)
        until_ms = 0 if bootstrap is None else now_ms + int(ttft_ms) + self._timeout_ms
        begun = HandOver(rest, prefill_run, now_ms, until_ms=until_ms, bootstrap=bootstrap)
        self._open[rest.request.id] = begun
        self._bytes += rest.request.prompt_bytes
        if bootstrap is None:
            self._awaited.add(rest.request.id)
            self._count_awaited(1)
        return begun

    def on_record(self, log_record: LogRecord, lag_ms: int = 0) -> None:
        """A record of the ledger was applied: the prompt may be computed. `lag_ms`: by how much the
        clock of the ledger's leader is behind broker time."""
        done = log_record.record
        if not (isinstance(done, PrefillDone) and done.phase == "prefill"):
            return
        known = self._open.get(done.id)
        run = RunId(done.attempt, "prefill", done.worker, done.epoch)
        if known is None or known.prefill != run or known.bootstrap is not None:
            return
        ended_ms, left_ms = log_record.timestamp_ms + lag_ms, float(self._timeout_ms)
        if done.lease_until_ms:
            left_ms = min(left_ms, LEASE_SHARE * (done.lease_until_ms - ended_ms))
        until_ms = max(ended_ms + int(left_ms), 1)
        self._open[done.id] = known._replace(
            params=done.handoff, until_ms=until_ms, cached_tokens=done.cached_tokens
        )
        self._end_wait(done.id)

    def usable(self, request_id: str, attempt: int) -> HandOver | None:
        """The hand-over of an attempt; None during its prefill, and after `give_up`. On the
        bootstrap path the end is not awaited. The time limit is checked at dispatch."""
        known = self._open.get(request_id)
        is_usable = known is not None and known.rest.attempt == attempt and known.until_ms
        return known if is_usable else None

    def has_bootstrap(self, request_id: str, attempt: int) -> bool:
        known = self._open.get(request_id)
        return known is not None and known.rest.attempt == attempt and known.bootstrap is not None

    def give_up(self, request_id: str) -> None:
        """No decode begins with this hand-over any more: the next attempt is due."""
        if (known := self._open.get(request_id)) is not None:
            self._open[request_id] = known._replace(until_ms=0)

    def drop_others(self, request_id: str, attempt: int) -> None:
        known = self._open.get(request_id)
        if known is not None and known.rest.attempt != attempt:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        known = self._open.pop(request_id, None)
        if known is not None:
            self._bytes -= known.rest.request.prompt_bytes
            self._end_wait(request_id)

    def clear(self) -> None:
        for request_id in list(self._open):
            self.drop(request_id)

    def _end_wait(self, request_id: str) -> None:
        if request_id in self._awaited:
            self._awaited.remove(request_id)
            self._count_awaited(-1)


def bootstrap_info(card: WorkerCard, rank: int, rng: random.Random) -> BootstrapInfo | None:
    """A room of a prefill worker, unique to a run; None if its engine has no bootstrap endpoint.
    The engines derive the rank of the prefill from the room: it is the room modulo their number."""
    host, port = card.config.bootstrap_host, card.config.bootstrap_port
    if host is None or port is None:
        return None
    room = rng.randrange(2**ROOM_BITS // card.ranks) * card.ranks + rank
    return BootstrapInfo(bootstrap_host=host, bootstrap_port=port, bootstrap_room=room)
