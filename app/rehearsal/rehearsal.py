"""A rehearsal: sampled requests of a period run again at another model, and their answers compared.

    requests ──sample──► originals, with their answers ──prompts of class batch──► compared pairs

The prompts get ids that follow from the original, the model and a label: what a former run of the
same rehearsal has published is not published again, its answer is read from the log. They have no
result and no topic of replies, so no client gets an answer. At most `in_flight` of them are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec

from kvlane.app.audit.time_range import MAX_LIFETIME_MS, TimeRange, format_time
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import load_model
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.rehearsal.answer_comparison import AnswerPair, compare_answers, summarize_pairs
from kvlane.app.rehearsal.recorded_answers import (
    SOURCES,
    WHOLE_ENDS,
    AnswerFollower,
    RecordedAnswer,
)
from kvlane.app.rehearsal.request_sample import (
    RehearsalRefused,
    RequestSample,
    check_size,
    is_exact,
    rehearsal_id,
    rehearsal_prompt,
    sample_requests,
)
from kvlane.streams.clock import CLOCK_SKEW_MS, Clock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.errors import BrokerUnavailable, RecordTooLarge
from kvlane.streams.ports import Log, Partition
from kvlane.streams.prompt import encode_prompt
from kvlane.streams.reading.range_reader import (
    NO_DATA_TIMEOUT_S,
    OffsetBounds,
    Progress,
    offsets_between,
    oldest_offsets,
    read_range,
    record_at,
)
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import ModelCard
from kvlane.streams.request import Request
from kvlane.streams.topics import BATCH, REQUESTS, RESPONSES

PUBLISH_TIMEOUT_S = 30.0
_EXPIRY_MARGIN_MS = 60_000
"""Time after its deadline in which a router ends a prompt."""

TokensToText = Callable[[Sequence[int], bool], str]
"""(tokens, whether special ones are left out) → text."""


class RehearsalPlan(NamedTuple):
    """`period`: of the originals, of `model` ("": any). `target`: the model that repeats them.
    `share`: of the requests, from 0 to 1, at most `limit` of them. `timeout_s`: of all of it, and
    so of each prompt. Another `label` repeats the same requests anew."""

    period: TimeRange
    target: ModelCard
    model: str
    share: float
    limit: int
    in_flight: int
    timeout_s: float
    label: str


class _Original(NamedTuple):
    request: Request
    answer: RecordedAnswer


class Rehearsal:
    """One run of a rehearsal. After an interruption it has the pairs so far. `cards`: of all models
    by name."""

    def __init__(
        self, log: Log, clock: Clock, plan: RehearsalPlan, cards: Mapping[str, ModelCard]
    ) -> None:
        self._log = log
        self._clock = clock
        self._plan = plan
        self._cards = cards
        self._decoders: dict[str, TokensToText] = {}
        self._publisher = RecordPublisher(log, clock)
        self._sample = RequestSample(plan.share, plan.limit)
        self._left_out = self._sample.left_out
        self._originals: dict[str, _Original] = {}
        """By the id of their repetition, until they are compared."""
        self._open: dict[str, int] = {}
        """Repetitions without an answer, and the broker time at which they have ended for sure."""
        self._kept_ms = 0
        self.pairs: list[AnswerPair] = []

    async def run(self, reading: Progress, comparing: Progress) -> None:
        """Rehearse. `reading`: progress in offsets; `comparing`: in requests. Raises
        RehearsalRefused, BrokerUnavailable, PositionLost, NewerRecord, AppendFailed."""
        plan, log, clock = self._plan, self._log, self._clock
        until_s = clock.now() + plan.timeout_s
        self._kept_ms = await _kept_since(log, clock, plan.period)
        bounds = await offsets_between(log, REQUESTS, *plan.period)
        await sample_requests(log, clock, bounds, plan.model, self._sample, reading)
        answers = await self._read_originals(reading)
        for name, request in self._sample.requests.items():
            if (answer := answers.pop(name, None)) is None:
                self._left_out["answers that are not over, or no longer kept"] += 1
            elif answer.code not in WHOLE_ENDS:
                self._left_out["answers that failed or were cancelled"] += 1
            else:
                again = rehearsal_id(request, plan.target, plan.label)
                self._originals[again] = _Original(request, answer)
        self._sample.requests.clear()  # each is kept until its pair is compared
        if not self._originals:
            self._refuse_empty()
        await self._rehearse(until_s, comparing)

    @property
    def differing(self) -> int:
        """The number of answers that differ so far."""
        return sum(pair.verdict == "differs" for pair in self.pairs)

    def report(self) -> dict[str, Any]:
        """The result so far, for JSON. `open`: requests that are not compared yet."""
        plan = self._plan
        return {
            "from_ms": plan.period.from_ms, "to_ms": plan.period.to_ms,
            "kept_since_ms": self._kept_ms, "model": plan.model, "to": plan.target.name,
            "share": plan.share, "label": plan.label, "left_out": dict(self._left_out),
            "open": len(self._originals), **summarize_pairs(self.pairs),
        }  # fmt: skip

    # --- originals -------------------------------------------------------------------------------

    async def _read_originals(self, progress: Progress) -> dict[str, RecordedAnswer]:
        from_ms, to_ms = self._plan.period
        found: dict[str, RecordedAnswer] = {}
        starts, ends = await self._answer_offsets(from_ms, to_ms + MAX_LIFETIME_MS)
        follower, total = AnswerFollower(self._log, self._clock, starts), 0
        try:
            for name in self._sample.requests:
                follower.add(name)
            size, until_s = 0, self._clock.now() + NO_DATA_TIMEOUT_S
            left = total = follower.remaining(ends)
            while left and len(found) < len(self._sample.requests):
                for answer in await follower.poll():
                    found[answer.id] = answer
                    size += answer.size
                check_size(size, "answers")
                before, left = left, follower.remaining(ends)
                if left < before:
                    until_s = self._clock.now() + NO_DATA_TIMEOUT_S
                elif self._clock.now() > until_s:
                    raise BrokerUnavailable(f"no records for {NO_DATA_TIMEOUT_S:g} s")
                progress(total - left, total)
        finally:
            await follower.close()
        return found

    async def _answer_offsets(self, from_ms: int, to_ms: int) -> OffsetBounds:
        found = OffsetBounds({}, {})
        for topic in SOURCES:
            since_ms = max(0, from_ms - CLOCK_SKEW_MS)
            bounds = await offsets_between(self._log, topic, since_ms, to_ms)
            found.starts.update(bounds.starts)
            found.ends.update(bounds.ends)
        return found

    def _refuse_empty(self) -> None:
        plan = self._plan
        of = f" for {plan.model!r}" if plan.model else ""
        reasons = "; ".join(f"left out: {n} {why}" for why, n in self._left_out.items())
        raise RehearsalRefused(
            f"no request{of} from {format_time(plan.period.from_ms)} to "
            f"{format_time(plan.period.to_ms)} UTC can be rehearsed{reasons and f' ({reasons})'}",
            correction="Give another period (--from, --until), --model, or a higher --share.",
        )

    # --- repetitions -----------------------------------------------------------------------------

    async def _rehearse(self, until_s: float, progress: Progress) -> None:
        clock, total = self._clock, len(self._originals)
        known = await self._published()
        self._open = {name: expires_ms for name, (_, expires_ms) in known.items()}
        waiting = [name for name in self._originals if name not in known]
        since_ms = min((at_ms for at_ms, _ in known.values()), default=clock.wall_ms())
        starts, ends = await self._answer_offsets(since_ms, clock.wall_ms() + CLOCK_SKEW_MS)
        follower = AnswerFollower(self._log, clock, starts)
        try:
            for name in known:
                follower.add(name)
            while self._originals and (left_s := until_s - clock.now()) > 0:
                room = max(0, self._plan.in_flight - len(self._open))
                chosen, waiting = waiting[:room], waiting[room:]
                for name in chosen:
                    follower.add(name)
                await asyncio.gather(*(self._publish(name, left_s) for name in chosen))
                for answer in await follower.poll():
                    await self._compare(answer)
                now_ms = clock.wall_ms()
                for name in [name for name, at_ms in self._open.items() if at_ms < now_ms]:
                    await self._compare(follower.drop(name))
                if known and not follower.remaining(ends):
                    for name in [n for n in known if n in self._open and follower.is_ended(n)]:
                        await self._compare(follower.drop(name))  # a part of it is no longer kept
                    known = {}
                progress(total - len(self._originals), total)
        finally:
            await follower.close()

    async def _published(self) -> dict[str, tuple[int, int]]:
        """The repetitions that a former run has published: when, and when they have ended for
        sure."""
        log = self._log
        bounds = await offsets_between(
            log, BATCH, max(0, self._plan.period.from_ms - CLOCK_SKEW_MS), self._clock.wall_ms()
        )
        ends = await log.end_offsets(BATCH, [source.partition for source in bounds.starts])
        bounds = OffsetBounds(bounds.starts, {Partition(BATCH, n): end for n, end in ends.items()})
        keys = {name.encode(): name for name in self._originals}
        found: dict[str, tuple[int, int]] = {}
        reading = read_range(log, self._clock, *bounds, keys=keys)
        async with aclosing(reading) as pieces:
            async for _, records, _ in pieces:
                for record in records:
                    fields = msgspec.json.decode(record.value or b"{}", type=dict[str, Any])
                    lives_ms = int(1000 * fields.get("deadline_s", 0)) + _EXPIRY_MARGIN_MS
                    at_ms = record.timestamp
                    found.setdefault(keys[record.key or b""], (at_ms, at_ms + lives_ms))
        return found

    async def _publish(self, name: str, left_s: float) -> None:
        """Publish the prompt of a repetition; one that the target cannot take is left out."""
        request = self._originals[name].request
        source = self._cards.get(request.model)
        try:
            if source is None:
                raise RehearsalRefused("prompts of a model that is gone")  # noqa: TRY301
            text = None
            if request.body is None and not self._has_same_tokens(request):
                decode = await self._decoder(source)
                text = decode(unpack_tokens(request.token_ids), False)
            prompt = rehearsal_prompt(request, source, self._plan.target, text, name, left_s)
        except RehearsalRefused as e:
            self._leave_out(name, str(e))
            return
        self._open[name] = self._clock.wall_ms() + int(1000 * left_s) + _EXPIRY_MARGIN_MS
        until_s = self._clock.now() + PUBLISH_TIMEOUT_S
        try:
            await self._publisher.publish_entry(BATCH, encode_prompt(prompt), until=until_s)
        except RecordTooLarge:
            self._leave_out(name, "prompts that are too large in JSON")

    def _leave_out(self, name: str, reason: str) -> None:
        self._left_out[reason] += 1
        self._open.pop(name, None)
        del self._originals[name]

    async def _compare(self, answer: RecordedAnswer) -> None:
        self._open.pop(answer.id, None)
        if (original := self._originals.pop(answer.id, None)) is None:
            return
        request, first = original
        has_same_tokens = self._has_same_tokens(request)
        if not has_same_tokens and request.parsing is not None and request.body is None:
            decode = await self._decoder(self._cards[request.model])
            first = first._replace(text=decode(first.tokens, True))
        pair = compare_answers(
            first, answer, is_exact=is_exact(request), has_same_tokens=has_same_tokens
        )
        self.pairs.append(pair)

    def _has_same_tokens(self, request: Request) -> bool:
        source, target = self._cards.get(request.model), self._plan.target
        if source is None or {source.kind, target.kind} != {"tokens"}:
            return False
        return source.tokenizer == target.tokenizer

    async def _decoder(self, card: ModelCard) -> TokensToText:
        if (decode := self._decoders.get(card.name)) is None:
            decode = self._decoders[card.name] = await _decoder_of(self._log, self._clock, card)
        return decode


async def _decoder_of(log: Log, clock: Clock, card: ModelCard) -> TokensToText:
    if card.tokenizer is None:
        return lambda tokens, _: bytes(t for t in tokens if t < 256).decode(errors="replace")
    pool = InlinePool()
    model = await load_model(card, ArtifactStore(log, clock, pool, None), pool, clock)
    return lambda tokens, skip: model.tokenizer.decode(tokens, skip_special=skip)


async def _kept_since(log: Log, clock: Clock, period: TimeRange) -> int:
    """The time since which all requests and answers of a period are kept, in ms since 1970; 0 if
    none was deleted. Raises RehearsalRefused if nothing of the period is kept."""
    kept_ms = 0
    for topic in (REQUESTS, RESPONSES):
        for source, offset in (await oldest_offsets(log, topic)).items():
            if offset and (record := await record_at(log, clock, source, offset)) is not None:
                kept_ms = max(kept_ms, record.timestamp)
    if kept_ms >= period.to_ms:
        raise RehearsalRefused(
            f"requests and answers are kept since {format_time(kept_ms)} UTC, and the period ends "
            f"at {format_time(period.to_ms)}",
            correction="Rehearse within the retention of `requests` and `responses`, an hour by "
            "default, or lengthen both for the next time (docs/operations.md, Rehearse a change).",
        )
    return kept_ms if kept_ms > period.from_ms else 0
