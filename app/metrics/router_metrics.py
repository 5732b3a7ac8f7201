"""Prometheus metrics of a router: its decisions, queue and views, its requests, and drift.

Every series exists, at zero, from the start; series by worker come and go with workers. Requests
are measured in the lanes that the router owns, by append times of the ledger:

    queue      first Assigned of attempt 0 - received
    TTFT       first PrefillDone, but for those of phase prefill - received
    ITL        mean of the last run, as its worker measured it (Finished)
    outcome    code of the last run (Finished), or of the router's end (Ended)

Received is the append time on `prompts`, or the gateway's clock for a request over HTTP. A run of
phase prefill is left out; a request that a dead router had accepted has an outcome only. An outcome
that is in the ledger twice, of a run and of its router, is counted twice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal, get_args

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlane.app.audit.drift import DriftTracker
from kvlane.app.metrics.indexer_metrics import ViewCollector
from kvlane.app.metrics.metric_set import TOKEN_BUCKETS, MetricSet, gauges
from kvlane.app.routing.policy_names import RECORDED_POLICIES
from kvlane.app.routing.queueing.router_queue import RouterQueue
from kvlane.app.routing.selection.decision import Placement
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.streams.records import Assigned, EndCode, Ended, Finished, LogRecord, PrefillDone
from kvlane.streams.request import Request
from kvlane.streams.views.follower import Follower

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

    def on_record(self, log_record: LogRecord, model_of: Callable[[str], str]) -> None:
        """A new ledger record of a lane of this router; `model_of`: the model of a worker."""
        match log_record.record:
            case Assigned(id=key, attempt=attempt, phase=phase):
                if (request := self._open.get(key)) is not None:
                    request.is_served = True
                    if attempt == 0 and phase != "decode":
                        self._queue.labels(request.label).observe(_seconds(request, log_record))
            case PrefillDone(id=key, phase=phase) if phase != "prefill":
                request = self._open.get(key)
                if request is not None and not request.has_first_token:
                    request.has_first_token = True
                    self._ttft.labels(request.label).observe(_seconds(request, log_record))
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
        request = self._open.pop(request_id, None)
        return "" if request is None else request.label


def _seconds(request: _Open, log_record: LogRecord) -> float:
    """Time since receipt; not below 0, which clocks that differ would give."""
    return max(0, log_record.timestamp_ms - request.received_ms) / 1000


_LABELS = "model worker"


class DriftCollector(Collector):
    """Collector that reads the drift of each worker; workers without recent runs have no series."""

    def __init__(
        self, drift: DriftTracker, model_of: Callable[[str], str], now_ms: Callable[[], int]
    ) -> None:
        """`model_of`: the model that a worker serves; `now_ms`: time of the broker."""
        self._drift = drift
        self._model_of = model_of
        self._now_ms = now_ms

    def collect(self) -> Iterator[Metric]:
        now_ms = self._now_ms()
        drifts = [
            ([self._model_of(worker), worker], self._drift.summary_of([worker], now_ms))
            for worker in self._drift.workers_with_runs(now_ms)
        ]
        yield gauges(
            "kvlane_router_drift_runs",
            "Runs of the last ten minutes on which the other drift metrics rest",
            _LABELS,
            ((labels, now.runs) for labels, now in drifts),
        )
        yield gauges(
            "kvlane_router_drift_p95_cached_blocks",
            "Difference between the expected cached blocks of a prompt and those that the engine "
            "found, 95th percentile",
            _LABELS,
            ((labels, now.blocks) for labels, now in drifts if now.blocks is not None),
        )
        yield gauges(
            "kvlane_router_drift_p95_time_to_first_token_seconds",
            "Difference between the expected time to first token and the measured one, "
            "95th percentile",
            _LABELS,
            ((labels, now.ttft_ms / 1000) for labels, now in drifts if now.ttft_ms is not None),
        )
        yield gauges(
            "kvlane_router_drift_prediction_error_ratio",
            "Difference between the expected and the measured time to first token (ttft) and "
            "between tokens (itl), as a share of the measured one: median and 90th percentile",
            f"{_LABELS} time quantile",
            (
                ([*labels, time, quantile], share)
                for labels, now in drifts
                for time, error in (("ttft", now.ttft_error), ("itl", now.itl_error))
                if error is not None
                for quantile, share in zip(("0.5", "0.9"), error, strict=True)
            ),
        )
        yield gauges(
            "kvlane_router_drift_alert",
            "1 if kvlane_router_drift_p95_cached_blocks is above 1 block: the index "
            "differs from this cache",
            _LABELS,
            ((labels, not now.is_within_limit) for labels, now in drifts if now.blocks is not None),
        )


HandOverUse = Literal["used", "unused"]


class RouterMetrics(MetricSet):
    def __init__(self) -> None:
        super().__init__()
        self._views: ViewCollector | None = None
        self._decisions = self.counter(
            "kvlane_router_decisions", "Requests assigned to a worker, by policy", "policy"
        )
        self._outcomes = self.counter(
            "kvlane_router_terminated_requests", "Requests that this router ended, by code", "code"
        )
        self._preempted = self.counter(
            "kvlane_router_preempted_runs", "Batch runs that gave way to interactive requests"
        )
        self._handovers = self.counter(
            "kvlane_router_handed_over_requests",
            "Requests whose prompt a prefill worker has computed, by use: used by a decode worker, "
            "or unused, so that the next attempt began",
            "use",
        )
        self._dry_runs = self.counter(
            "kvlane_router_dry_runs", "Dry runs: requests for a decision without its execution"
        )
        self._queue_s = self.histogram(
            "kvlane_router_queue_time_seconds",
            "Time from the arrival of a request in the router to its first assignment",
        )
        self._prompt_tokens = self.histogram(
            "kvlane_router_prompt_tokens", "Prompt tokens of a request", buckets=TOKEN_BUCKETS
        )
        self._hit_ratio = self.histogram(
            "kvlane_router_prefix_cache_hit_ratio",
            "Fraction of a prompt's blocks that its worker has cached",
            buckets=[tenth / 10 for tenth in range(11)],
        )
        self.requests = RequestMetrics(self)
        for use in get_args(HandOverUse):
            self._handovers.labels(use)
        for policy in RECORDED_POLICIES:
            self._decisions.labels(policy)
        for code in get_args(EndCode):
            self._outcomes.labels(code)

    def watch(
        self,
        router_queue: RouterQueue,
        fleet: Fleet,
        followers: Mapping[str, Follower],
        index: KvIndexView,
    ) -> None:
        self._views = ViewCollector(index, followers)
        self.read(partial(_queue_families, router_queue, fleet))
        self.registry.register(self._views)

    async def page(self) -> bytes:
        assert self._views is not None, "watches nothing"
        await self._views.refresh()
        return await super().page()

    def on_dry_run(self, prompt: PromptHashes, choice: Placement) -> None:
        self._dry_runs.inc()
        self._observe(prompt, choice)

    def on_dispatched(
        self, attempt: int, prompt: PromptHashes, choice: Placement, waited_s: float
    ) -> None:
        """Count a dispatched phase; prompt and queue time of the first one only."""
        self._decisions.labels(choice.policy).inc()
        if attempt == 0 and choice.phase != "decode":
            self._queue_s.observe(waited_s)
            self._observe(prompt, choice)

    def on_preempted(self) -> None:
        self._preempted.inc()

    def on_handover(self, use: HandOverUse) -> None:
        """A hand-over was used, or never will be."""
        self._handovers.labels(use).inc()

    def on_ended(self, code: EndCode) -> None:
        self._outcomes.labels(code).inc()

    def _observe(self, prompt: PromptHashes, choice: Placement) -> None:
        self._prompt_tokens.observe(prompt.tokens)
        rate = prompt.hit_rate(choice.overlap_blocks, choice.block_size)
        if rate is not None:
            self._hit_ratio.observe(rate)


def _queue_families(router_queue: RouterQueue, fleet: Fleet) -> Iterator[Metric]:
    queue, inputs = router_queue.waiting, router_queue.inputs
    for name, meaning, value in (
        ("queued_requests", "Requests queued in this router", queue.queued_requests),
        ("deferred_requests", "Prompts from Kafka that stay in the log until the queue has room",
         queue.deferred_requests),
        ("queued_bytes", "Prompt bytes of queued requests", queue.queued_bytes),
        ("unconfirmed_assignments", "Decisions of this router not yet read back from the ledger",
         inputs.unconfirmed_assignments),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"kvlane_router_{name}", meaning, value)
    # A model is known by its card or by a worker, and stays so while it has none.
    models = {*fleet.models, *(member.card.model for member in fleet.members.values())}
    for name, meaning, waiting, place in (
        ("queued_tokens", "Prompt tokens of queued requests that no cache had on arrival",
         queue, 1),
        ("queued_batch_requests", "Batch requests queued in this router, besides interactive ones",
         router_queue.batch.waiting, 0),
    ):  # fmt: skip
        sums = Counter[str](dict.fromkeys([*models, UNKNOWN], 0))
        for model, size in waiting.size_by_model().items():
            sums[model if model in models else UNKNOWN] += size[place]
        samples = (([model], value) for model, value in sorted(sums.items()))
        yield gauges(f"kvlane_router_{name}", f"{meaning}, by model", "model", samples)
    yield gauges(
        "kvlane_router_worker_slowdown_ratio",
        "Measured latency of a worker relative to its profile",
        "worker",
        (([worker], ratio) for worker, ratio in sorted(inputs.slowdown_by_worker.items())),
    )
    loads = sorted(inputs.worker_loads.items())
    for name, meaning, field in (
        ("active_requests", "Active requests of a worker, from the ledger", "runs"),
        ("active_tokens", "Their prompt tokens, and output tokens when they were assigned",
         "tokens"),
        ("pending_prefill_tokens", "Those of them that are neither computed nor cached",
         "prefill_tokens"),
    ):  # fmt: skip
        by_worker = [([worker], getattr(load, field)) for worker, load in loads]
        yield gauges(f"kvlane_router_{name}", meaning, "worker", by_worker)
