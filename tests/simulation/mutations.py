"""Mutations for mutation testing: each disables one rule of the real code while it is applied.

A simulation that passes without a rule does not check it. So every rule of the delivery guarantees
has a mutation here, and the tests require that the simulation detects it: alone, or together with
the rule that masks its loss, which is named with the reason.

A mutation replaces attributes of real modules and classes; the product has no code for it.

    python -m tests.simulation.mutations NAME[+NAME] SEED     the history of a seed without rules
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec

from app import worker
from app.http.openai import active_streams, stream_resume
from app.lanes import admission, dispatch, handovers, owner, shared_reads, termination
from app.prompts import prompt_credit, prompt_source
from app.results import lane_collector, pending_result
from app.routing import reconcile
from app.routing.selection import eligibility
from app.routing.selection.decision import Rejection
from app.routing.state import ledger, request_state, request_transitions
from app.serving import chunk_writer, registration, run_executor, run_queue
from app.testing.seed_simulation import simulate_seed
from streams import record_publisher
from streams.clock import BrokerClock
from streams.errors import AppendFailed, BrokerUnavailable, RecordError
from streams.ports import Appended, Partition
from streams.reading import group_consumer, range_reader
from streams.records import (
    Blocks,
    Cancel,
    Chunk,
    End,
    EndCode,
    Ended,
    Fence,
    Fencing,
    Finished,
    Started,
)
from streams.responses import reply_reader, transcript
from streams.topics import RESPONSES
from streams.views import snapshot_writer, tail_reader

Replacement = tuple[object, str, Any]
"""The owner of an attribute, its name, and the replacement."""


class MaskingRule(NamedTuple):
    """Why the loss of a rule has no visible effect as long as another one (`by`) holds."""

    by: str
    because: str


class Mutation(NamedTuple):
    """One disabled rule. A covered one has to be detected together with its cover.

    `expected_kinds`: kinds of problems that follow from the loss of this rule, as a verdict names
    them, separated by spaces. Others do not count: a faulty mutation causes them, too.
    `take_overs`: only a world with frequent lane take-overs shows it often enough.
    """

    name: str
    expected_kinds: str
    rule: str
    replacements: Callable[[], Iterable[Replacement]]
    covered: MaskingRule | None = None
    take_overs: bool = False

    @property
    def to_detect(self) -> str:
        """The mutations to apply: this one alone, or together with its cover."""
        return f"{self.name}+{self.covered.by}" if self.covered else self.name


def needs_take_overs(names: str) -> bool:
    """Whether these mutations need worlds with frequent take-overs (see `simulate_seed`)."""
    return any(MUTATIONS[name].take_overs for name in filter(None, names.split("+")))


@contextmanager
def apply_mutations(names: str) -> Iterator[None]:
    """Apply these mutations (names joined by "+") inside the block. Raises KeyError."""
    with ExitStack() as stack:
        for name in filter(None, names.split("+")):
            for owner, attribute, replacement in MUTATIONS[name].replacements():
                original = getattr(owner, attribute, _MISSING)
                if isinstance(owner, type):
                    original = owner.__dict__[attribute]
                setattr(owner, attribute, replacement)
                stack.callback(_restore, owner, attribute, original)
        yield


_MISSING = object()


def _restore(owner: object, attribute: str, original: object) -> None:
    if original is _MISSING:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, original)


# --- obligations ---------------------------------------------------------------------------------


def _only_on_change() -> Iterator[Replacement]:
    def check(*_: Any) -> None:
        pass

    for name in ("reconcile_all", "reconcile_due", "reconcile_unlisted"):
        yield owner.LaneOwner, name, check


def _newest_run_speaks() -> Iterator[Replacement]:
    def speaking(
        state: request_state.RequestState,
    ) -> list[tuple[request_state.RunId, request_state.RunStatus]]:
        return list(state.runs.items())[-1:]

    def over(state: request_state.RequestState) -> bool:
        states = [run.state for _, run in speaking(state)]
        goes_on = request_state.OPEN | request_state.FAILED | {"handed_off"}
        return bool(state.ended) or (bool(states) and states[0] not in goes_on)

    yield reconcile, "_current_runs", speaking
    yield request_state.RequestState, "is_finished", property(over)


def _nobody_looks_for_missing_runs() -> Iterator[Replacement]:
    def looks_missing(*_: Any) -> bool:
        return False

    yield reconcile, "_looks_missing", looks_missing


def _refusals_count_as_failures() -> Iterator[Replacement]:
    yield request_transitions, "NOT_COUNTED_AS_FAILURE", frozenset()


def _cancel_done_when_read() -> Iterator[Replacement]:
    original = owner.LaneOwner._take

    async def capture_shifted(self: Any, fact: Any) -> None:
        if isinstance(fact.record, Cancel):
            self.claim.mark_done(fact.offset)
        await original(self, fact)

    yield owner.LaneOwner, "_take", capture_shifted


# --- the order of appends ------------------------------------------------------------------------


def _publish_by(
    kind: type, publish: Callable[[Any, str, str, Any, int | None], Awaitable[Appended]]
) -> Iterator[Replacement]:
    """Records of this kind are published by another function."""
    original = record_publisher.RecordPublisher.publish

    async def replaced(
        self: Any, topic: str, key: str, record: Any, partition: int | None = None, **options: Any
    ) -> Appended:
        if isinstance(record, kind):
            return await publish(self, topic, key, record, partition)
        return await original(self, topic, key, record, partition, **options)

    yield record_publisher.RecordPublisher, "publish", replaced


async def _not_written(
    self: Any, topic: str, key: str, record: Any, partition: int | None
) -> Appended:
    """The record counts as appended at the present end of the log, but is not."""
    where = partition or 0
    while True:
        try:
            end = (await self._log.end_offsets(topic, [where]))[where]
            return Appended(where, max(end - 1, 0), 0)
        except BrokerUnavailable:
            await self._clock.sleep(0.5)


async def _sent_once(
    self: Any, topic: str, key: str, record: Any, partition: int | None
) -> Appended:
    """The record is not sent again when it is not acknowledged."""
    try:
        return await self.publish_once(topic, key, record, partition)  # type: ignore[no-any-return]
    except AppendFailed:
        return Appended(0, 0, 0)


def _fence_without_fencing() -> Iterator[Replacement]:
    return _publish_by(Fencing, _not_written)


def _no_fence() -> Iterator[Replacement]:
    return _publish_by(Fence, _not_written)


def _no_started() -> Iterator[Replacement]:
    return _publish_by(Started, _not_written)


def _finished_once() -> Iterator[Replacement]:
    return _publish_by(Finished, _sent_once)


def _cache_events_once() -> Iterator[Replacement]:
    return _publish_by(Blocks, _sent_once)


def _ended_before_end() -> Iterator[Replacement]:
    original = termination.RequestTermination.end

    async def end(self: Any, request_id: str, code: EndCode, *more: Any, **options: Any) -> None:
        await self.write_terminal(request_id, code)
        await original(self, request_id, code, *more, **options)

    yield termination.RequestTermination, "end", end


def _no_barrier_on_take_over() -> Iterator[Replacement]:
    async def begin(self: Any) -> None:
        lane = Partition(RESPONSES, self.claim.partition)
        self._context.response_end_offsets[lane.partition] = await self._context.end_offset(lane)
        self.serving = True
        self._context.resume(self.claim)
        self.reconcile_all()

    yield owner.LaneOwner, "_begin", begin


def _commit_early() -> Iterator[Replacement]:
    yield group_consumer.PartitionClaim, "low_water", property(lambda self: self.position)


def _highest_responses_from() -> Iterator[Replacement]:
    yield request_transitions, "min", max  # the module's name for the lower of two offsets


def _started_is_not_knowledge() -> Iterator[Replacement]:
    original = ledger.apply_record

    def changed(state: request_state.RequestState, record: Any, *more: Any) -> None:
        unknown = state.origin is None
        original(state, record, *more)
        if unknown and isinstance(record, Started):
            state.origin = None

    yield ledger, "apply_record", changed


def _late_records_open_old_attempts() -> Iterator[Replacement]:
    original = ledger.apply_record

    def changed(
        state: request_state.RequestState, record: Any, at_ms: int, active_load: Any
    ) -> None:
        original(state, record, at_ms, active_load)
        old = not isinstance(record, Ended | Fencing) and record.attempt < state.attempt
        if old and not state.ended:
            request_transitions._apply_run(state, record, at_ms, active_load)

    yield ledger, "apply_record", changed


def _gather_past_the_first_fence() -> Iterator[Replacement]:
    class Past(transcript.Transcript):
        """Applies the Fences of earlier attempts, and reads on past the one to stop at."""

        def apply(self, record: Any) -> Any:
            until = self._until
            is_past = isinstance(record, Fence) and until is not None and record.attempt >= until
            return None if is_past else super().apply(record)

    yield shared_reads, "Transcript", Past


# --- workers -------------------------------------------------------------------------------------


def _finished_before_the_last_ack() -> Iterator[Replacement]:
    abandon = chunk_writer.ChunkStream.discard

    async def finish(self: Any, last: chunk_writer.FinalChunk, text: str = "") -> None:
        self._text += text
        self._last = last
        self.sent_off = True
        if self._released:
            self._writer.wake(self)

    def keep(self: Any) -> None:
        if not hasattr(self, "sent_off"):
            abandon(self)

    yield chunk_writer.ChunkStream, "finish", finish
    yield chunk_writer.ChunkStream, "discard", keep


def _go_on_after_a_lost_chunk() -> Iterator[Replacement]:
    on_end = chunk_writer.ChunkWriter._on_end

    def on_any_end(self: Any, lane: int, batch: Any, appended: Any) -> None:
        if not appended.cancelled() and isinstance(appended.exception(), AppendFailed):
            appended = asyncio.get_running_loop().create_future()
            appended.set_result(Appended(lane, 0, 0))
        on_end(self, lane, batch, appended)

    yield chunk_writer.ChunkWriter, "_on_end", on_any_end


def _last_words_when_lost() -> Iterator[Replacement]:
    def drop(self: Any) -> None:
        for run in self._open.values():
            run.context.cancel()

    yield run_queue.RunQueue, "discard_all", drop


def _card_before_slot_position() -> Iterator[Replacement]:
    begin = worker.Worker._start_epoch

    async def start_epoch(self: Any, until: float | None = None) -> None:
        await begin(self, until)
        if not self._loops:  # the first life: the slot is not read yet
            self._slot_offset = await worker.end_offset_of(self._log, self._clock, self._slot)

    yield worker.Worker, "_start_epoch", start_epoch


def _epoch_used_again() -> Iterator[Replacement]:
    original = registration.Registration.begin_epoch

    async def begin(self: Any, until: float | None = None) -> int:
        if self.card.epoch is None:
            return await original(self, until)
        await self.rewrite_card(until)
        return self.epoch  # type: ignore[no-any-return]

    yield registration.Registration, "begin_epoch", begin


# --- time and outages ----------------------------------------------------------------------------


def _own_clock() -> Iterator[Replacement]:
    def now_ms(self: Any) -> int:
        return self._clock.wall_ms()  # type: ignore[no-any-return]

    yield BrokerClock, "now_ms", now_ms


def _ask_once() -> Iterator[Replacement]:
    async def send(_: Any, question: Any, *__: Any, **___: Any) -> Any:
        return await question()

    for asker in (range_reader, active_streams):
        yield asker, "retry_while_unavailable", send


# --- the edge ------------------------------------------------------------------------------------


def _commit_prompts_early() -> Iterator[Replacement]:
    original = prompt_source.PromptSource.publish_requests

    async def handle(self: Any, records: Any) -> None:
        self._ctx.spawn("handling", original(self, list(records)))

    yield prompt_source.PromptSource, "publish_requests", handle


def _prompts_are_refused() -> Iterator[Replacement]:
    def excess(self: Any, _: Any, wanted: Any, __: Any) -> Any:
        crowded = self._context.scheduler.waiting.is_full(wanted.queue_key)
        return Rejection("queue_full", "as over HTTP") if crowded else None

    yield admission.Admission, "_excess", excess


def _prompts_paused_for_ever() -> Iterator[Replacement]:
    def resume(self: Any) -> None:
        self._is_paused = False

    yield prompt_source.PromptSource, "_resume", resume


def _acknowledged_requests_return_credit() -> Iterator[Replacement]:
    original = prompt_source.PromptSource._acknowledged

    def acknowledged(self: Any, *args: Any) -> None:
        original(self, *args)
        for lane in self._credit._lanes.values():
            lane.read_to(sys.maxsize)

    yield prompt_source.PromptSource, "_acknowledged", acknowledged


def _late_reports_return_credit() -> Iterator[Replacement]:
    original = prompt_credit._UnreadLane.read_to

    def read_to(self: Any, _: int) -> None:
        original(self, sys.maxsize)

    yield prompt_credit._UnreadLane, "read_to", read_to


def _room_is_not_shared() -> Iterator[Replacement]:
    def shares(self: Any) -> None:
        self._credit.prompts_share = 1.0
        self._credit.credit_changed.notify_all()

    yield prompt_source.PromptSource, "_shares", shares


def _answers_from_their_beginning() -> Iterator[Replacement]:
    yield stream_resume, "_position", lambda _: 0


def _answers_from_now_on() -> Iterator[Replacement]:
    async def attach(self: Any, request_id: str, **_: Any) -> Any:
        return await self.subscribe(request_id)

    yield reply_reader.ReplyReader, "attach", attach


def _any_model() -> Iterator[Replacement]:
    make = eligibility.CandidatePools._make

    def pool(self: Any, _: str, *more: Any) -> Any:
        return make(self, "", *more)

    yield eligibility.CandidatePools, "_make", pool


def _any_lane() -> Iterator[Replacement]:
    received = owner.LaneOwner.on_request_record

    def capture_shifted(self: Any, fact: Any) -> None:
        try:
            received(self, fact)
        except RecordError:
            self.claim.mark_done(fact.offset)

    yield owner.LaneOwner, "on_request_record", capture_shifted


def _no_objections() -> Iterator[Replacement]:
    yield owner, "_objection", lambda _: ""


# --- batch work and results ----------------------------------------------------------------------


def _preempt_without_a_fence() -> Iterator[Replacement]:
    original = record_publisher.RecordPublisher.publish

    async def publish(
        self: Any, topic: str, key: str, record: Any, partition: int | None = None
    ) -> Appended:
        if isinstance(record, Fence) and record.reason == "preempted":
            return await _not_written(self, topic, key, record, partition)
        return await original(self, topic, key, record, partition)

    yield record_publisher.RecordPublisher, "publish", publish


def _commit_before_the_result() -> Iterator[Replacement]:
    def take(self: Any, fact: Any) -> None:
        self._results.add_request(fact)
        self.claim.mark_done(fact.offset)

    yield lane_collector.LaneCollector, "on_request_record", take


def _results_of_what_goes_on() -> Iterator[Replacement]:
    yield pending_result, "_ends", lambda record: isinstance(record, Chunk | End)


# --- hand-overs ----------------------------------------------------------------------------------


def _prefill_writes_chunks() -> Iterator[Replacement]:
    yield run_executor.Run, "is_prefill", property(lambda _: False)


def _decode_before_the_handover() -> Iterator[Replacement]:
    original = handovers.HandOvers.begin

    def begin(self: Any, rest: Any, *args: Any) -> Any:
        begun = original(self, rest, *args)
        early = begun._replace(params=b"{}", until_ms=rest.deadline_ms)
        self._open[rest.request.id] = early
        return begun

    def is_begun(state: Any) -> bool:
        return bool(state.runs) and all(run.phase == "prefill" for run in state.runs)

    yield handovers.HandOvers, "begin", begin
    yield reconcile, "_is_handed_over", is_begun


def _handovers_are_used_again() -> Iterator[Replacement]:
    def is_handed_over(state: Any) -> bool:
        is_failed = all(
            run.state in request_state.FAILED
            for run_id, run in state.runs.items()
            if run_id.phase == "decode"
        )
        return is_failed and any(run.state == "handed_off" for run in state.runs.values())

    original = dispatch.Dispatcher._is_due

    def is_due(self: Any, rest: Any, phase: Any) -> bool:
        return phase == "decode" or original(self, rest, phase)

    yield handovers.HandOvers, "drop", lambda *_: None
    yield dispatch.Dispatcher, "_is_due", is_due
    yield reconcile, "_is_handed_over", is_handed_over


def _handovers_never_expire() -> Iterator[Replacement]:
    yield run_queue.RunQueue, "_handoff_expired", lambda *_: None
    original = handovers.HandOvers.on_record

    def on_record(self: Any, fact: Any) -> None:
        original(self, fact)
        known = self._open.get(fact.record.id)
        if known is not None and known.until_ms:
            self._open[fact.record.id] = known._replace(until_ms=known.rest.deadline_ms)

    yield handovers.HandOvers, "on_record", on_record


def _unused_handovers_are_forgotten() -> Iterator[Replacement]:
    async def decode(self: Any, request_id: str, attempt: int) -> None:
        handovers = self._dispatcher.handovers
        handover = handovers.usable(request_id, attempt)
        handovers.drop(request_id)
        if handover is not None:
            await self._dispatcher.assign_decode(handover)

    yield owner.LaneOwner, "_decode", decode


def _decode_waits_for_failed_prefills() -> Iterator[Replacement]:
    def current_runs(state: Any) -> Any:
        runs = [x for x in state.runs.items() if x[0].attempt == state.attempt]
        runs = [x for x in runs if x[0].phase != "prefill"] or runs
        return [x for x in runs if x[1].state != "worker_full"] or runs

    yield reconcile, "_current_runs", current_runs


def _transfers_never_time_out() -> Iterator[Replacement]:
    def abort_expired(self: Any) -> None:
        now = self._ctx.clock.now()
        for run in [r for r in self._open.values() if r.deadline_at <= now]:
            self._stop(run, run_executor.RunEnd("expired"))

    yield run_queue.RunQueue, "abort_expired", abort_expired


def _cancels_interrupt_transfers() -> Iterator[Replacement]:
    yield run_queue, "UNWANTED", ()


# --- caches --------------------------------------------------------------------------------------


def _snapshot_ahead_of_its_state() -> Iterator[Replacement]:
    original: Any = vars(snapshot_writer)["capture"]

    def capture_shifted(view: Any, source: Partition) -> Any:
        taken = original(view, source)
        position = taken.header.position + 5
        return taken._replace(header=msgspec.structs.replace(taken.header, position=position))

    yield snapshot_writer, "capture", capture_shifted


# --- readers -------------------------------------------------------------------------------------


def _joining_views_skip_records() -> Iterator[Replacement]:
    def positions(self: Any) -> dict[Partition, int]:
        highest: dict[Partition, int] = {}
        for subscription in self._subscriptions:
            for source, position in subscription.positions.items():
                highest[source] = max(position, highest.get(source, position))
        return highest

    yield tail_reader.TailReader, "_positions", positions


def _zombies_are_believed() -> Iterator[Replacement]:
    original = transcript.Transcript.apply

    def feed(self: Any, record: Any) -> Any:
        if isinstance(record, Chunk) and record.attempt < self.attempt:
            record = msgspec.structs.replace(record, attempt=self.attempt)
        return original(self, record)

    yield transcript.Transcript, "apply", feed


MUTATIONS: dict[str, Mutation] = {
    m.name: m
    for m in (
        Mutation("edge", "open hanging", "level-triggered reconciliation", _only_on_change),
        Mutation(
            "newest-run",
            "load",
            "reconciliation of each run",
            _newest_run_speaks,
            MaskingRule(
                "no-barrier",
                "an attempt has two runs only where two routers decided it, and a "
                "router that reads the ledger before it serves knows the first decision",
            ),
            take_overs=True,
        ),
        Mutation(
            "no-verify",
            "open hanging",
            "looking for runs that are missing",
            _nobody_looks_for_missing_runs,
        ),
        Mutation("count-refusals", "causeless", "free worker_full", _refusals_count_as_failures),
        Mutation(
            "cancel-early",
            "open hanging job",
            "Cancel done after its Ended",
            _cancel_done_when_read,
        ),
        Mutation("no-fencing", "StepLimitExceeded", "Fencing before Fence", _fence_without_fencing),
        Mutation("no-fence", "hanging", "Fence before gathering", _no_fence),
        Mutation(
            "no-started", "hanging", "Started before the first Chunk", _no_started, take_overs=True
        ),
        Mutation(
            "started-unknown",
            "hanging",
            "a Started alone makes its id known",
            _started_is_not_knowledge,
            take_overs=True,
        ),
        Mutation(
            "finished-once",
            "open hanging",
            "Finished until acknowledged",
            _finished_once,
            MaskingRule(
                "no-verify", "a run whose end was lost is missing from its worker's heartbeat"
            ),
        ),
        Mutation("ended-first", "hanging", "End before Ended", _ended_before_end),
        Mutation(
            "no-barrier",
            "load",
            "reading the ledger to its end on take-over",
            _no_barrier_on_take_over,
            MaskingRule(
                "newest-run", "a request decided twice has twin runs, and each is reconciled"
            ),
            take_overs=True,
        ),
        Mutation("commit-early", "hanging", "low-water commits", _commit_early),
        Mutation(
            "highest-from",
            "hanging",
            "the lowest responses_from",
            _highest_responses_from,
            MaskingRule("no-barrier", "as for newest-run: one decision has one responses_from"),
            take_overs=True,
        ),
        Mutation(
            "old-attempts",
            "StepLimitExceeded open",
            "nothing opens below an attempt",
            _late_records_open_old_attempts,
        ),
        Mutation(
            "past-fence",
            "hanging hole",
            "gathering to the first Fence",
            _gather_past_the_first_fence,
        ),
        Mutation(
            "finished-early",
            "hanging",
            "Finished after the last ack",
            _finished_before_the_last_ack,
        ),
        Mutation(
            "go-on", "hole hanging", "fail-stop after a lost Chunk", _go_on_after_a_lost_chunk
        ),
        Mutation(
            "last-words", "causeless", "no records after one's own Lost", _last_words_when_lost
        ),
        Mutation(
            "card-first",
            "open hanging",
            "slot position before the card",
            _card_before_slot_position,
            MaskingRule(
                "no-verify", "an assignment that was skipped is found as one that never starts"
            ),
        ),
        Mutation(
            "same-epoch",
            "StepLimitExceeded",
            "a new epoch for each registration",
            _epoch_used_again,
        ),
        Mutation(
            "zombies", "hanging hole", "skipping Chunks of lower attempts", _zombies_are_believed
        ),
        Mutation("own-clock", "causeless", "broker time for deadlines and deaths", _own_clock),
        Mutation("ask-once", "failure", "retrying until a broker answers", _ask_once),
        Mutation(
            "prompts-early", "hanging", "prompts committed when published", _commit_prompts_early
        ),
        Mutation(
            "prompts-refused", "causeless", "prompts are queued, not rejected", _prompts_are_refused
        ),
        Mutation(
            "paused", "uncommitted", "resuming prompts after a pause", _prompts_paused_for_ever
        ),
        Mutation(
            "credit-acknowledged",
            "credit",
            "credit of a request is used until a report has read it",
            _acknowledged_requests_return_credit,
        ),
        Mutation(
            "credit-late",
            "credit",
            "a report returns the credit of what its router has read only",
            _late_reports_return_credit,
        ),
        Mutation(
            "room-unshared",
            "shares",
            "a preprocessor uses the room by its share of the partitions",
            _room_is_not_shared,
        ),
        Mutation(
            "from-start",
            "received",
            "resuming a stream from a position",
            _answers_from_their_beginning,
        ),
        Mutation("from-now", "waiting", "attaching from the beginning", _answers_from_now_on),
        Mutation("events-once", "caches", "cache events until acknowledged", _cache_events_once),
        Mutation(
            "snapshot-ahead",
            "caches",
            "state and position of a snapshot from one moment",
            _snapshot_ahead_of_its_state,
        ),
        Mutation(
            "join-ahead",
            "caches load",
            "reading on from the position of a view that joins",
            _joining_views_skip_records,
        ),
        Mutation(
            "preempt-unfenced",
            "hanging hole wrong",
            "Fence before a preempted run ends",
            _preempt_without_a_fence,
        ),
        Mutation(
            "result-early",
            "results",
            "commit after the result was written",
            _commit_before_the_result,
        ),
        Mutation(
            "result-open",
            "result results",
            "results of finished requests only",
            _results_of_what_goes_on,
        ),
        Mutation(
            "prefill-chunks", "hole wrong hanging", "no Chunk of a prefill", _prefill_writes_chunks
        ),
        Mutation(
            "decode-early", "invalid", "decode after the hand-over", _decode_before_the_handover
        ),
        Mutation("handover-twice", "twice", "a hand-over is used once", _handovers_are_used_again),
        Mutation("handover-late", "late", "no hand-over past its lease", _handovers_never_expire),
        Mutation(
            "decode-lost",
            "StepLimitExceeded open hanging",
            "the next attempt after a hand-over that is not used",
            _unused_handovers_are_forgotten,
        ),
        Mutation(
            "prefill-failed",
            "open hanging running uncommitted",
            "the end of decode when the prefill that it waits for has failed",
            _decode_waits_for_failed_prefills,
            MaskingRule("transfer-endless", "the wait of decode ends, if later"),
        ),
        Mutation(
            "transfer-endless",
            "open hanging running uncommitted",
            "the limit on the wait for a transfer",
            _transfers_never_time_out,
            MaskingRule("prefill-failed", "most waits in vain are for prefills that failed"),
        ),
        Mutation(
            "transfer-cancelled",
            "interrupted",
            "no cancel of a transfer",
            _cancels_interrupt_transfers,
        ),
        Mutation("any-model", "misrouted", "workers of the model only", _any_model),
        Mutation("any-lane", "poison", "dead letters for records of other lanes", _any_lane),
        Mutation(
            "no-objections",
            "causeless",
            "rejecting requests that no worker can run",
            _no_objections,
        ),
    )
}


if __name__ == "__main__":
    _, without, seed = sys.argv
    with apply_mutations(without):
        sys.stdout.write(
            simulate_seed(int(seed), take_overs=needs_take_overs(without)).report() + "\n"
        )
