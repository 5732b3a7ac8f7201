"""Counterfactual simulation of a captured period: with its recorded decisions, or another policy.

Requests arrive as recorded, at a fleet like that of the capture, with empty caches. The *regret* of
the recorded decisions is their additional latency over another policy, both simulated. It holds for
the whole period, not for single requests.

Only finished requests for the most requested model count, without handed-over ones. Pinned workers,
constraints, preferences and session affinity are not simulated; answers fill no shared blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.performance import profile_from_card
from kvlane.app.simulation.simulated_router import DEFAULT_CONDITIONS, NetworkConditions
from kvlane.app.simulation.simulation_runs import RunMetrics, metrics_of, parse_policy
from kvlane.app.simulation.simulator import new_simulator, worker_names
from kvlane.app.simulation.trace_requests import (
    SIMULATION_SECRET,
    RequestArrival,
    SimulatedRequest,
    TraceRequest,
    uses_sessions,
)
from kvlane.app.traces.capture_format import (
    AnyCaptureLine,
    CapturedDecision,
    CapturedPrefill,
    CapturedRequest,
    CapturedRun,
    CapturedWorker,
)
from kvlane.app.traces.mooncake_trace import InvalidTrace
from kvlane.indexer.block_hashes import prompt_keys
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Hints, Request, StopConditions

_ROLES = ("aggregated", "decode")
DEFAULT_CACHE_BLOCKS = 16_384


class RecordedRequest(NamedTuple):
    """A request as recorded, in ms since the first one; its worker rank as a number. `sent_ms`:
    time of dispatch, without the delays of messages and processes."""

    request: CapturedRequest
    rank_number: int
    arrived_ms: float
    sent_ms: float
    first_token_ms: float
    last_token_ms: float
    output_tokens: int
    cached_tokens: int


class PolicyRegret(NamedTuple):
    """Mean additional latency of the recorded decisions in ms; `*_error`: two standard errors."""

    ttft_ms: float
    ttft_error: float
    e2e_ms: float
    e2e_error: float


class CapturedPeriod(NamedTuple):
    """Requests in order of arrival. `left_out`: ignored ones by reason; `fleets`: number of engine
    configurations, of which the most common one is simulated."""

    model: str
    workers: int
    shape: EngineLimits
    requests: list[RecordedRequest]
    left_out: Counter[str]
    fleets: int


@dataclass
class CaptureReader:
    _workers: dict[str, CapturedWorker] = field(default_factory=dict)
    _requests: dict[str, CapturedRequest] = field(default_factory=dict)
    _decided: dict[str, list[CapturedDecision]] = field(default_factory=dict)
    _prefilled: dict[str, int] = field(default_factory=dict)
    _ran: dict[str, list[CapturedRun]] = field(default_factory=dict)

    def add_line(self, line: AnyCaptureLine) -> None:
        if isinstance(line, CapturedWorker):
            self._workers[line.id] = line
        elif isinstance(line, CapturedRequest):
            # A second request with the same id is a duplicate, which routers ignore.
            self._requests.setdefault(line.id, replace(line, router_config_override=None))
        elif isinstance(line, CapturedDecision):
            slim = replace(line.decision, params={}, choice=None).with_candidates(())
            self._decided.setdefault(line.decision.id, []).append(replace(line, decision=slim))
        elif isinstance(line, CapturedPrefill):
            self._prefilled.setdefault(line.done.id, line.at_ms)
        elif isinstance(line, CapturedRun):
            self._ran.setdefault(line.end.id, []).append(line)

    def build_period(self) -> CapturedPeriod:
        models = Counter(request.model for request in self._requests.values())
        if not models:
            raise InvalidTrace(
                "the capture has no requests of this period: requests are kept for an hour, so "
                "capture earlier (`kvlane capture`)"
            )
        model = models.most_common(1)[0][0]
        fleet = [w for w in self._workers.values() if w.model == model or not model]
        fleet = [worker for worker in fleet if worker.role in _ROLES]
        places = {
            place: number
            for number, place in enumerate(
                (worker.id, rank)
                for worker in sorted(fleet, key=lambda w: w.id)
                for rank in range(worker.ranks)
            )
        }
        if not places:
            raise InvalidTrace(
                f"the capture has no worker of {model or 'any model'} in this period"
            )
        requests, left_out = [], Counter[str]()
        ordered = sorted(self._requests.values(), key=lambda request: (request.at_ms, request.id))
        for request in ordered:
            found = self._recorded_request(request, model, places, ordered[0].at_ms)
            if isinstance(found, RecordedRequest):
                requests.append(found)
            else:
                left_out[found] += 1
        if not requests:
            why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise InvalidTrace(f"no request of this period can be simulated: {why}")
        size = requests[0].request.block_size
        kinds = Counter(_shape(worker.config, size) for worker in fleet)
        shape = kinds.most_common(1)[0][0]
        return CapturedPeriod(model, len(places), shape, requests, left_out, len(kinds))

    def _recorded_request(  # noqa: PLR0911 - one for each reason
        self,
        request: CapturedRequest,
        model: str,
        places: dict[tuple[str, int], int],
        began_ms: int,
    ) -> RecordedRequest | str:
        """A request as recorded, or the reason to ignore it."""
        decided, ran = self._decided.get(request.id), self._ran.get(request.id)
        if request.model != model:
            return "for another model"
        if not decided:
            return "not decided in the period"
        if request.at_ms > decided[0].at_ms:
            return "published before the period, and again in it"
        if any(each.decision.phase == "prefill" for each in decided):
            return "handed over from a prefill worker"
        if not ran or ran[-1].end.code not in ("stop", "length"):
            return "without a whole answer"
        first = decided[0].decision
        place = places.get((first.worker, first.rank))
        if place is None:
            return "on a worker without a card"
        end = ran[-1]
        return RecordedRequest(
            request,
            place,
            request.at_ms - began_ms,
            request.at_ms - began_ms + first.held_ms,
            self._prefilled.get(request.id, end.at_ms) - began_ms,
            end.at_ms - began_ms,
            max(sum(run.end.output_tokens for run in ran), 1),
            ran[0].end.cached_tokens,
        )


def recorded_metrics(period: CapturedPeriod) -> RunMetrics:
    """Metrics of the log; times by the broker's clock, so to the millisecond at best."""
    requests = []
    for each in period.requests:
        simulated = SimulatedRequest(_traced(each), each.arrived_ms)
        simulated.first_token_ms, simulated.last_token_ms = each.first_token_ms, each.last_token_ms
        simulated.cached_tokens = each.cached_tokens
        requests.append(simulated)
    return metrics_of(requests)


def simulate_recorded(
    period: CapturedPeriod,
    conditions: NetworkConditions = DEFAULT_CONDITIONS,
    progress: Callable[[int], None] = lambda _: None,
) -> list[SimulatedRequest]:
    """Simulate the recorded decisions and queueing times; returned in order of arrival."""
    names = worker_names(period.workers)
    arrivals = [
        RequestArrival(each.sent_ms, _traced(each, names[each.rank_number]))
        for each in sorted(period.requests, key=lambda each: each.sent_ms)
    ]
    requests = _run(period, arrivals, RoutingConfig("direct"), 0, conditions, progress)
    arrived_ms = {each.request.id: each.arrived_ms for each in period.requests}
    for simulated in requests:
        simulated.arrived_ms = arrived_ms[simulated.id]
    return _in_order(period, requests)


def counterfactual(
    period: CapturedPeriod,
    policy: str,
    seed: int,
    conditions: NetworkConditions = DEFAULT_CONDITIONS,
    progress: Callable[[int], None] = lambda _: None,
) -> list[SimulatedRequest]:
    """Simulate another policy; returned in order of arrival. Raises UnknownPolicy, InvalidTrace."""
    tuning = parse_policy(policy)
    in_session = uses_sessions(tuning.policy)
    arrivals = [
        RequestArrival(each.arrived_ms, _traced(each, in_session=in_session))
        for each in period.requests
    ]
    return _in_order(period, _run(period, arrivals, tuning, seed, conditions, progress))


def policy_regret(
    taken: Sequence[SimulatedRequest], other: Sequence[SimulatedRequest]
) -> PolicyRegret:
    first = [a.first_token_ms - b.first_token_ms for a, b in zip(taken, other, strict=True)]
    last = [a.last_token_ms - b.last_token_ms for a, b in zip(taken, other, strict=True)]
    return PolicyRegret(*_mean(first), *_mean(last))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    error = 2 * float(np.std(values)) / math.sqrt(len(values))
    return float(np.mean(values)), error


def _run(
    period: CapturedPeriod,
    arrivals: Sequence[RequestArrival],
    config: RoutingConfig,
    seed: int,
    conditions: NetworkConditions,
    progress: Callable[[int], None],
) -> list[SimulatedRequest]:
    replay = new_simulator(
        arrivals, period.workers, period.shape, config, seed, progress, conditions
    )
    return replay.run()


def _in_order(
    period: CapturedPeriod, requests: Iterable[SimulatedRequest]
) -> list[SimulatedRequest]:
    by_id = {simulated.id: simulated for simulated in requests}
    return [by_id[each.request.id] for each in period.requests]


def _traced(
    each: RecordedRequest, worker: str | None = None, *, in_session: bool = False
) -> TraceRequest:
    request = each.request
    hints = Hints(
        decode_worker_id=worker,
        session_control=request.hints.session_control if in_session else None,
        expected_output_tokens=request.hints.expected_output_tokens,
    )
    stop = StopConditions(max_tokens=request.max_tokens)
    names = request.block_hashes
    return TraceRequest(
        PromptHashes.from_hashes(
            Request(id=request.id, hints=hints, stop=stop),
            request.prompt_tokens,
            names,
            request.block_size,
        ),
        each.output_tokens,
        names.tolist(),
        tuple(prompt_keys(names, SIMULATION_SECRET).tolist()),
    )


def _shape(config: EngineConfig, block_size: int) -> EngineLimits:
    usual, pace = EngineLimits(block_size, 1), profile_from_card(config)
    blocks = config.total_kv_blocks or 0
    return EngineLimits(
        block_size,
        blocks * (config.kv_cache_block_size or block_size) // block_size or DEFAULT_CACHE_BLOCKS,
        config.max_num_batched_tokens or usual.max_batched_tokens,
        config.max_num_seqs or usual.max_sequences,
        pace.curves,
    )
