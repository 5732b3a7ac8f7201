"""Performance model: the speed of workers, learned from the ledger.

The prior is the curve on a worker's card (`EngineConfig.curve`), else the published curve. The
workers of a kind get a factor on it, and where their runs show another shape, curves of their own
(`step_model.py`). They are fitted to the last runs in order of time, whichever lane they are read
from first, so routers that have read the same records have the same ones. A fit takes milliseconds,
so records only mark curves as stale: they are fitted before a decision (`refresh`), once a second.

An unmeasured worker is assumed to be as fast as the fastest worker of its kind
(`candidate_table.py`), so that it receives traffic and gets measured: by its curve alone it would
get none where others have turned out to be faster than theirs. For the same reason a worker that
was skipped for long loses its factor.

Owns the estimates; `predictive.py` uses them. Reads no clock: times are in records.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvlane.app.perf_curves import PerfCurves, curves_from
from kvlane.app.routing.policy_names import has_forecast
from kvlane.app.routing.state.change_log import TrackedDict
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.step_model import Answer, FirstToken, WorkerRuns, fit_steps
from kvlane.streams.records import (
    Assigned,
    Candidate,
    EngineConfig,
    Finished,
    LogRecord,
    PrefillDone,
    RunKey,
)

DEFAULT_CHUNK_TOKENS = 8192
"""Prompt tokens of a step, for engines that report none."""
DEFAULT_OUTPUT_TOKENS = 200.0
"""Length of an answer before one was seen, which counts as `OUTPUT_WEIGHT` of them."""
OUTPUT_WEIGHT = 50
OUTPUT_WINDOW = 2000
"""Answers over which the mean length is taken: a few minutes for a fleet with 20 a second."""
PREFILL_WINDOW = 200
"""Runs over which the mean prefill is taken."""
MAX_TRANSFERS, MIN_TRANSFERS = 32, 5
"""Most and fewest transfers of which the time of one is the median."""
EXPLORATION_INTERVAL = 100
"""Decisions in a row without a worker, per candidate, before its runs are forgotten, so that it is
tried again."""
CACHED_SHARE_WINDOW = 500
"""Requests that the share of prompts in caches is about, and the tokens without any that it begins
with: the later requests are unknown."""
INITIAL_PROMPT_TOKENS = 100_000.0
MAX_FOLLOWUPS = 10.0
"""A cached share beyond 0.9 means that little is new, not that prompts repeat for ever."""
SHARE_DECAY_MS = 2000.0
"""Time over which the share of prefill is taken: about the length of an answer."""
MAX_SHARE = 0.95
USUAL_LOAD_MS = 15_000.0
"""Time over which the usual load of a place is taken: some turns of an agent."""
RECENT_MS, MIN_RECENT_MS = 60_000.0, 5_000.0
"""Time over which the offered load of prefill is taken, and the shortest one at the beginning: it
decides on whole workers, which take seconds to change their work."""
SHORTEST_RUN_MS, LONGEST_RUN_MS = 0.001, 3.6e6
RUN_WINDOW, RUN_WINDOW_OF_KIND, MIN_RUN_WINDOW = 128, 1024, 16
"""Runs of a worker, and of all workers of a kind, from which curves are fitted."""
FIT_INTERVAL_MS, LATE_MS = 1000, 1000
"""How often curves are fitted, by the time of the ledger, or by the clock for records that are read
late: by how much later than others in the ledger."""
MAX_REMEMBERED = 10_000
"""Bound on workers, and on runs without a first token; the oldest are dropped."""

NO_SUM = 0.0, 0
PUBLISHED_CURVES = PerfCurves()


class EngineProfile(NamedTuple):
    """The speed of a place. `slowdown`: the measured factor on its curves. `chunk_tokens`: most
    prompt tokens of a step. `capacity_tokens`: size of its cache, 0 if not known."""

    curves: PerfCurves = PUBLISHED_CURVES
    slowdown: float = 1.0
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    capacity_tokens: int = 0

    def prefill_ms(self, tokens: float, decode_ms: float = 0.0) -> float:
        """Time for prompt tokens in as many steps as they need, each with a step of decode."""
        whole, rest = divmod(tokens, self.chunk_tokens)
        time_ms = whole * (self.slowdown * self.curves.prefill_ms(self.chunk_tokens) + decode_ms)
        if rest:
            time_ms += self.slowdown * self.curves.prefill_ms(rest) + decode_ms
        return time_ms

    def decode_ms(self, tokens: float) -> float:
        """Time of a step with so many tokens in the cache."""
        usage = tokens / self.capacity_tokens if self.capacity_tokens else 0.0
        return self.slowdown * self.curves.decode_ms(usage)


@lru_cache(maxsize=1024)
def _believed(numbers: tuple[float, ...]) -> PerfCurves:
    """The curves of a card or record, equal ones as one object; the published ones if invalid."""
    curves = curves_from(numbers) if numbers else None
    return PUBLISHED_CURVES if curves is None or curves == PUBLISHED_CURVES else curves


def profile_from_card(config: EngineConfig) -> EngineProfile:
    """The pace of an engine by its card."""
    blocks, size = config.total_kv_blocks or 0, config.kv_cache_block_size or 0
    return EngineProfile(
        _believed(config.curve or ()),
        1.0,
        max(config.max_num_batched_tokens or DEFAULT_CHUNK_TOKENS, 1),
        max(blocks * size, 0),
    )


def recorded_profile(candidate: Candidate) -> EngineProfile:
    """The speed of a place, as a decision records it."""
    return EngineProfile(
        _believed(candidate.curve),
        candidate.slowness,
        candidate.chunk_tokens or DEFAULT_CHUNK_TOKENS,
        candidate.capacity_tokens,
    )


K = TypeVar("K", str, WorkerRank)


class FadingSums(Generic[K]):
    """Sums by worker or place whose parts fade with `decay_ms`."""

    def __init__(self, decay_ms: float) -> None:
        self._decay_ms = decay_ms
        self._last: OrderedDict[K, tuple[float, int]] = OrderedDict()

    def add(self, key: K, amount: float, at_ms: int) -> None:
        """Add to a sum; beyond `MAX_REMEMBERED` of them the oldest is dropped."""
        self._last[key] = (self.sum(key, at_ms) + amount, at_ms)
        self._last.move_to_end(key)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def last(self, key: K) -> tuple[float, int]:
        """A sum as it was when its last part came, and that time; 0 for an unknown one."""
        return self._last.get(key, NO_SUM)

    def sum(self, key: K, now_ms: int) -> float:
        """A sum now."""
        value, at_ms = self.last(key)
        return value * math.exp(-max(now_ms - at_ms, 0) / self._decay_ms)


class PrefillShares:
    """The part of its time that each worker lately spends on prefill: decode is slower there. A
    prefill counts with its expected time when it is assigned, and fades with `SHARE_DECAY_MS`."""

    def __init__(self) -> None:
        self._sums = FadingSums[str](SHARE_DECAY_MS)

    def add(self, worker: str, prefill_ms: float, at_ms: int) -> None:
        """Count a prefill on a worker."""
        self._sums.add(worker, prefill_ms / SHARE_DECAY_MS, at_ms)

    def share(self, worker: str, now_ms: int) -> float:
        """The share of a worker now, from 0 to `MAX_SHARE`."""
        return min(self._sums.sum(worker, now_ms), MAX_SHARE)


class RecentPrefill:
    """The offered load of prefill by worker: the mean number of interactive prompts in computation.
    A prefill counts with its expected time when it is assigned, and fades with `RECENT_MS`. Before
    that has passed once, the load is that of the time since the first prefill."""

    def __init__(self) -> None:
        self._first_ms: int | None = None
        self._sums = FadingSums[str](RECENT_MS)

    def add(self, worker: str, prefill_ms: float, at_ms: int) -> None:
        """Count a prefill on a worker."""
        if self._first_ms is None:
            self._first_ms = at_ms
        self._sums.add(worker, prefill_ms, at_ms)

    def load(self, worker: str, now_ms: int) -> float:
        """The load of a worker: 1 is as much as it computes."""
        if self._first_ms is None:
            return 0.0
        since_ms = max(now_ms - self._first_ms, MIN_RECENT_MS)
        seen_ms = RECENT_MS * (1.0 - math.exp(-since_ms / RECENT_MS))
        return self._sums.sum(worker, now_ms) / seen_ms


class _Begun(msgspec.Struct, frozen=True, gc=False):
    """A run without a first token: its length and its worker; of a decode the steps until its first
    token. `context`: tokens in the cache there, 0 if nothing was decoded.
    `found_none`: no other prompt was before it.
    """

    worker: str
    tokens: int
    steps_ms: float
    context: float
    found_none: bool


class WorkerKind(NamedTuple):
    """Workers that share learned curves: they serve one model, and their cards are alike."""

    model: str
    profile: EngineProfile


class _Runs(NamedTuple):
    """The last runs of a worker, in order of time, whichever lane they were read from first."""

    first_tokens: list[FirstToken]
    answers: list[Answer]

    def before(self, at_ms: int, size: int) -> WorkerRuns:
        """The last `size` of each before a time."""
        first = bisect_left(self.first_tokens, (at_ms,))
        answer = bisect_left(self.answers, (at_ms,))
        return WorkerRuns(
            self.first_tokens[max(first - size, 0) : first],
            self.answers[max(answer - size, 0) : answer],
        )


class _Learned(msgspec.Struct):
    """The workers of a kind. `until`: the time up to which runs count, `fitted`: in its curves, in
    intervals of the ledger; `fitted_ms`: when they were fitted.
    """

    workers: list[str]
    until: int = 0
    fitted: int = 0
    fitted_ms: int = 0
    is_stale: bool = False

    def is_due(self, now_ms: int) -> bool:
        """Whether to fit now: at once if the ledger has come to the present's interval."""
        if not self.is_stale:
            return False
        is_present = now_ms < (self.until + 1) * FIT_INTERVAL_MS + 2 * LATE_MS
        waited_ms = now_ms - self.fitted_ms
        return (self.until > self.fitted and is_present) or not 0 <= waited_ms < FIT_INTERVAL_MS


class PerformanceModel:
    """The estimates from the ledger.

    `slowdown`: of measured workers, over all their epochs, which have the same hardware.
    `mean_output_tokens`: mean length of an answer. `mean_prefill_ms`: mean prefill of an
    interactive run at its worker, without its wait. `expected_followups`: requests that one leads
    to, itself included: with a share s of all prompt tokens in some cache, 1 + s + s² + ... = 1 /
    (1 - s), up to `MAX_FOLLOWUPS`. `prefill_shares`: with each prefill alone, `step_shares`: with
    prompts that join a step in that. `recent_prefill`: the offered load of prefill. `usual_load`:
    tokens in the cache of a place in the mean of `USUAL_LOAD_MS`: sessions come back to it.
    `transfer_token_ms`: time that the transfer of a KV cache takes per prompt token, None until it
    is measured.
    """

    def __init__(self) -> None:
        self.slowdown = TrackedDict()
        self.mean_output_tokens = DEFAULT_OUTPUT_TOKENS
        self.mean_prefill_ms = 0.0
        self._prefills = 0
        """Runs of which that is the mean, up to the window."""
        self.expected_followups = 1.0
        self.prefill_shares, self.step_shares = PrefillShares(), PrefillShares()
        self.recent_prefill = RecentPrefill()
        self.usual_load = FadingSums[WorkerRank](USUAL_LOAD_MS)
        self._transfers = deque[float](maxlen=MAX_TRANSFERS)
        self._prefilled: OrderedDict[tuple[str, int], bool] = OrderedDict()
        """Ids and attempts whose prompts are computed and not yet decoded."""
        self._prompt_tokens = INITIAL_PROMPT_TOKENS
        self._held_tokens = 0.0
        self._answers = OUTPUT_WEIGHT
        self._skipped = Counter[str]()
        """By worker with runs, the decisions in a row without it."""
        self._begun: OrderedDict[RunKey, _Begun] = OrderedDict()
        self._answering: OrderedDict[RunKey, int] = OrderedDict()
        """Times of the first tokens of runs that are not over."""
        self._runs: OrderedDict[str, _Runs] = OrderedDict()
        self._kind_of: Mapping[str, WorkerKind] = {}
        self._kinds: dict[WorkerKind, _Learned] = {}
        self.curves: dict[str, PerfCurves] = {}
        """By worker, the curves of its kind that factors from the ledger are on."""

    def set_kinds(self, kind_of: Mapping[str, WorkerKind]) -> None:
        """Set the kind of each worker of the fleet."""
        if kind_of == self._kind_of:
            return
        before, self._kind_of, self._kinds = self._kinds, kind_of, {}
        for worker, kind in sorted(kind_of.items()):
            if (learned := self._kinds.get(kind)) is None:
                learned = self._kinds[kind] = before.get(kind, _Learned([]))
                learned.workers, learned.is_stale = [], True
            learned.workers.append(worker)
        for worker in [*self.curves]:
            if worker not in kind_of:
                self._forget_curves(worker)

    def refresh(self, now_ms: int) -> None:
        """Fit stale curves, before a decision reads them."""
        for kind, learned in self._kinds.items():
            if learned.is_due(now_ms):
                self._fit(kind.profile, learned)
                learned.fitted, learned.fitted_ms, learned.is_stale = learned.until, now_ms, False

    def on_record(self, log_record: LogRecord) -> None:
        """A record of the ledger was applied; other records change nothing."""
        record = log_record.record
        if type(record) is Assigned:
            chosen = record.chosen
            pace = EngineProfile() if chosen is None else recorded_profile(chosen)
            if record.phase != "decode":  # whose prompt comes from a prefill worker
                prefill_ms = pace.prefill_ms(record.prefill_tokens)
                self._count_prefill(record, prefill_ms, log_record.timestamp_ms)
                if chosen is not None and has_forecast(record.policy):
                    self.prefill_shares.add(record.worker, prefill_ms, log_record.timestamp_ms)
                    step_ms = prefill_ms
                    if chosen.joining_runs:  # whose step it shares
                        step_ms -= min(pace.slowdown * pace.curves.prefill[2], prefill_ms)
                    self.step_shares.add(record.worker, step_ms, log_record.timestamp_ms)
                    self._add_usual_load(record, log_record.timestamp_ms)
                self._share(record)
                self._begin(record, chosen, pace)
            elif self._prefilled.pop((record.id, record.attempt), False):  # else it waits for that
                self._begin(record, chosen, pace)
        elif type(record) is PrefillDone:
            if record.phase == "prefill":
                self._prefilled[record.id, record.attempt] = True
                while len(self._prefilled) > MAX_REMEMBERED:
                    self._prefilled.popitem(last=False)
            self._measure(record, log_record)
        elif type(record) is Finished:
            self._end(record, log_record)

    @property
    def transfer_token_ms(self) -> float | None:
        if len(self._transfers) < MIN_TRANSFERS:
            return None
        return sorted(self._transfers)[len(self._transfers) // 2]

    def _count_prefill(self, decision: Assigned, prefill_ms: float, at_ms: int) -> None:
        if decision.service_class == "batch":
            return
        self.recent_prefill.add(decision.worker, prefill_ms, at_ms)
        self._prefills = min(self._prefills + 1, PREFILL_WINDOW)
        self.mean_prefill_ms += (prefill_ms - self.mean_prefill_ms) / self._prefills

    def _add_usual_load(self, decision: Assigned, at_ms: int) -> None:
        """Count the prompt of a whole interactive run for as long as the run is expected to take,
        but at most once: the length of an answer may be the client's."""
        output_tokens = decision.params.get("output_tokens", 0.0)
        expected_ms = decision.ttft_ms_predicted + output_tokens * decision.itl_ms_predicted
        is_whole = decision.phase == "aggregated" and decision.service_class != "batch"
        if is_whole and expected_ms > 0:
            tokens = decision.prompt_tokens + decision.base_tokens
            place = WorkerRank(decision.worker, decision.epoch, decision.rank)
            self.usual_load.add(place, tokens * min(expected_ms / USUAL_LOAD_MS, 1.0), at_ms)

    def _share(self, decision: Assigned) -> None:
        held = decision.params.get("most_held_tokens")
        if held is None:
            return
        kept = 1 - 1 / CACHED_SHARE_WINDOW
        self._held_tokens = self._held_tokens * kept + held
        self._prompt_tokens = self._prompt_tokens * kept + decision.prompt_tokens
        missing = 1 - self._held_tokens / self._prompt_tokens
        self.expected_followups = min(1 / missing, MAX_FOLLOWUPS) if missing > 0 else MAX_FOLLOWUPS

    def _begin(self, decision: Assigned, chosen: Candidate | None, profile: EngineProfile) -> None:
        if not has_forecast(decision.policy):
            return
        is_decode = decision.phase == "decode"
        if not is_decode:
            self._pass_over(decision)
        if chosen is None or (is_decode and chosen.prefill_runs):
            return
        tokens = chosen.prompt_tokens + chosen.open_runs * self.mean_output_tokens / 2
        steps_ms = 0.0
        if is_decode:  # the rest of the step under way, and the first one of its own
            steps_ms = profile.decode_ms(tokens) / 2 if chosen.open_runs else 0.0
            steps_ms += profile.decode_ms(tokens + decision.prompt_tokens)
        is_decoding = chosen.open_runs > chosen.prefill_runs
        self._begun[decision.run_key] = _Begun(
            decision.worker, decision.prompt_tokens + decision.base_tokens, steps_ms,
            tokens if is_decoding else 0.0, not chosen.prefill_runs,
        )  # fmt: skip
        while len(self._begun) > MAX_REMEMBERED:
            self._begun.popitem(last=False)

    def _pass_over(self, decision: Assigned) -> None:
        """Drop the factor of a candidate that has got no request for long."""
        workers = decision.candidate_workers
        most = EXPLORATION_INTERVAL * len(workers)
        for worker in workers:
            if worker == decision.worker:
                self._skipped.pop(worker, None)
            elif worker in self._runs:
                self._skipped[worker] += 1
                if self._skipped[worker] > most:
                    del self._skipped[worker], self._runs[worker]
                    self.slowdown.discard(worker)

    def _measure(self, done: PrefillDone, log_record: LogRecord) -> None:
        begun = self._begun.pop(done.run_key, None)
        if begun is None or begun.worker != done.worker:
            return
        if done.phase == "decode":
            took_ms = max(done.prefill_ms - begun.steps_ms, 0.0)
            self._transfers.append(took_ms / max(begun.tokens, 1))
            return
        tokens = max(begun.tokens - done.cached_tokens, 1)
        self._answering[done.run_key] = log_record.timestamp_ms
        while len(self._answering) > MAX_REMEMBERED:
            self._answering.popitem(last=False)
        self._add_run(done.worker, FirstToken(
            log_record.timestamp_ms, log_record.offset, done.prefill_ms, tokens, begun.context,
            begun.tokens, begun.found_none
        ))  # fmt: skip

    # --- curves of kinds -------------------------------------------------------------------------

    def _end(self, end: Finished, log_record: LogRecord) -> None:
        self._begun.pop(end.run_key, None)
        since_ms = self._answering.pop(end.run_key, None)
        if since_ms is not None and end.output_tokens > 1 and end.itl_ms > 0:
            steps = end.output_tokens - 1
            took_ms = steps * end.itl_ms
            answer = Answer(log_record.timestamp_ms, log_record.offset, since_ms, took_ms, steps)
            self._add_run(end.worker, answer)
        # Embeddings have no length, and answers without a token are no measure of it.
        if end.code in ("stop", "length") and end.output_tokens:
            self._answers = min(self._answers + 1, OUTPUT_WINDOW)
            self.mean_output_tokens += (end.output_tokens - self.mean_output_tokens) / self._answers

    def _add_run(self, worker: str, run: FirstToken | Answer) -> None:
        if not SHORTEST_RUN_MS <= run.took_ms <= LONGEST_RUN_MS:
            return
        if (runs := self._runs.get(worker)) is None:
            runs = self._runs[worker] = _Runs([], [])
            if len(self._runs) > MAX_REMEMBERED:
                self._skipped.pop(self._runs.popitem(last=False)[0], None)
        kept: list[Any] = runs.first_tokens if isinstance(run, FirstToken) else runs.answers
        insort(kept, run)
        del kept[: -2 * RUN_WINDOW]
        kind = self._kind_of.get(worker)
        if kind is not None:
            learned, until = self._kinds[kind], (run.at_ms - LATE_MS) // FIT_INTERVAL_MS
            is_late = run.at_ms < learned.until * FIT_INTERVAL_MS
            if until > learned.until or is_late:
                learned.until, learned.is_stale = max(until, learned.until), True

    def _fit(self, profile: EngineProfile, learned: _Learned) -> None:
        """Fit the curves of a kind again, by the runs up to its time."""
        size = max(RUN_WINDOW_OF_KIND // len(learned.workers), MIN_RUN_WINDOW)
        size = min(size, RUN_WINDOW)
        known = {
            worker: runs.before(learned.until * FIT_INTERVAL_MS, size)
            for worker in learned.workers
            if (runs := self._runs.get(worker)) is not None
        }
        fit = fit_steps(known, profile.curves, profile.chunk_tokens, profile.capacity_tokens)
        for worker in learned.workers:
            if fit is None:
                self._forget_curves(worker)
                continue
            if self.curves.get(worker) != fit.curves:
                self.curves[worker] = fit.curves
                self.slowdown.changes.record(worker)  # which tables read together with it
            if worker in fit.factors:
                self.slowdown[worker] = fit.factors[worker]
            else:
                self.slowdown.discard(worker)

    def _forget_curves(self, worker: str) -> None:
        """Let a worker have the curves of its card again."""
        if self.curves.pop(worker, None) is None:
            return
        self.slowdown.changes.record(worker)
        self.slowdown.discard(worker)
