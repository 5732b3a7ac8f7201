"""Reader of the ledger: the routing decisions of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

from kvlane.app.audit.drift import error_share
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.errors import RecordError
from kvlane.streams.ports import Log, Partition
from kvlane.streams.reading.range_reader import tail
from kvlane.streams.records import Assigned, Finished, PrefillDone
from kvlane.streams.topics import LEDGER


class TimeErrors(NamedTuple):
    """Of the predicted times to first token and between tokens, as shares of the measured ones."""

    ttft: float | None = None
    itl: float | None = None


class LedgerDecisions:
    """Routing decisions and cache hits of each request. `follow` must be running."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._assigned: defaultdict[str, list[Assigned]] = defaultdict(list)
        self._cached: dict[str, int] = {}
        self._prefill_cached: dict[str, int] = {}
        """Of prompts that were handed over: to a decode worker, all of their tokens are cached."""
        self._handed_over: set[str] = set()
        self._errors: dict[str, TimeErrors] = {}

    @property
    def handed_over_requests(self) -> int:
        return len(self._handed_over)

    def decisions(self, request_id: str) -> Sequence[Assigned]:
        """The decisions of a request so far, one for each phase of each attempt."""
        return self._assigned.get(request_id, ())

    def workers_of(self, request_id: str) -> list[str]:
        return [decision.worker for decision in self.decisions(request_id)]

    def answering_workers(self, request_id: str) -> list[str]:
        return [d.worker for d in self.decisions(request_id) if d.phase != "prefill"]

    def cached_tokens(self, request_id: str) -> int | None:
        """Prompt tokens that the engine found in its cache; None before the run has ended. Of a
        handed-over prompt: those of the prefill worker."""
        return self._cached.get(request_id)

    def prediction_errors(self, request_id: str) -> TimeErrors:
        return self._errors.get(request_id, TimeErrors())

    async def end_positions(self) -> dict[Partition, int]:
        lanes = range(await self._log.partitions(LEDGER))
        ends = await self._log.end_offsets(LEDGER, lanes)
        return {Partition(LEDGER, lane): end for lane, end in ends.items()}

    async def follow(self, positions: dict[Partition, int]) -> None:
        async with aclosing(tail(self._log, positions, moving=True)) as batches:
            async for records in batches:
                for record in records:
                    try:
                        decoded = decode(record)
                    except RecordError:
                        continue
                    self.on_record(decoded)

    def on_record(self, record: AnyRecord) -> None:
        match record:
            case Assigned():
                self._assigned[record.id].append(record)
            case PrefillDone(phase="prefill", attempt=0):
                self._prefill_cached[record.id] = record.cached_tokens
            case PrefillDone(phase="decode"):
                self._handed_over.add(record.id)
            case Finished(attempt=0) if record.phase != "prefill":
                self._cached[record.id] = self._prefill_cached.get(record.id, record.cached_tokens)
                made = next(
                    (d for d in self.decisions(record.id) if d.run_key == record.run_key), None
                )
                if made is not None and made.phase == "aggregated":
                    self._errors[record.id] = TimeErrors(
                        error_share(made.ttft_ms_predicted, record.ttft_ms),
                        error_share(made.itl_ms_predicted, record.itl_ms),
                    )
