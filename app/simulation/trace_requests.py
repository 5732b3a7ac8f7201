"""Requests of a trace, in the form that routers and engines need, and their course in a run.

Chunks of the trace are the blocks of the caches, so a block has CHUNK_TOKENS tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.app.engine.simulated.batch import BatchSequence
from kvlane.app.routing.selection.policies.registry import POLICIES
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.simulation.simulated_worker import NEVER, SimulatedWorker
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow
from kvlane.indexer.block_hashes import LOOPBACK_SECRET, derive_secret, prompt_keys
from kvlane.streams.request import NO_HINTS, Hints, Request, RouterParams, SessionControl

MODEL = "simulated"
SIMULATION_SECRET = derive_secret(LOOPBACK_SECRET)

SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier that turns small numbers into hash-like ones; odd, so it is injective."""


class TraceRequest(NamedTuple):
    """A request of a trace. `chunks`: its full chunks; `keys`: their keys in the index."""

    prompt: PromptHashes
    output_tokens: int
    chunks: list[int]
    keys: tuple[int, ...]


class RequestArrival(NamedTuple):
    at_ms: float
    request: TraceRequest


class ArrivalRate(NamedTuple):
    """Arrival process. `speed`: factor on the recorded rate. `jitter_s`: maximum random delay of
    each arrival: recorded ones may be rounded to clock ticks, and then come in bursts."""

    speed: float = 1.0
    jitter_s: float = 0.0


def uses_sessions(policy: str) -> bool:
    """Whether a policy uses sessions. Requests of others have none: they are planned in batches,
    which is faster and has the same result."""
    return POLICIES[policy].uses_sessions


def trace_requests(
    rows: Sequence[TraceRow],
    *,
    with_sessions: bool = False,
    block_size: int = CHUNK_TOKENS,
    ttft_targets_ms: Sequence[float] = (),
) -> list[TraceRequest]:
    """The requests of a trace, in its order. `block_size`: tokens of a block, for which `hash_ids`
    has one id each. `ttft_targets_ms`: of the requests in turn."""
    targets = [RouterParams(ttft_target=target_ms) for target_ms in ttft_targets_ms]
    wishes: Sequence[RouterParams | None] = targets or [None]
    return [
        _traced(number, row, block_size, wishes[number % len(wishes)], in_session=with_sessions)
        for number, row in enumerate(rows)
    ]


def _traced(
    number: int, row: TraceRow, block_size: int, targets: RouterParams | None, *, in_session: bool
) -> TraceRequest:
    chunks = row.hash_ids[: row.input_length // block_size]
    local: NDArray[np.uint64] = np.array(chunks, np.uint64) * SPREAD
    hints = NO_HINTS
    if in_session:
        hints = Hints(session_control=SessionControl(session_id=_session(row)))
    return TraceRequest(
        PromptHashes.from_hashes(
            Request(id=f"{number:06}", model=MODEL, hints=hints, router=targets),
            row.input_length,
            local,
            block_size,
        ),
        max(row.output_length, 1),
        chunks,
        tuple(prompt_keys(local, SIMULATION_SECRET).tolist()),
    )


def _session(row: TraceRow) -> str:
    """Session id: the second chunk, since the first one is often a shared system prompt."""
    return str(row.hash_ids[min(1, len(row.hash_ids) - 1)])


def schedule_arrivals(
    rows: Sequence[TraceRow], requests: Sequence[TraceRequest], pace: ArrivalRate, seed: int
) -> list[RequestArrival]:
    at_ms = np.array([row.timestamp for row in rows], np.float64)
    if pace.jitter_s:
        at_ms += np.random.default_rng(seed).uniform(0, pace.jitter_s * 1000, len(at_ms))
    order = np.argsort(at_ms, kind="stable").tolist()
    return [RequestArrival(float(at_ms[i]) / pace.speed, requests[i]) for i in order]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated request; times in ms since the start, NEVER until they are known.
    `cached_tokens`: at its first admission. `held`: its prefill worker and sequence there, until
    the blocks are transferred."""

    request: TraceRequest
    arrived_ms: float
    router: int = 0
    worker: str = ""
    sent_ms: float = NEVER
    first_token_ms: float = NEVER
    last_token_ms: float = NEVER
    cached_tokens: int = 0
    predicted_ttft_ms: float = 0.0
    predicted_itl_ms: float = 0.0
    prefill_worker: str = ""
    held: tuple[SimulatedWorker, BatchSequence] | None = None

    @property
    def id(self) -> str:
        return self.request.prompt.request.id


def request_of(sequence: BatchSequence) -> SimulatedRequest:
    simulated = sequence.key
    assert isinstance(simulated, SimulatedRequest)
    return simulated
