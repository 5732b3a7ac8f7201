"""What is known when a request is planned, and what can come of it.

Data alone. `plan.py` makes a decision of a view; `held.py` and routers act on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from app.routing.board import NOTHING
from app.routing.burdens import Burden, Burdens
from app.routing.eligibility import Pools
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.paces import OUTPUT_TOKENS
from app.routing.policies import DynamoWeights, Place
from app.routing.predictive import PredictiveWeights
from app.routing.recorded import Inputs
from streams.records import Candidate, EndCode


class Planned(msgspec.Struct, frozen=True, gc=False):
    """Where a request is to go. `prefill_ms`: its own there, computed alone.

    `until_ms`: when it is held no longer, whatever is there.
    """

    place: Place
    prefill_ms: float
    until_ms: int


class View(msgspec.Struct, frozen=True, gc=False):
    """What is known when a request is planned. `told`: burdens by the ledger, `own`: those of
    decisions that were taken here and not read back. `now_ms`: broker time.

    Of the rest only policy predictive knows. `output_tokens`: the mean answer's; `slowness`: of
    workers, see `Pace`. `others`: for which places the other requests are planned that are held
    here, in the order of their arrival. `later_ms`: see `Sources`. `counts_output`: whether tokens
    of answers that are under way count as load. `leads_to`: see `Paces`.
    """

    fleet: Fleet
    pools: Pools
    caches: Index
    told: Burdens
    own: Burdens
    now_ms: int
    output_tokens: float = OUTPUT_TOKENS
    slowness: Mapping[str, float] = NOTHING
    others: Sequence[Planned] = ()
    counts_output: bool = True
    later_ms: Mapping[str, float] = NOTHING
    leads_to: float = 1.0


class Tuning(NamedTuple):
    """The policy of a deployment, and its settings. `session_slack`: see `allowance`."""

    policy: str = "predictive"
    weights: DynamoWeights = DynamoWeights()
    predictive: PredictiveWeights = PredictiveWeights()
    session_slack: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether requests are held for a place, and so planned before they go."""
        return self.policy == "predictive"


class Outlook(msgspec.Struct, frozen=True, gc=False):
    """What policy predictive expects. `left_ms`: for how long the request is better held, from now;
    `held_ms`: how long it was, `ttft_ms`: time to its first token if it goes now.
    """

    planned: Planned | None = None
    left_ms: int = 0
    held_ms: int = 0
    ttft_ms: float = 0.0


class Chosen(msgspec.Struct, frozen=True, gc=False):
    """The decision. `prefill_tokens`: what it adds to the prefill of its place; with the other
    fields, all that was not in the request and went into the costs. `at_ms`: when it was taken.
    `bound`: where the session of the request was at home, if that counted.
    """

    place: Place
    tokens: int
    cached_tokens: int
    prefill_tokens: int
    block_size: int
    policy: str
    params: dict[str, float]
    seed: int
    inputs: Inputs
    at_ms: int = 0
    outlook: Outlook = Outlook()
    bound: Place | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The places that it was made of, to be recorded: the best ones, and the chosen one."""
        return self.inputs.candidates

    @property
    def overlap_blocks(self) -> int:
        """Blocks of the prompt that its place has, in whatever tier."""
        each = self.inputs.candidate(self.place)
        return each.overlap_blocks + each.host_blocks + each.disk_blocks if each else 0

    @property
    def burden(self) -> Burden:
        """What it adds to the load of its place until it is read back."""
        booked = self.policy != "direct"  # who chooses the workers keeps the books there
        return Burden(1, self.tokens * booked, self.prefill_tokens, 1, self.at_ms)


class Hold(msgspec.Struct, frozen=True, gc=False):
    """Nobody may take it now, or it had better wait; somebody may later, by what is known at
    `wake_at_ms` if not before.

    `wake_at_ms`: time of the broker; None where only news can help. Looking again earlier or later
    is never wrong. `planned` is what policy predictive has in mind for it. `code`: what the request
    ends with if its time is up before. `is_hopeless`: only a worker that is yet to come can help.
    """

    reason: str
    wake_at_ms: int | None = None
    planned: Planned | None = None
    code: EndCode = "deadline"
    is_hopeless: bool = False


class Refuse(NamedTuple):
    """It asks for what cannot be."""

    code: EndCode
    message: str


Plan: TypeAlias = Chosen | Hold | Refuse


def intention(planned: Plan) -> Planned | None:
    """What policy predictive has in mind for a request, whether it may go now or is held."""
    if isinstance(planned, Chosen):
        return planned.outlook.planned
    return planned.planned if isinstance(planned, Hold) else None
