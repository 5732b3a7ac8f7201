"""The usage of the requests of one lane, from the records of its ledger alone. Pure.

Why the ledger: each request ends in it exactly once, by the rule of routers (`LaneState`), whatever
was killed, retried or refused, with a result or without; workers report there what their engines
have counted, and it is kept for 24 h, so that a collector may be down for so long. The counts of a
complete answer are those that its client got (`Finished.usage`). An answer that a router ended has
the tokens that its worker reports with the end of the run. Without such a report, as after a crash,
or if readers had the end before, or a router that died left no record of its decision, an answer
has the tokens that readers have, which `usage_writer.py` counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvlane.app.routing.state.active_load import ActiveLoad
from kvlane.app.routing.state.batch_runs import BatchRuns
from kvlane.app.routing.state.ledger import LaneState
from kvlane.app.routing.state.request_state import FinishedRequest, LedgerRecord, RunId, RunLoads
from kvlane.streams.record_base import Account
from kvlane.streams.records import (
    Assigned,
    Ended,
    Fencing,
    Finished,
    LogRecord,
    PrefillDone,
    RequestUsage,
    Started,
    Usage,
)

REPORT_WAIT_MS = 10_000
"""Time after the end of a request for the report of the worker that a router has stopped."""
_SWEEP_RECORDS = 10_000
_MOST = 2**40


class RunUsage(msgspec.Struct):
    """One run: `base_tokens` of the answer are of runs before it; None: unknown."""

    base_tokens: int | None = None
    prompt_tokens: int = 0
    has_begun: bool = False
    has_computed: bool = False
    """Whether its prompt was computed."""
    cached_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    output_tokens: int = 0
    code: str = ""
    """Code of its end; "" before."""
    usage: Usage | None = None


class LedgerEnd(NamedTuple):
    """The record that ended a request: its offset and append time; `code`: of the request."""

    offset: int
    at_ms: int
    code: str


class AnswerStart(NamedTuple):
    """A place in `responses` from which the shown tokens of an answer can be counted: the attempt
    there, and the tokens before."""

    attempt: int = 0
    base_tokens: int = 0
    responses_from: int = 0


class ShownAnswer(NamedTuple):
    """The part of an answer that readers have; `code`: of its end, "" without an end."""

    tokens: int
    code: str


class BilledRequest(msgspec.Struct):
    """The records of a request in the ledger, from `offset` on, appended at `since_ms`."""

    id: str
    offset: int
    since_ms: int
    account: Account = Account()
    attempt: int = 0
    answer_start: AnswerStart = AnswerStart()
    """The begin of the answer, or its last renewal."""
    runs: dict[RunId, RunUsage] = msgspec.field(default_factory=dict)
    final: RunUsage | None = None
    """The run that ended the request; None if a router did."""
    end: LedgerEnd | None = None

    def apply(self, record: LedgerRecord) -> None:
        if isinstance(record, Ended):
            self.account = record.account or self.account
            return
        self.attempt = max(self.attempt, record.attempt)
        if isinstance(record, Fencing):
            if record.responses_from:
                self.answer_start = AnswerStart(
                    record.attempt, record.base_tokens, record.responses_from
                )
            return
        run_id = RunId(record.attempt, record.phase, record.worker, record.epoch)
        run = self.runs.setdefault(run_id, RunUsage(None if record.attempt else 0))
        if isinstance(record, Assigned | Started) and not self.answer_start.responses_from:
            self.answer_start = AnswerStart(responses_from=record.responses_from)
        if isinstance(record, Assigned):
            self.account = record.account or self.account
            run.base_tokens, run.prompt_tokens = record.base_tokens, record.prompt_tokens
        elif isinstance(record, Started):
            run.has_begun = True
            self.account = record.account or self.account
            run.prompt_tokens = run.prompt_tokens or record.prompt_tokens
        elif isinstance(record, PrefillDone):
            run.has_begun = run.has_computed = True
            run.cached_tokens, run.prefill_ms = record.cached_tokens, record.prefill_ms
        elif not run.code:
            self._finish(record, run)

    def _finish(self, record: Finished, run: RunUsage) -> None:
        self.account = record.account or self.account
        run.code, run.usage, run.output_tokens = record.code, record.usage, record.output_tokens
        run.has_begun |= record.code not in ("worker_full", "expired")
        if record.output_tokens or record.code in ("stop", "length"):
            run.has_computed = True
            run.cached_tokens = max(run.cached_tokens, record.cached_tokens)
        run.decode_ms = record.itl_ms * max(0, record.output_tokens - 1)

    @property
    def last_run(self) -> tuple[RunId, RunUsage] | None:
        """The last run with a part of the answer, if any has begun."""
        begun = [(k, run) for k, run in self.runs.items() if k.phase != "prefill" and run.has_begun]
        return max(begun, key=lambda pair: pair[0].attempt, default=None)

    @property
    def awaits_report(self) -> bool:
        """Whether the worker that a router has stopped may report yet."""
        last = self.last_run
        if self.final is not None or last is None:
            return False
        return not last[1].code and last[0].attempt == self.attempt

    @property
    def counted_run(self) -> RunUsage | None:
        """The run with the end of the answer, or its last part; None without a part."""
        last = self.last_run
        return self.final or (None if last is None else last[1])

    @property
    def needs_count(self) -> bool:
        """Whether only `responses` has the number of tokens of the answer."""
        assert self.end is not None, "the request has not ended"
        run = self.counted_run
        if run is None:
            return False
        has_report = self.final is not None or run.code == "cancelled"
        is_known = has_report and (run.usage is not None or run.base_tokens is not None)
        return not is_known or self.end.code == "seen"

    def usage(self, shown: ShownAnswer | None = None) -> RequestUsage:
        """The usage, after the end. `shown`: counted from `answer_start` on if the usage needs the
        count; None if these records are no longer kept."""
        assert self.end is not None, "the request has not ended"
        unknown: tuple[str, ...] = ()
        run = self.counted_run
        counts = None if run is None else run.usage
        if run is None:
            output = max((each.base_tokens or 0 for each in self.runs.values()), default=0)
        elif not self.needs_count:
            output = (run.base_tokens or 0) + run.output_tokens
        else:
            output, counts = (run.base_tokens or 0) if shown is None else shown.tokens, None
            unknown = ("output_tokens",) if shown is None else ()
        computed = [(k, each) for k, each in self.runs.items() if each.has_computed]
        prompt = max((each.prompt_tokens for _, each in computed), default=0)
        cached = min(computed[0][1].cached_tokens, prompt) if computed else 0
        reasoning = 0
        if counts is not None:
            unknown, reasoning = counts.unknown, counts.reasoning_tokens
            prompt = prompt if "prompt_tokens" in unknown else counts.prompt_tokens
            cached = counts.cached_tokens
            output = output if "completion_tokens" in unknown else counts.completion_tokens
        account, code = self.account, self.end.code
        if code == "seen":  # the router has found the end that its readers have
            code = "lost" if shown is None else shown.code
        return RequestUsage(
            id=self.id, code=code, ended_ms=self.end.at_ms,
            tenant=account.tenant, key_id=account.key_id, model=account.model, alias=account.alias,
            adapter=account.adapter, service_class=account.service_class,
            prompt_tokens=_bounded(prompt), cached_tokens=_bounded(cached),
            output_tokens=_bounded(output), reasoning_tokens=_bounded(reasoning),
            recomputed_tokens=_bounded(_recomputed_tokens(computed)),
            attempts=len({k.attempt for k, each in self.runs.items() if each.has_begun}),
            prefill_ms=_bounded(sum(e.prefill_ms for k, e in computed if k.phase != "decode")),
            decode_ms=_bounded(sum(each.decode_ms for each in self.runs.values())),
            workers=tuple(dict.fromkeys(k.worker for k, e in self.runs.items() if e.has_begun)),
            unknown=unknown,
        )  # fmt: skip


def _bounded(value: float) -> int:
    """A sum of what records say, which may be negative, infinite or no number."""
    return round(min(max(0, value), _MOST))


def _recomputed_tokens(computed: Sequence[tuple[RunId, RunUsage]]) -> int:
    """Tokens of the prompt, and of the answer so far, that runs after the first have computed."""
    again = [run for run_id, run in computed[1:] if run_id.phase != "decode"]
    return sum(
        max(0, run.prompt_tokens + (run.base_tokens or 0) - run.cached_tokens) for run in again
    )


class LaneUsage:
    """The requests of a lane whose usage is not written, and the ids of those whose usage is."""

    def __init__(self, window_ms: int) -> None:
        """`window_ms`: for how long ids of ended requests are known, by the ledger's time."""
        self.ended: dict[int, BilledRequest] = {}
        """Requests that have ended, by their first offsets, in the order of their ends."""
        self._lane = LaneState(window_ms)
        self._loads = RunLoads(ActiveLoad(), BatchRuns())
        self._histories: dict[int, BilledRequest] = {}
        """By their first offsets, in that order; those in `ended` too."""
        self._latest: dict[str, BilledRequest] = {}
        """By id; one that is used again after its window has several histories."""
        self._records = 0

    def first_besides(self, written: Collection[int]) -> BilledRequest | None:
        """Of all requests but those with these first offsets the one with the lowest."""
        left = (each for offset, each in self._histories.items() if offset not in written)
        return next(left, None)

    def add_written(self, written: Mapping[str, int]) -> None:
        """The usage of these ids is in the log: the times of their ends. Before any record."""
        for request_id, at_ms in written.items():
            self._lane.finish(request_id, FinishedRequest("", 0, at_ms))

    def apply(self, log_record: LogRecord) -> None:
        """Apply the next record of the ledger."""
        record = log_record.record
        if not isinstance(record, LedgerRecord):
            return
        finished, history = self._lane.finished, self._latest.get(record.id)
        if history is not None and history.end is not None and isinstance(record, Finished):
            history.apply(record)
            return
        if record.id in finished:
            return
        if history is None or history.end is not None:
            history = BilledRequest(record.id, log_record.offset, log_record.timestamp_ms)
            self._histories[history.offset] = self._latest[record.id] = history
        history.apply(record)
        self._lane.apply(log_record, self._loads)
        if (outcome := finished.get(record.id)) is not None:
            self._end(history, log_record, outcome)
        self._records += 1
        if self._records % _SWEEP_RECORDS == 0:
            self._sweep()

    def _end(self, history: BilledRequest, log_record: LogRecord, outcome: FinishedRequest) -> None:
        if outcome.code == "seen" and not history.runs:  # a repetition of a request that has ended
            self._forget(history)
            return
        if not isinstance(log_record.record, Ended):
            finals = (
                run
                for run_id, run in history.runs.items()
                if run_id.phase != "prefill" and run.code == outcome.code
                and run_id.attempt == outcome.attempt
            )  # fmt: skip
            history.final = next(finals, None)
        history.end = LedgerEnd(log_record.offset, log_record.timestamp_ms, outcome.code)
        self.ended[history.offset] = history

    def ready(self, now_ms: int) -> Iterator[BilledRequest]:
        """Requests that have ended, and whose workers have reported or will not; one of each id.
        `now_ms`: broker time."""
        ids = set[str]()
        for history in self.ended.values():
            assert history.end is not None, "it has ended"
            is_ready = not history.awaits_report or now_ms > history.end.at_ms + REPORT_WAIT_MS
            if is_ready and history.id not in ids:
                ids.add(history.id)
                yield history

    def finish(self, written: Sequence[BilledRequest]) -> None:
        """The usage of these is in the log."""
        for history in written:
            del self.ended[history.offset]
            self._forget(history)

    def _forget(self, history: BilledRequest) -> None:
        del self._histories[history.offset]
        if self._latest.get(history.id) is history:
            del self._latest[history.id]

    def _sweep(self) -> None:
        """Drop records of requests that the ledger does not know any more."""
        for history in list(self._histories.values()):
            if history.end is None and history.id not in self._lane.requests:
                self._forget(history)
