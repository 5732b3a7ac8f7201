"""How fast places are, learned from the ledger.

A prior is on a worker's card (`EngineConfig.curve`), else it is the published curve. What a worker
really takes is measured by the first tokens of runs that found nothing before them, and becomes one
factor on its curve. A median of few ratios: no single wait, however long, changes it much.

Who was not measured has no factor, and is taken to be like the fastest of its kind (`board.py`), so
that it gets requests, and is measured. By its curve alone it would get none where others have
turned out to be faster than theirs. (On the conversation trace, 8 workers twice as fast as the
published curve, three were left out, and the mean TTFT was 1.087 times what it is with true curves
on cards; it is 1.00 times now: `kvlane bench simulate --full`.) For the same reason who was passed
over for long, perhaps because it was slow once, loses its factor.

Owns the figures. What follows from them is `predictive.py`'s. Reads no clock: times are in records.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from typing import NamedTuple, TypeVar

from app.engine.curves import Curves, curves_of
from app.routing.changes import Noted
from streams.records import (
    Assigned,
    Candidate,
    EngineConfig,
    Fact,
    Finished,
    PrefillDone,
    RunKey,
)

CHUNK_TOKENS = 8192
"""Prompt tokens of a step, of engines that do not say."""
OUTPUT_TOKENS = 200.0
"""Length of an answer before one was seen, which counts as `OUTPUT_WEIGHT` of them."""
OUTPUT_WEIGHT = 50
OUTPUT_MEMORY = 2000
"""Answers that the mean length is about: of a fleet that answers 20 a second, the last minutes."""
RATIOS, MEASURED = 32, 5
"""Runs that a factor is the median of, at most and at least."""
PASSED_OVER = 100
"""How often a worker is passed over in a row, for each candidate that there was, before it is tried
again: so MEASURED of PASSED_OVER requests at most are trials."""
SHARE_MEMORY = 500
"""Requests that the share of prompts in caches is about, and the tokens without any that it begins
with: nothing is known of what is to come."""
FIRST_TOKENS = 100_000.0
MOST_LED_TO = 10.0
"""A share beyond 0.9 says that little is new, not that the same goes on for ever."""
REMEMBERED = 10_000
"""Workers, and runs without a first token yet, that are remembered; the oldest are forgotten."""

PUBLISHED = Curves()


class Pace(NamedTuple):
    """How fast a place is. `slowness`: how many times slower than its curves it has been.

    `chunk_tokens`: prompt tokens that a step takes at most. `capacity_tokens`: what its cache
    holds, 0 if that is not known.
    """

    curves: Curves = PUBLISHED
    slowness: float = 1.0
    chunk_tokens: int = CHUNK_TOKENS
    capacity_tokens: int = 0

    def prefill_ms(self, tokens: float, decode_ms: float = 0.0) -> float:
        """Time for prompt tokens in as many steps as they need, each with a step of decode."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        time_ms = whole * (self.slowness * self.curves.prefill_ms(self.chunk_tokens) + decode_ms)
        if rest:
            time_ms += self.slowness * self.curves.prefill_ms(rest) + decode_ms
        return time_ms

    def decode_ms(self, tokens: float) -> float:
        """Time of a step with so many tokens in the cache."""
        usage = tokens / self.capacity_tokens if self.capacity_tokens else 0.0
        return self.slowness * self.curves.decode_ms(usage)


@lru_cache(maxsize=1024)
def _believed(numbers: tuple[float, ...]) -> Curves:
    """The curves that somebody tells, equal ones as one object; the published ones for nonsense."""
    curves = curves_of(numbers) if numbers else None
    return PUBLISHED if curves is None or curves == PUBLISHED else curves


def pace_of(config: EngineConfig) -> Pace:
    """The pace of an engine by its card."""
    blocks, size = config.total_kv_blocks or 0, config.kv_cache_block_size or 0
    return Pace(
        _believed(config.curve or ()),
        1.0,
        max(config.max_num_batched_tokens or CHUNK_TOKENS, 1),
        max(blocks * size, 0),
    )


def pace_told(candidate: Candidate) -> Pace:
    """The pace that a decision records of a place."""
    return Pace(
        _believed(candidate.curve), candidate.slowness, candidate.chunk_tokens or CHUNK_TOKENS,
        candidate.capacity_tokens,
    )  # fmt: skip


class Slowness:
    """A factor learned from ratios of measured to expected times: the median of the last ones.

    The upper median of an even number: who errs, errs on the slow side, which costs less. `value`
    is None until there are enough; `passed_over`: how often in a row its worker was.
    """

    def __init__(self) -> None:
        self._ratios = deque[float](maxlen=RATIOS)
        self.value: float | None = None
        self.passed_over = 0

    def observe(self, ratio: float) -> None:
        """One more run; a ratio that is not a positive number says nothing."""
        if math.isfinite(ratio) and ratio > 0:
            self._ratios.append(ratio)
            if len(self._ratios) >= MEASURED:
                self.value = sorted(self._ratios)[len(self._ratios) // 2]


class _Begun(NamedTuple):
    """A run that found no prefill before it: its length, its place, and a step of decode there."""

    worker: str
    tokens: int
    pace: Pace
    decode_ms: float


class Paces:
    """What the ledger has told about times so far.

    `slowness`: of those workers that were measured, over all their lives: one that starts again has
    the same hardware. `output_tokens`: mean length of an answer. `leads_to`: how many requests one
    comes to, itself included, since others go on where its prompt ends: with a share s of all
    prompt tokens in some cache, 1 + s + s² + ... = 1 / (1 - s), up to `MOST_LED_TO`.
    """

    def __init__(self) -> None:
        self.slowness = Noted()
        self.output_tokens = OUTPUT_TOKENS
        self.leads_to = 1.0
        self._prompt_tokens = FIRST_TOKENS
        self._held_tokens = 0.0
        self._answers = OUTPUT_WEIGHT
        self._learned: dict[str, Slowness] = {}
        self._begun: dict[RunKey, _Begun] = {}

    def told(self, fact: Fact) -> None:
        """A record of the ledger; others change nothing."""
        record = fact.record
        if isinstance(record, Assigned):
            self._share(record)
            self._begin(record)
        elif isinstance(record, PrefillDone):
            self._measure(record)
        elif isinstance(record, Finished):
            self._begun.pop(RunKey(record.id, record.attempt, record.phase), None)
            # Embeddings have no length, and answers without a token say nothing of the others'.
            if record.code in ("stop", "length") and record.output_tokens:
                self._answers = min(self._answers + 1, OUTPUT_MEMORY)
                self.output_tokens += (record.output_tokens - self.output_tokens) / self._answers

    def _share(self, decision: Assigned) -> None:
        held = decision.params.get("most_held_tokens")
        if held is None:
            return
        kept = 1 - 1 / SHARE_MEMORY
        self._held_tokens = self._held_tokens * kept + held
        self._prompt_tokens = self._prompt_tokens * kept + decision.prompt_tokens
        missing = 1 - self._held_tokens / self._prompt_tokens
        self.leads_to = min(1 / missing, MOST_LED_TO) if missing > 0 else MOST_LED_TO

    def _begin(self, decision: Assigned) -> None:
        if decision.policy != "predictive":
            return
        self._pass_over(decision)
        place = (decision.worker, decision.epoch, decision.rank)
        for each in decision.candidates:
            if (each.worker, each.epoch, each.rank) == place:
                break
        else:
            return
        if each.prefill_runs:
            return
        pace = pace_told(each)._replace(slowness=1.0)  # what is measured must not say so itself
        tokens = each.prompt_tokens + each.open_runs * self.output_tokens / 2
        self._begun[RunKey(decision.id, decision.attempt, decision.phase)] = _Begun(
            decision.worker,
            decision.prompt_tokens + decision.base_tokens,
            pace,
            pace.decode_ms(tokens) if each.open_runs else 0.0,
        )
        _bound(self._begun)

    def _pass_over(self, decision: Assigned) -> None:
        """Forget the pace of a candidate that nobody has gone to for long."""
        most = PASSED_OVER * len(decision.candidates)
        for each in decision.candidates:
            learned = self._learned.get(each.worker)
            if learned is None:
                continue
            learned.passed_over = 0 if each.worker == decision.worker else learned.passed_over + 1
            if learned.passed_over > most:
                del self._learned[each.worker]
                self.slowness.forget(each.worker)

    def _measure(self, done: PrefillDone) -> None:
        begun = self._begun.pop(RunKey(done.id, done.attempt, done.phase), None)
        if begun is None or begun.worker != done.worker:
            return
        tokens = max(begun.tokens - done.cached_tokens, 1)
        expected_ms = begun.pace.prefill_ms(tokens, begun.decode_ms) + begun.decode_ms / 2
        if expected_ms > 0:
            if (learned := self._learned.get(done.worker)) is None:
                learned = self._learned[done.worker] = Slowness()
            learned.observe(done.prefill_ms / expected_ms)
            if learned.value is not None:
                self.slowness[done.worker] = learned.value
            _bound(self._learned)
            _bound(self.slowness)


K = TypeVar("K")
V = TypeVar("V")


def _bound(remembered: dict[K, V]) -> None:
    while len(remembered) > REMEMBERED:
        del remembered[next(iter(remembered))]
