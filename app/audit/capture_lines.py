"""Capture of a period of the log: its records as the lines of `app/traces/capture_format.py`.

Reads the registry for the workers, `requests` for the requests, then `ledger` for decisions and
outcomes. Lines are yielded as they are read; memory holds epochs, the ids of open decided requests,
and of the last DEDUP_WINDOW_MS. Reads only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.audit.time_range import MAX_LIFETIME_MS, TimeRange
from kvlane.app.routing.selection.eligibility import block_size_of
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.fleet import Fleet, FleetMember
from kvlane.app.traces.capture_format import (
    BLOCK_HASH,
    CAPTURE_FORMAT,
    AnyCaptureLine,
    CapturedDecision,
    CapturedEnd,
    CapturedPrefill,
    CapturedRequest,
    CapturedRun,
    CapturedWorker,
    CaptureHeader,
    CaptureTotals,
)
from kvlane.indexer.block_hashes import KeySecret, prompt_keys
from kvlane.streams import records
from kvlane.streams.clock import Clock
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.decoding import RecordDecoder
from kvlane.streams.reading.range_reader import (
    OffsetBounds,
    Progress,
    offsets_between,
    oldest_offsets,
    read_range,
)
from kvlane.streams.records import Assigned, Finished, LogRecord, PrefillDone, Tombstone, WorkerCard
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER, REGISTRY, REQUESTS

DEDUP_WINDOW_MS = 1_200_000
"""A request with the id of another one within this time is a duplicate, which routers ignore: the
default of KVLANE_DEDUP_WINDOW_S."""

_FINAL = frozenset({"stop", "length", "cancelled"})
"""Codes of a run after which no further record of the request is captured. A run of phase prefill
ends no request: its decode, or another attempt, follows."""


async def capture_period(
    log: Log,
    clock: Clock,
    period: TimeRange,
    secret: KeySecret,
    progress: Progress = lambda _done, _total: None,
) -> AsyncGenerator[AnyCaptureLine, None]:
    """Yield the lines of a period; `secret` must be random and used for nothing else. Close it
    (`aclosing`) to stop early. Raises BrokerUnavailable, PositionLost and NewerRecord."""
    reading, counts = _Reading(log, clock, period, secret), Counter[str]()
    async with aclosing(reading.lines(progress)) as lines:
        async for line in lines:
            counts[str(line.__struct_config__.tag)] += 1
            yield line
    yield CaptureTotals(
        lines=dict(counts), unread=reading.unread, without_request=reading.without_request
    )


class _Epoch(NamedTuple):
    """An epoch of a worker. `until_ms`: the time of its tombstone, or of its next epoch's card."""

    card: WorkerCard
    epoch: int
    since_ms: int
    until_ms: int | None = None


class _Reading:
    """State of one capture. For its counters see `CaptureTotals`."""

    def __init__(self, log: Log, clock: Clock, period: TimeRange, secret: KeySecret) -> None:
        self.unread = 0
        self.without_request = 0
        self._log = log
        self._clock = clock
        self._period = period
        self._secret = secret
        self._fleet = Fleet()
        self._epochs: dict[str, list[_Epoch]] = {}
        self._sizes: dict[str, int] = {}
        self._kept: dict[Partition, int] = {}
        self._requested_ms: defaultdict[Partition, OrderedDict[str, int]] = defaultdict(OrderedDict)
        """Arrival times of the requests of the last DEDUP_WINDOW_MS, by lane."""
        self._open: dict[str, None] = {}
        """Requests with a decision of the period that are not finished."""

    async def lines(self, progress: Progress) -> AsyncGenerator[AnyCaptureLine, None]:
        from_ms, to_ms = self._period
        lanes = await self._log.partitions(LEDGER)
        yield CaptureHeader(format=CAPTURE_FORMAT, from_ms=from_ms, to_ms=to_ms, lanes=lanes)
        await self._read_registry()
        for worker in self._workers():
            yield worker
        requests = await offsets_between(self._log, REQUESTS, from_ms, to_ms)
        decided = await offsets_between(self._log, LEDGER, from_ms, to_ms)
        later = await offsets_between(self._log, LEDGER, to_ms, to_ms + MAX_LIFETIME_MS)
        self._kept = await oldest_offsets(self._log, REQUESTS)
        total = requests.size + decided.size
        async with aclosing(
            self._log_records(requests, partial(_later, progress, 0, total))
        ) as log_records:
            async for source, log_record in log_records:
                if isinstance(log_record.record, Request) and self._is_first(
                    source, log_record, log_record.record
                ):
                    yield self._captured_request(log_record, log_record.record)
        report = partial(_later, progress, requests.size, total)
        async with aclosing(self._log_records(decided, report)) as log_records:
            async for source, log_record in log_records:
                if isinstance(log_record.record, Assigned):
                    yield self._decided(source, log_record, log_record.record)
                elif (line := self._followed(log_record)) is not None:
                    yield line
        async with aclosing(self._log_records(later)) as log_records:
            async for _, log_record in log_records:
                if not self._open:
                    break
                if (line := self._followed(log_record)) is not None:
                    yield line

    # --- the log ---------------------------------------------------------------------------------

    async def _log_records(
        self, bounds: OffsetBounds, progress: Progress = lambda _done, _total: None
    ) -> AsyncGenerator[tuple[Partition, LogRecord], None]:
        reading = read_range(self._log, self._clock, *bounds, progress=progress)
        decoding = RecordDecoder(self._log, self._clock)
        async with aclosing(reading) as pieces:
            async for source, some, _ in pieces:
                log_records = await decoding.decode_records(source, some)
                self.unread += len(some) - len(log_records)
                for log_record in log_records:
                    yield source, log_record

    async def _read_registry(self) -> None:
        source = Partition(REGISTRY, 0)
        ends = await self._log.end_offsets(REGISTRY, [0])
        async with aclosing(
            self._log_records(
                OffsetBounds(await oldest_offsets(self._log, REGISTRY), {source: ends[0]})
            )
        ) as log_records:
            async for _, log_record in log_records:
                self._fleet.apply(source, [log_record], log_record.offset + 1)
                self._on_registry_record(log_record)

    # --- workers ---------------------------------------------------------------------------------

    def _on_registry_record(self, log_record: LogRecord) -> None:
        """Start, continue or end an epoch of a worker."""
        record = log_record.record
        if isinstance(record, WorkerCard):
            epoch = log_record.offset if record.epoch is None else record.epoch
            epochs, since_ms = self._epochs.setdefault(record.id, []), log_record.timestamp_ms
            if epochs and epochs[-1].epoch == epoch:
                since_ms = epochs.pop().since_ms
            self._end_epoch(record.id, since_ms)
            epochs.append(_Epoch(record, epoch, since_ms))
        elif isinstance(record, Tombstone) and record.key.startswith("worker/"):
            self._end_epoch(record.key.removeprefix("worker/"), log_record.timestamp_ms)

    def _end_epoch(self, worker: str, at_ms: int) -> None:
        epochs = self._epochs.get(worker)
        if epochs and epochs[-1].until_ms is None:
            epochs[-1] = epochs[-1]._replace(until_ms=at_ms)

    def _present(self) -> Iterator[_Epoch]:
        for epochs in self._epochs.values():
            for each in epochs:
                ended = each.until_ms is not None and each.until_ms <= self._period.from_ms
                if each.since_ms < self._period.to_ms and not ended:
                    yield each

    def _workers(self) -> Iterator[CapturedWorker]:
        for card, epoch, since_ms, _ in self._present():
            config = replace(card.config, bootstrap_host=None, bootstrap_port=None)
            yield CapturedWorker(
                id=card.id, epoch=epoch, since_ms=since_ms, model=card.model, config=config,
                role=card.role, ranks=card.ranks, taints=card.taints,
            )  # fmt: skip

    def _block_size(self, model: str) -> int:
        size = self._sizes.get(model)
        if size is None:
            serving = [
                FleetMember(each.card, each.epoch, each.since_ms)
                for each in self._present()
                if model in ("", each.card.model)
            ]
            size = self._sizes[model] = block_size_of(self._fleet, model, serving)
        return size

    # --- lines -----------------------------------------------------------------------------------

    def _is_first(self, source: Partition, log_record: LogRecord, request: Request) -> bool:
        """Whether a request is not a duplicate."""
        requested_ms, since_ms = (
            self._requested_ms[source],
            log_record.timestamp_ms - DEDUP_WINDOW_MS,
        )
        while requested_ms and next(iter(requested_ms.values())) < since_ms:
            requested_ms.popitem(last=False)
        is_first = request.id not in requested_ms
        if is_first:
            requested_ms[request.id] = log_record.timestamp_ms
        return is_first

    def _captured_request(self, log_record: LogRecord, request: Request) -> CapturedRequest:
        size = self._block_size(request.model)
        names = prompt_keys(PromptHashes(request).local_hashes(size), self._secret)
        return CapturedRequest(
            id=request.id, at_ms=log_record.timestamp_ms, model=request.model, block_size=size,
            prompt_tokens=request.prompt_tokens, blocks=names.astype(BLOCK_HASH).tobytes(),
            max_tokens=request.stop.max_tokens, hints=request.hints,
            router_config_override=request.router_config_override
        )  # fmt: skip

    def _decided(
        self, source: Partition, log_record: LogRecord, decision: Assigned
    ) -> CapturedDecision:
        self._open[decision.id] = None
        origin = decision.origin
        kept = self._kept.get(Partition(origin.topic, origin.partition))
        self.without_request += kept is not None and origin.offset < kept
        full = replace(decision.with_candidates(decision.candidates), account=None)
        return CapturedDecision(
            at_ms=log_record.timestamp_ms,
            lane=source.partition,
            offset=log_record.offset,
            decision=full,
        )

    def _followed(self, log_record: LogRecord) -> AnyCaptureLine | None:
        """The line of an outcome of a decision of the period; None for other records."""
        at_ms, record = log_record.timestamp_ms, log_record.record
        if not isinstance(record, PrefillDone | Finished | records.Ended):
            return None
        is_open = record.id in self._open
        if isinstance(record, records.Ended):
            self._open.pop(record.id, None)
            if not is_open and not self._period.from_ms <= at_ms < self._period.to_ms:
                return None
            return CapturedEnd(at_ms=at_ms, id=record.id, code=record.code)
        if not is_open:
            return None
        if isinstance(record, PrefillDone):
            return CapturedPrefill(at_ms=at_ms, done=replace(record, handoff=b""))
        is_final = record.code in _FINAL or (record.code == "error" and not record.retryable)
        if is_final and record.phase != "prefill":
            del self._open[record.id]
        return CapturedRun(at_ms=at_ms, end=replace(record, message="", account=None))


def _later(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    """Progress of one of several ranges."""
    progress(before + done, total)
