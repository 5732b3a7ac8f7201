"""A captured period played again: as it was decided, and as other policies would have decided.

Requests come as they came, on a fleet like the one of the capture, caches empty at first. The
*regret* of what was decided is how much later its tokens came than under another policy, both
simulated: what a model of engines gets wrong is in both. It speaks of the whole period and of no
single request, since each decision changes what the later ones find.

Only requests count that were asked in the period for its most asked model, and answered. What they
were pinned to, restricted to or had a taste for is not played, nor have sessions a home; blocks
that answers filled are not shared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from app.captured import AnyLine, Asked, Decided, Prefilled, Ran, Worker
from app.engine.batch import Shape
from app.routing.decisions import Tuning
from app.routing.paces import pace_of
from app.routing.prompt import Prompt
from app.simulation.conditions import ORDINARY, Conditions
from app.simulation.figures import Figures, figures
from app.simulation.replay import Life, names_of, prepared
from app.simulation.runs import tuning_of
from app.simulation.traffic import SECRET, Arrival, Traced, asks_for_sessions
from app.trace import BadTrace
from indexer.keys import prompt_keys
from streams.records import EngineConfig, Hints, Request, StopConditions

_ROLES = ("aggregated", "decode")
BLOCKS = 16_384
"""In the cache of an engine that does not say."""


class Happened(NamedTuple):
    """A request as it went, in ms from the first one on; its place as a number.

    `sent_ms`: when it went there but for what messages and processes took: that is no decision.
    """

    asked: Asked
    place: int
    arrived_ms: float
    sent_ms: float
    first_token_ms: float
    last_token_ms: float
    output_tokens: int
    cached_tokens: int


class Regret(NamedTuple):
    """By how many ms the decisions taken were worse, on average; `*_error`: two standard errors."""

    ttft_ms: float
    ttft_error: float
    e2e_ms: float
    e2e_error: float


class Period(NamedTuple):
    """What there is to play, in the order of arrival. `left_out`: requests that do not count, by
    why; `fleets`: how many kinds of engines there were, of which the commonest is played.
    """

    model: str
    workers: int
    shape: Shape
    requests: list[Happened]
    left_out: Counter[str]
    fleets: int


@dataclass
class Reading:
    """The lines of a capture, one by one, and the period when they are over."""

    _workers: dict[str, Worker] = field(default_factory=dict)
    _asked: dict[str, Asked] = field(default_factory=dict)
    _decided: dict[str, list[Decided]] = field(default_factory=dict)
    _prefilled: dict[str, int] = field(default_factory=dict)
    _ran: dict[str, list[Ran]] = field(default_factory=dict)

    def take(self, line: AnyLine) -> None:
        """One line more."""
        if isinstance(line, Worker):
            self._workers[line.id] = line
        elif isinstance(line, Asked):
            self._asked[line.id] = replace(line, router_config_override=None)
        elif isinstance(line, Decided):
            slim = replace(line.decision, candidates=(), params={})
            self._decided.setdefault(line.decision.id, []).append(replace(line, decision=slim))
        elif isinstance(line, Prefilled):
            self._prefilled.setdefault(line.done.id, line.at_ms)
        elif isinstance(line, Ran):
            self._ran.setdefault(line.end.id, []).append(line)

    def period(self) -> Period:
        """All of it. Raises BadTrace when there is nothing to play."""
        models = Counter(asked.model for asked in self._asked.values())
        if not models:
            raise BadTrace(
                "no request of this period is kept: requests are kept for an hour, so capture in "
                "time (`kvlane capture`)"
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
            raise BadTrace(f"no worker of {model or 'any model'} is known of this period")
        requests, left_out = [], Counter[str]()
        ordered = sorted(self._asked.values(), key=lambda asked: (asked.at_ms, asked.id))
        for asked in ordered:
            found = self._happened(asked, model, places, ordered[0].at_ms)
            if isinstance(found, Happened):
                requests.append(found)
            else:
                left_out[found] += 1
        if not requests:
            why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
            raise BadTrace(f"no request of this period can be played: {why}")
        size = requests[0].asked.block_size
        kinds = Counter(_shape(worker.config, size) for worker in fleet)
        shape = kinds.most_common(1)[0][0]
        return Period(model, len(places), shape, requests, left_out, len(kinds))

    def _happened(
        self, asked: Asked, model: str, places: dict[tuple[str, int], int], began_ms: int
    ) -> Happened | str:
        """A request as it went, or why it does not count."""
        decided, ran = self._decided.get(asked.id), self._ran.get(asked.id)
        if asked.model != model:
            return "for another model"
        if not decided:
            return "not decided in the period"
        if not ran or ran[-1].end.code not in ("stop", "length"):
            return "without a whole answer"
        first = decided[0].decision
        place = places.get((first.worker, first.rank))
        if place is None:
            return "on a worker without a card"
        end = ran[-1]
        return Happened(
            asked,
            place,
            asked.at_ms - began_ms,
            asked.at_ms - began_ms + first.held_ms,
            self._prefilled.get(asked.id, end.at_ms) - began_ms,
            end.at_ms - began_ms,
            max(sum(run.end.output_tokens for run in ran), 1),
            ran[0].end.cached_tokens,
        )


def as_it_happened(period: Period) -> Figures:
    """What the log says; times by the broker's clock, so to the millisecond at best."""
    lives = []
    for each in period.requests:
        life = Life(_traced(each), each.arrived_ms)
        life.first_token_ms, life.last_token_ms = each.first_token_ms, each.last_token_ms
        life.cached_tokens = each.cached_tokens
        lives.append(life)
    return figures(lives)


def as_decided(
    period: Period,
    conditions: Conditions = ORDINARY,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Life]:
    """The same decisions, held as long, simulated; in the order of arrival."""
    names = names_of(period.workers)
    arrivals = [
        Arrival(each.sent_ms, _traced(each, names[each.place]))
        for each in sorted(period.requests, key=lambda each: each.sent_ms)
    ]
    lives = _played(period, arrivals, Tuning("direct"), 0, conditions, progress)
    arrived_ms = {each.asked.id: each.arrived_ms for each in period.requests}
    for life in lives:
        life.arrived_ms = arrived_ms[life.id]
    return _in_order(period, lives)


def redecided(
    period: Period,
    policy: str,
    seed: int,
    conditions: Conditions = ORDINARY,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Life]:
    """As a policy would have decided; in the order of arrival. Raises BadPolicy, BadTrace."""
    tuning = tuning_of(policy)
    in_session = asks_for_sessions(tuning.policy)
    arrivals = [
        Arrival(each.arrived_ms, _traced(each, in_session=in_session)) for each in period.requests
    ]
    return _in_order(period, _played(period, arrivals, tuning, seed, conditions, progress))


def regret(taken: Sequence[Life], other: Sequence[Life]) -> Regret:
    """Of decisions that were taken, against others on the same requests in the same order."""
    first = [a.first_token_ms - b.first_token_ms for a, b in zip(taken, other, strict=True)]
    last = [a.last_token_ms - b.last_token_ms for a, b in zip(taken, other, strict=True)]
    return Regret(*_mean(first), *_mean(last))


def _mean(values: Sequence[float]) -> tuple[float, float]:
    error = 2 * float(np.std(values)) / math.sqrt(len(values))
    return float(np.mean(values)), error


def _played(
    period: Period,
    arrivals: Sequence[Arrival],
    tuning: Tuning,
    seed: int,
    conditions: Conditions,
    progress: Callable[[int], None],
) -> list[Life]:
    replay = prepared(arrivals, period.workers, period.shape, tuning, seed, progress, conditions)
    return replay.run()


def _in_order(period: Period, lives: Iterable[Life]) -> list[Life]:
    by_id = {life.id: life for life in lives}
    return [by_id[each.asked.id] for each in period.requests]


def _traced(each: Happened, worker: str | None = None, *, in_session: bool = False) -> Traced:
    asked = each.asked
    hints = Hints(
        decode_worker_id=worker,
        session_control=asked.hints.session_control if in_session else None,
        expected_output_tokens=asked.hints.expected_output_tokens,
    )
    stop = StopConditions(max_tokens=asked.max_tokens)
    names = asked.block_names
    return Traced(
        Prompt.hashed(
            Request(id=asked.id, hints=hints, stop=stop), asked.prompt_tokens, names,
            asked.block_size,
        ),
        each.output_tokens,
        names.tolist(),
        tuple(prompt_keys(names, SECRET).tolist()),
    )  # fmt: skip


def _shape(config: EngineConfig, block_size: int) -> Shape:
    usual, pace = Shape(block_size, 1), pace_of(config)
    blocks = config.total_kv_blocks or 0
    return Shape(
        block_size,
        blocks * (config.kv_cache_block_size or block_size) // block_size or BLOCKS,
        config.max_num_batched_tokens or usual.max_batched_tokens,
        config.max_num_seqs or usual.max_sequences,
        pace.curves,
    )
