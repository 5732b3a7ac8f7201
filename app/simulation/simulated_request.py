"""A request of a simulated run, with its times."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.app.engine.simulated.batch import BatchSequence
from kvlane.app.simulation.simulated_worker import NEVER, SimulatedWorker
from kvlane.app.simulation.trace_requests import TraceRequest


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A simulated request; times in ms since the start, NEVER until they are known.

    `router`: its number. `cached_tokens`: at its first admission. `predicted_ttft_ms`,
    `predicted_itl_ms`: by its decision, 0 for none. `held`: its prefill worker and sequence there,
    until the blocks are transferred.
    """

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
    """The request that a sequence runs for."""
    simulated = sequence.key
    assert isinstance(simulated, SimulatedRequest)
    return simulated
