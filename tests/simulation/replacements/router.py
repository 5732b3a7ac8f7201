"""Rules of routers: reconciliation, the order of appends, batch work, hand-overs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from msgspec.structs import replace

from kvlane.app import router
from kvlane.app.lanes import dispatch, failover, handovers, owner, shared_reads, termination
from kvlane.app.results import lane_collector, pending_result
from kvlane.app.routing import reconcile
from kvlane.app.routing.state import ended_prompts, fleet, ledger, request_state
from kvlane.app.serving import run_executor, run_queue
from kvlane.streams import record_publisher
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.ports import Appended, Partition
from kvlane.streams.reading import group_consumer
from kvlane.streams.records import (
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
from kvlane.streams.responses import transcript
from kvlane.streams.topics import RESPONSES
from tests.simulation.replacements import Replacement
from workbench.testing import simulation_engines

# --- obligations ---------------------------------------------------------------------------------


def only_on_change() -> Iterator[Replacement]:
    def check(*_: Any) -> None:
        pass

    for name in ("reconcile_all", "reconcile_due", "reconcile_unlisted"):
        yield owner.LaneOwner, name, check


def only_the_newest_run_counts() -> Iterator[Replacement]:
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


def missing_runs_are_not_detected() -> Iterator[Replacement]:
    def looks_missing(*_: Any) -> bool:
        return False

    yield reconcile, "_looks_missing", looks_missing


def refusals_count_as_failures() -> Iterator[Replacement]:
    yield request_state, "NOT_COUNTED_AS_FAILURE", frozenset()


def cancel_done_when_read() -> Iterator[Replacement]:
    original = owner.LaneOwner._take

    async def capture_shifted(self: Any, log_record: Any) -> None:
        if isinstance(log_record.record, Cancel):
            self.claim.mark_done(log_record.offset)
        await original(self, log_record)

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


def fence_without_fencing() -> Iterator[Replacement]:
    return _publish_by(Fencing, _not_written)


def no_fence() -> Iterator[Replacement]:
    return _publish_by(Fence, _not_written)


def no_started() -> Iterator[Replacement]:
    return _publish_by(Started, _not_written)


def finished_once() -> Iterator[Replacement]:
    return _publish_by(Finished, _sent_once)


def cache_events_once() -> Iterator[Replacement]:
    return _publish_by(Blocks, _sent_once)


def ended_before_end() -> Iterator[Replacement]:
    original = termination.RequestTermination.end

    async def end(self: Any, request_id: str, code: EndCode, *more: Any, **options: Any) -> None:
        await self.write_terminal(request_id, code)
        await original(self, request_id, code, *more, **options)

    yield termination.RequestTermination, "end", end


def no_barrier_on_take_over() -> Iterator[Replacement]:
    async def begin(self: Any) -> None:
        lane = Partition(RESPONSES, self.claim.partition)
        self._context.response_end_offsets[lane.partition] = await self._context.end_offset(lane)
        self.serving = True
        self._context.resume(self.claim)
        self.reconcile_all()

    yield owner.LaneOwner, "_begin", begin


def commit_early() -> Iterator[Replacement]:
    yield group_consumer.PartitionClaim, "low_water", property(lambda self: self.position)


def highest_responses_from() -> Iterator[Replacement]:
    yield request_state, "min", max  # the module's name for the lower of two offsets


def started_is_not_knowledge() -> Iterator[Replacement]:
    original = ledger.apply_record

    def changed(state: request_state.RequestState, record: Any, *more: Any) -> bool:
        unknown = state.origin is None
        is_changed = original(state, record, *more)
        if unknown and isinstance(record, Started):
            state.origin = None
        return is_changed

    yield ledger, "apply_record", changed


def late_records_open_old_attempts() -> Iterator[Replacement]:
    original = ledger.apply_record

    def changed(
        state: request_state.RequestState, record: Any, at_ms: int, active_load: Any
    ) -> bool:
        is_changed = original(state, record, at_ms, active_load)
        old = not isinstance(record, Ended | Fencing) and record.attempt < state.attempt
        if old and not state.ended:
            is_changed |= request_state._apply_run(state, record, at_ms, active_load)
        return is_changed

    yield ledger, "apply_record", changed


def gather_past_the_first_fence() -> Iterator[Replacement]:
    class Past(transcript.Transcript):
        """Applies the Fences of earlier attempts, and reads on past the one to stop at."""

        def apply(self, record: Any) -> Any:
            until = self._until
            is_past = isinstance(record, Fence) and until is not None and record.attempt >= until
            return None if is_past else super().apply(record)

    yield shared_reads, "Transcript", Past


# --- batch work and results ----------------------------------------------------------------------


def preempt_without_a_fence() -> Iterator[Replacement]:
    return _no_fence_with("preempted")


def evacuate_without_a_fence() -> Iterator[Replacement]:
    return _no_fence_with("evacuated")


def _no_fence_with(reason: str) -> Iterator[Replacement]:
    original = record_publisher.RecordPublisher.publish

    async def publish(
        self: Any, topic: str, key: str, record: Any, partition: int | None = None
    ) -> Appended:
        if isinstance(record, Fence) and record.reason == reason:
            return await _not_written(self, topic, key, record, partition)
        return await original(self, topic, key, record, partition)

    yield record_publisher.RecordPublisher, "publish", publish


def restarted_worker_is_not_cordoned() -> Iterator[Replacement]:
    original = fleet.Fleet._on_card

    def on_card(self: Any, log_record: Any, card: Any) -> None:
        if card.epoch is None:
            self.cordons.pop(card.id, None)
        original(self, log_record, card)

    yield fleet.Fleet, "_on_card", on_card


def renewals_lack_the_answer() -> Iterator[Replacement]:
    original = failover.Failover._renewed

    def renewed(self: Any, rest: Any, shown: Chunk | None) -> Awaitable[Any]:
        blank = shown and replace(shown, token_ids=(), text="", log_probs=None, token_chars=())
        return original(self, rest, blank)

    yield failover.Failover, "_renewed", renewed


def ledger_is_read_from_a_minute_ago() -> Iterator[Replacement]:
    async def start(self: Any, source: Any) -> int:
        return await self._offset_before(source, 60.0)  # type: ignore[no-any-return]

    yield router.Router, "_ledger_start", start


def ended_prompts_are_forgotten() -> Iterator[Replacement]:
    """The dedup window alone remembers ends."""
    yield ended_prompts.EndIds, "ended_after", lambda *_: False


def commit_before_the_result() -> Iterator[Replacement]:
    def take(self: Any, log_record: Any) -> None:
        self._results.add_request(log_record)
        self.claim.mark_done(log_record.offset)

    yield lane_collector.LaneCollector, "on_request_record", take


def results_of_what_goes_on() -> Iterator[Replacement]:
    yield pending_result, "_ends", lambda record: isinstance(record, Chunk | End)


# --- hand-overs ----------------------------------------------------------------------------------


def prefill_writes_chunks() -> Iterator[Replacement]:
    yield run_executor.Run, "is_prefill", property(lambda _: False)


def decode_before_the_handover() -> Iterator[Replacement]:
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


def handovers_are_used_again() -> Iterator[Replacement]:
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

    # Engines fail more often, also after they have fetched the blocks.
    yield simulation_engines, "RETRYABLE_ERROR_SHARE", 0.3
    yield handovers.HandOvers, "drop", lambda *_: None
    yield dispatch.Dispatcher, "_is_due", is_due
    yield reconcile, "_is_handed_over", is_handed_over


def handovers_never_expire() -> Iterator[Replacement]:
    yield run_queue.RunQueue, "_handoff_expired", lambda *_: None
    original = handovers.HandOvers.on_record

    def on_record(self: Any, log_record: Any, lag_ms: int) -> None:
        original(self, log_record, lag_ms)
        known = self._open.get(log_record.record.id)
        if known is not None and known.until_ms:
            self._open[log_record.record.id] = known._replace(until_ms=known.rest.deadline_ms)

    yield handovers.HandOvers, "on_record", on_record


def unused_handovers_are_forgotten() -> Iterator[Replacement]:
    async def decode(self: Any, request_id: str, attempt: int) -> None:
        handovers = self._dispatcher.handovers
        handover = handovers.usable(request_id, attempt)
        handovers.drop(request_id)
        if handover is not None:
            await self._dispatcher.assign_decode(handover)

    yield owner.LaneOwner, "_decode", decode


def decode_waits_for_failed_prefills() -> Iterator[Replacement]:
    def current_runs(state: Any) -> Any:
        runs = [x for x in state.runs.items() if x[0].attempt == state.attempt]
        runs = [x for x in runs if x[0].phase != "prefill"] or runs
        return [x for x in runs if x[1].state != "worker_full"] or runs

    yield reconcile, "_current_runs", current_runs


def transfers_never_time_out() -> Iterator[Replacement]:
    def abort_expired(self: Any) -> None:
        now = self._ctx.clock.now()
        for run in [r for r in self._open.values() if r.deadline_at <= now]:
            self._stop(run, run_executor.RunEnd("expired"))

    yield run_queue.RunQueue, "abort_expired", abort_expired


def cancels_interrupt_transfers() -> Iterator[Replacement]:
    yield run_queue, "UNWANTED", ()
