"""Metrics of requests, by model: queue time, time to first token, inter-token latency, outcome.

A router measures the requests of the lanes that it owns, over HTTP and over Kafka alike, by append
times of the ledger:

    queue      first Assigned of attempt 0 - received
    TTFT       first PrefillDone, but for those of phase prefill - received
    ITL        mean of the last run, as its worker measured it (Finished)
    outcome    code of the last run (Finished), or of the router's end (Ended)

A run of phase prefill gives no token to readers and ends no request: its Finished is left out.

Received is the append time on `prompts`, or the gateway's clock for a request over HTTP. A request
that another router had accepted, which died, has an outcome only. An outcome that is in the ledger
twice, because a run ended while its router ended the request, is counted twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from kvlane.app.metrics.metric_set import MetricSet
from kvlane.streams.records import Assigned, Ended, Finished, LogRecord, PrefillDone
from kvlane.streams.request import Request

UNKNOWN = "unknown"
"""Label of a model that no worker serves: clients choose such names freely."""
MAX_TRACKED_REQUESTS = 65_536
"""Bound of tracked requests; beyond it, only the outcome of the oldest is counted."""
TERMINAL_CODES = frozenset({"stop", "length", "cancelled", "error"})
"""Codes of a run that end its request, unless the run may be tried again."""


class _Open(msgspec.Struct, gc=False):
    model: str
    received_ms: int
    is_served: bool = False
    has_first_token: bool = False

    @property
    def label(self) -> str:
        return self.model if self.is_served else UNKNOWN


class RequestMetrics:
    """The metrics of the requests of one router."""

    def __init__(self, metrics: MetricSet) -> None:
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._queue, self._ttft, self._itl = (
            metrics.histogram(f"kvlane_router_request_{name}_seconds", meaning, "model")
            for name, meaning in (
                ("queue_time", "Time from receipt to the first assignment"),
                ("time_to_first_token", "Time from receipt to the first token"),
                ("inter_token_latency", "Inter-token latency, averaged over the last run"),
            )
        )
        self._outcomes = metrics.counter(
            "kvlane_router_requests", "Requests that ended, by outcome", "model", "outcome"
        )

    def on_accepted(self, request: Request, *, is_served: bool) -> None:
        """A request was accepted for scheduling. `is_served`: its model has workers."""
        known = self._open.setdefault(request.id, _Open(request.model, request.received_ms))
        known.is_served = known.is_served or is_served
        while len(self._open) > MAX_TRACKED_REQUESTS:
            self._open.popitem(last=False)

    def on_record(self, fact: LogRecord, model_of: Callable[[str], str]) -> None:
        """A new ledger record of a lane of this router; `model_of`: the model of a worker."""
        match fact.record:
            case Assigned(id=key, attempt=attempt, phase=phase):
                if (request := self._open.get(key)) is not None:
                    request.is_served = True
                    if attempt == 0 and phase != "decode":
                        self._queue.labels(request.label).observe(_seconds(request, fact))
            case PrefillDone(id=key, phase=phase) if phase != "prefill":
                request = self._open.get(key)
                if request is not None and not request.has_first_token:
                    request.has_first_token = True
                    self._ttft.labels(request.label).observe(_seconds(request, fact))
            case Finished(id=key, code=code, worker=worker) as run if run.phase != "prefill":
                if code not in TERMINAL_CODES or run.retryable:
                    return
                model = self._end(key) or model_of(worker) or UNKNOWN
                self._outcomes.labels(model, code).inc()
                if run.itl_ms:
                    self._itl.labels(model).observe(run.itl_ms / 1000)
            case Ended(id=key, code=code) if code != "seen":
                self._outcomes.labels(self._end(key) or UNKNOWN, code).inc()
            case _:
                pass

    def _end(self, request_id: str) -> str:
        """Forget a request; its model, or "" for one that was not followed."""
        request = self._open.pop(request_id, None)
        return "" if request is None else request.label


def _seconds(request: _Open, fact: LogRecord) -> float:
    """Time since receipt; not below 0, which clocks that differ would give."""
    return max(0, fact.timestamp_ms - request.received_ms) / 1000
