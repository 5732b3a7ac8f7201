"""Broken rules: each mutation takes one rule away from the real code, for as long as it is applied.

A simulation that does not notice a missing rule does not check it. So every rule of the delivery
has a mutation here, and the tests hold the simulation to finding it: alone, or together with the
rule that covers for it, which is named with the reason.

A mutation replaces attributes of real modules and classes; the product knows nothing of it.
"""

# ruff: noqa: SLF001 - rules are broken where they are kept, inside

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from app import preprocessor, worker
from app.http import attachment, streams
from app.lanes import endings, owner, scan
from app.routing import eligibility, load, obligations
from app.serving import chunks, registration, runs
from streams import duty, intake, outbox, replies, transcript
from streams.clock import BrokerClock
from streams.errors import AppendFailed, BrokerUnavailable, RecordError, RecordTooLarge
from streams.ports import Appended, Partition
from streams.records import (
    Blocks,
    Cancel,
    Chunk,
    EndCode,
    Ended,
    Fence,
    Fencing,
    Finished,
    Started,
)  # fmt: skip
from streams.topics import RESPONSES

Replacement = tuple[object, str, Any]
"""Whose attribute, its name, what stands there instead."""


class Cover(NamedTuple):
    """Why the loss of a rule does no visible harm as long as another one (`by`) is kept."""

    by: str
    because: str


class Mutation(NamedTuple):
    """A rule taken away. One that is covered is to be found together with what covers it.

    `take_overs`: only a world in which lanes change hands all the time shows it often enough.
    """

    name: str
    without: str
    make: Callable[[], Iterable[Replacement]]
    covered: Cover | None = None
    take_overs: bool = False

    @property
    def to_be_found(self) -> str:
        """What the simulation has to find: the mutation alone, or with its cover taken away."""
        return f"{self.name}+{self.covered.by}" if self.covered else self.name


def of_take_overs(names: str) -> bool:
    """Which worlds show that these rules are missing (see `simulate`)."""
    return any(MUTATIONS[name].take_overs for name in filter(None, names.split("+")))


@contextmanager
def applied(names: str) -> Iterator[None]:
    """Without these rules (names joined by "+") inside the block. Raises KeyError."""
    with ExitStack() as stack:
        for name in filter(None, names.split("+")):
            for owner, attribute, replacement in MUTATIONS[name].make():
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
    def check_all(_: Any) -> None:
        pass

    yield owner.LaneOwner, "check_all", check_all


def _newest_run_speaks() -> Iterator[Replacement]:
    def speaking(story: load.Story) -> list[tuple[load.RunId, load.KnownRun]]:
        return list(story.runs.items())[-1:]

    def over(story: load.Story) -> bool:
        states = [run.state for _, run in speaking(story)]
        return bool(story.ended) or (bool(states) and states[0] not in load.OPEN | load.FAILED)

    yield obligations, "_speaking", speaking
    yield load.Story, "over", property(over)


def _nobody_looks_for_missing_runs() -> Iterator[Replacement]:
    def looks_missing(*_: Any) -> bool:
        return False

    yield obligations, "_looks_missing", looks_missing


def _refusals_count_as_failures() -> Iterator[Replacement]:
    yield load, "UNCOUNTED", frozenset()


def _cancel_done_when_read() -> Iterator[Replacement]:
    original = owner.LaneOwner._take

    async def take(self: Any, fact: Any) -> None:
        if isinstance(fact.record, Cancel):
            self.claim.done(fact.offset)
        await original(self, fact)

    yield owner.LaneOwner, "_take", take


# --- the order of appends ------------------------------------------------------------------------


def _not_written(kind: type) -> Iterator[Replacement]:
    """Records of this kind are taken for appended, where the log ends now."""
    original = outbox.Outbox.persist

    async def persist(
        self: Any, topic: str, key: str, record: Any, partition: int | None = None, **options: Any
    ) -> Appended:
        if not isinstance(record, kind):
            return await original(self, topic, key, record, partition, **options)
        where = partition or 0
        while True:
            try:
                end = (await self._log.end_offsets(topic, [where]))[where]
                return Appended(where, max(end - 1, 0), 0)
            except BrokerUnavailable:
                await self._clock.sleep(0.5)

    yield outbox.Outbox, "persist", persist


def _fence_without_fencing() -> Iterator[Replacement]:
    return _not_written(Fencing)


def _no_fence() -> Iterator[Replacement]:
    return _not_written(Fence)


def _no_started() -> Iterator[Replacement]:
    return _not_written(Started)


def _sent_once(kind: type) -> Iterator[Replacement]:
    """Records of this kind are not repeated when nobody acknowledges them."""
    original = outbox.Outbox.persist

    async def persist(
        self: Any, topic: str, key: str, record: Any, partition: int | None = None, **options: Any
    ) -> Appended:
        if not isinstance(record, kind):
            return await original(self, topic, key, record, partition, **options)
        try:
            return await self.send(topic, key, record, partition)  # type: ignore[no-any-return]
        except AppendFailed:
            return Appended(0, 0, 0)

    yield outbox.Outbox, "persist", persist


def _finished_once() -> Iterator[Replacement]:
    return _sent_once(Finished)


def _cache_events_once() -> Iterator[Replacement]:
    return _sent_once(Blocks)


def _ended_before_end() -> Iterator[Replacement]:
    original = endings.Endings.end

    async def end(self: Any, request_id: str, code: EndCode, *more: Any, **options: Any) -> None:
        await self.write_ended(request_id, code)
        await original(self, request_id, code, *more, **options)

    yield endings.Endings, "end", end


def _no_barrier_on_take_over() -> Iterator[Replacement]:
    async def begin(self: Any) -> None:
        lane = Partition(RESPONSES, self.claim.partition)
        self._context.responses_ends[lane.partition] = await self._context.end_of(lane)
        self.serving = True
        self._context.resume(self.claim)
        self.check_all()

    yield owner.LaneOwner, "_begin", begin


def _commit_early() -> Iterator[Replacement]:
    yield intake.Claim, "low_water", property(lambda self: self.position)


def _highest_responses_from() -> Iterator[Replacement]:
    yield load, "min", max  # the module's name for the lower of two offsets


def _started_is_not_knowledge() -> Iterator[Replacement]:
    original = load._fold

    def fold(story: load.Story, record: Any, *more: Any) -> None:
        unknown = story.origin is None
        original(story, record, *more)
        if unknown and isinstance(record, Started):
            story.origin = None

    yield load, "_fold", fold


def _late_records_open_old_attempts() -> Iterator[Replacement]:
    original = load._fold

    def fold(story: load.Story, record: Any, at_ms: int, burdens: Any) -> None:
        original(story, record, at_ms, burdens)
        old = not isinstance(record, Ended | Fencing) and record.attempt < story.attempt
        if old and not story.ended:
            load._fold_run(story, record, at_ms, burdens)

    yield load, "_fold", fold


def _gather_past_the_first_fence() -> Iterator[Replacement]:
    class Everything(transcript.Transcript):
        def feed(self, record: Any) -> Any:
            return super().feed(record) if isinstance(record, Chunk) else None

    yield scan, "Transcript", Everything


# --- workers -------------------------------------------------------------------------------------


def _finished_before_the_last_ack() -> Iterator[Replacement]:
    abandon = chunks.ChunkStream.abandon

    async def finish(self: Any, reason: Any, usage: Any, text: str = "") -> None:
        self._text += text
        self._last = chunks.Last(reason, usage)
        self.sent_off = True
        if self._released:
            self._writer.wake(self)

    def keep(self: Any) -> None:
        if not hasattr(self, "sent_off"):
            abandon(self)

    yield chunks.ChunkStream, "finish", finish
    yield chunks.ChunkStream, "abandon", keep


def _go_on_after_a_lost_chunk() -> Iterator[Replacement]:
    async def append(self: Any, batch: Any) -> None:
        if not batch:
            return
        records = [(stream.request_id, chunk) for stream, chunk in batch]
        with suppress(AppendFailed, RecordTooLarge):
            await self._outbox.send_batch(RESPONSES, self._lane, records)
        for stream, chunk in batch:
            stream.landed(chunk)

    yield chunks._LaneWriter, "_append", append


def _last_words_when_lost() -> Iterator[Replacement]:
    def drop(self: Any) -> None:
        for run in self._open.values():
            run.context.cancel()

    yield runs.Runs, "drop", drop


def _card_before_slot_position() -> Iterator[Replacement]:
    begin = worker.Worker._begin_life

    async def begin_life(self: Any, until: float | None = None) -> None:
        await begin(self, until)
        if not self._loops:  # the first life: the slot is not read yet
            self._slot_offset = await self._end_of(self._slot)

    yield worker.Worker, "_begin_life", begin_life


def _epoch_used_again() -> Iterator[Replacement]:
    original = registration.Registration.begin

    async def begin(self: Any, until: float | None = None) -> int:
        if self.card.epoch is None:
            return await original(self, until)
        await self.rewrite(until)
        return self.epoch  # type: ignore[no-any-return]

    yield registration.Registration, "begin", begin


# --- time and outages ----------------------------------------------------------------------------


def _own_clock() -> Iterator[Replacement]:
    def now_ms(self: Any) -> int:
        return self._clock.wall_ms()  # type: ignore[no-any-return]

    yield BrokerClock, "now_ms", now_ms


def _ask_once() -> Iterator[Replacement]:
    async def ask(_: Any, question: Any, *__: Any, **___: Any) -> Any:
        return await question()

    for asker in (worker, streams):
        yield asker, "until_answered", ask


# --- the edge ------------------------------------------------------------------------------------


def _commit_prompts_early() -> Iterator[Replacement]:
    original = preprocessor.Preprocessor.handle

    async def handle(self: Any, records: Any) -> None:
        self._life.spawn("handling", original(self, list(records)))

    yield preprocessor.Preprocessor, "handle", handle


def _answers_from_their_beginning() -> Iterator[Replacement]:
    yield attachment, "_position", lambda _: 0


def _answers_from_now_on() -> Iterator[Replacement]:
    async def attach(self: Any, request_id: str, **_: Any) -> Any:
        return await self.from_now(request_id)

    yield replies.Replies, "from_beginning", attach


def _any_model() -> Iterator[Replacement]:
    make = eligibility.Pools._make

    def pool(self: Any, _: str, *more: Any) -> Any:
        return make(self, "", *more)

    yield eligibility.Pools, "_make", pool


def _any_lane() -> Iterator[Replacement]:
    received = owner.LaneOwner.received

    def take(self: Any, fact: Any) -> None:
        try:
            received(self, fact)
        except RecordError:
            self.claim.done(fact.offset)

    yield owner.LaneOwner, "received", take


def _no_objections() -> Iterator[Replacement]:
    yield owner, "_objection", lambda _: ""
    yield owner, "blames_request", lambda _: False


# --- caches --------------------------------------------------------------------------------------


def _snapshot_ahead_of_its_state() -> Iterator[Replacement]:
    original: Any = vars(duty)["take"]

    def take(fold: Any, source: Partition) -> Any:
        taken = original(fold, source)
        position = taken.cover.position + 5
        return taken._replace(cover=msgspec.structs.replace(taken.cover, position=position))

    yield duty, "take", take


# --- readers -------------------------------------------------------------------------------------


def _zombies_are_believed() -> Iterator[Replacement]:
    original = transcript.Transcript.feed

    def feed(self: Any, record: Any) -> Any:
        if isinstance(record, Chunk) and record.attempt < self.attempt:
            record = msgspec.structs.replace(record, attempt=self.attempt)
        return original(self, record)

    yield transcript.Transcript, "feed", feed


MUTATIONS: dict[str, Mutation] = {
    m.name: m
    for m in (
        Mutation("edge", "level-triggered obligations", _only_on_change),
        Mutation(
            "newest-run",
            "obligations of each run",
            _newest_run_speaks,
            Cover(
                "no-barrier",
                "an attempt has two runs only where two routers decided it, and a "
                "router that reads the ledger before it serves knows the first decision",
            ),
            take_overs=True,
        ),
        Mutation("no-verify", "looking for runs that are missing", _nobody_looks_for_missing_runs),
        Mutation("count-refusals", "free worker_full", _refusals_count_as_failures),
        Mutation("cancel-early", "Cancel done after its Ended", _cancel_done_when_read),
        Mutation("no-fencing", "Fencing before Fence", _fence_without_fencing),
        Mutation("no-fence", "Fence before gathering", _no_fence),
        Mutation("no-started", "Started before the first Chunk", _no_started, take_overs=True),
        Mutation(
            "started-unknown",
            "a Started alone makes its id known",
            _started_is_not_knowledge,
            take_overs=True,
        ),
        Mutation(
            "finished-once",
            "Finished until acknowledged",
            _finished_once,
            Cover("no-verify", "a run that ended unheard is missing from its worker's heartbeat"),
        ),
        Mutation("ended-first", "End before Ended", _ended_before_end),
        Mutation(
            "no-barrier",
            "the barrier on take-over",
            _no_barrier_on_take_over,
            Cover("newest-run", "what is decided twice has twin runs, and each is answered for"),
            take_overs=True,
        ),
        Mutation("commit-early", "low-water commits", _commit_early),
        Mutation(
            "highest-from",
            "the lowest responses_from",
            _highest_responses_from,
            Cover("no-barrier", "as for newest-run: one decision has one responses_from"),
            take_overs=True,
        ),
        Mutation("old-attempts", "nothing opens below an attempt", _late_records_open_old_attempts),
        Mutation("past-fence", "gathering to the first Fence", _gather_past_the_first_fence),
        Mutation("finished-early", "Finished after the last ack", _finished_before_the_last_ack),
        Mutation("go-on", "fail-stop after a lost Chunk", _go_on_after_a_lost_chunk),
        Mutation("last-words", "silence after one's own Lost", _last_words_when_lost),
        Mutation(
            "card-first",
            "slot position before the card",
            _card_before_slot_position,
            Cover("no-verify", "an assignment that was skipped is found as one that never starts"),
        ),
        Mutation("same-epoch", "a new epoch for each life", _epoch_used_again),
        Mutation("zombies", "skipping Chunks of lower attempts", _zombies_are_believed),
        Mutation("own-clock", "broker time for deadlines and deaths", _own_clock),
        Mutation("ask-once", "asking until a broker answers", _ask_once),
        Mutation("prompts-early", "prompts committed when published", _commit_prompts_early),
        Mutation("from-start", "going on from a position", _answers_from_their_beginning),
        Mutation("from-now", "attaching from the beginning", _answers_from_now_on),
        Mutation("events-once", "cache events until acknowledged", _cache_events_once),
        Mutation(
            "snapshot-ahead",
            "state and position of a snapshot from one moment",
            _snapshot_ahead_of_its_state,
        ),
        Mutation("any-model", "workers of the model only", _any_model),
        Mutation("any-lane", "letters about records of other lanes", _any_lane),
        Mutation("no-objections", "objecting to what nobody can run", _no_objections),
    )
}
