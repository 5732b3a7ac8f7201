"""Execution of one run: Started, the engine's answer, its Chunks and its outcome.

    Started ─────────► acknowledged: Chunks may go out ─────► PrefillDone after the first token
    engine.generate ─► text ─► ChunkStream ─► last Chunk acknowledged ─► RunEnd

Both lines run concurrently, so that the acknowledgement of Started hides behind the prefill. A run
of phase prefill never writes a Chunk: it ends with the engine's transfer for a decode worker, or,
on the bootstrap path, when the engine has its blocks ready in the room of the request.

    engine.generate ─► transfer ─► PrefillDone acknowledged ─► RunEnd("handed_off")

Admission, and the Finished with the outcome, are in `app/serving/run_queue.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from msgspec.structs import asdict, replace
from opentelemetry.trace import Span

from kvlane.app.engine.interface import (
    COMPILE_TIMEOUT_S,
    Engine,
    EngineDead,
    EngineError,
    EngineFull,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    not_compiled,
    token_usage,
)
from kvlane.app.engine.output_values import checked_output
from kvlane.app.preprocess.models.byte_model import Model
from kvlane.app.runtime import spans
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.serving.chunk_writer import ChunkStream, ChunkWriter, FinalChunk, StreamBroken
from kvlane.app.text.answer_parsers import has_special_tags
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.clock import BrokerClock
from kvlane.streams.codecs import token_count, unpack_tokens
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import (
    RUN_CODES,
    Assignment,
    PrefillDone,
    RunCode,
    RunKey,
    Started,
    Usage,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import LEDGER

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 1000
"""Limit of an error message about a request, in characters; engines may quote from it at length."""

AnswerText = TextStream | ParsedStream

Consumer = Callable[[EngineOutput], Awaitable[bool]]
"""Processes an output of the engine; returns whether no more are needed."""


class UnfitReplay(EngineError):
    """The tokens of an answer so far give other parts than its readers have."""


class RunEnd(NamedTuple):
    """The end of a run. `fatal_error`: the engine is dead, and the process must end. `reason`: the
    part of the message that clients may see. `stalled`, `usage`: as in Finished."""

    code: RunCode
    retryable: bool = False
    message: str = ""
    fatal_error: EngineDead | None = None
    reason: str = ""
    stalled: bool = False
    usage: Usage | None = None


@dataclass(eq=False)
class Run:
    """One run of this worker. Times are seconds of the injected clock."""

    key: RunKey
    assignment: Assignment
    run_id: int
    accepted_at: float
    deadline_at: float
    context: GenerateContext
    first_token_event: asyncio.Event
    state: Literal["waiting", "running", "closing"] = "waiting"
    started_at: float = 0.0
    """When it was passed to the engine."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    waiting_since: float | None = None
    """Since when it has been waiting for the engine's next output; None while it is not."""
    stream: ChunkStream | None = None
    task: asyncio.Task[None] | None = None
    span: Span = spans.NO_SPAN
    cancel_pending: bool = False
    """Whether it is cancelled with its first token, so that its transfer is not interrupted."""
    calls: tuple[int, int] = (0, 0)
    """Tool calls that its answer has got here: all of them, and the malformed ones."""
    is_unfit: bool = False
    """Whether the tokens so far gave other parts of the answer than readers have."""
    is_counted: bool = True
    """Whether its engine has reported how many tokens it generated."""
    forced_outcome: RunEnd | None = None
    """The outcome of a run that is stopped from outside, by cancelling its task."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; 0 for an embedding and for a prefill, whose single output counts
        as one in `generated_tokens`."""
        answers = self.assignment.request.kind != "embedding" and not self.is_prefill
        return self.generated_tokens if answers else 0

    @property
    def is_prefill(self) -> bool:
        """Whether it ends with a transfer to a decode worker, without a Chunk."""
        return self.key.phase == "prefill"

    @property
    def is_bootstrapped(self) -> bool:
        """Whether prefill and decode of its request run at the same time, and meet in a room."""
        return self.assignment.request.bootstrap_info is not None

    @property
    def is_compiling(self) -> bool:
        """Whether the engine may still compile the form that its answer must have."""
        sampling = self.assignment.request.sampling
        return sampling.guided_decoding is not None and not self.generated_tokens

    @property
    def awaits_transfer(self) -> bool:
        """Whether blocks of its prompt may be under way between two engines."""
        is_received = self.key.phase == "decode" or self.is_bootstrapped
        return is_received and not self.generated_tokens

    @property
    def ttft_ms(self) -> float:
        """From the acceptance to the first token; 0 before it."""
        return (self.first_token_at - self.accepted_at) * 1000 if self.generated_tokens else 0.0

    @property
    def prefill_ms(self) -> float:
        """From the start in the engine to the first token; 0 before it."""
        return (self.first_token_at - self.started_at) * 1000 if self.generated_tokens else 0.0

    @property
    def itl_ms(self) -> float:
        """Mean inter-token latency; 0 for fewer than two tokens."""
        if self.generated_tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) * 1000 / (self.generated_tokens - 1)

    def count_tokens(self, tokens: int, now: float) -> None:
        if not tokens:
            return
        if not self.generated_tokens:
            self.first_token_at = now
        self.generated_tokens += tokens
        self.last_token_at = now


def resumed_request(request: Request, emitted: bytes) -> Request:
    """The request for the rest of an answer whose tokens `emitted` (u32 ids) have been sent
    already: a longer prompt and lower limits (`app/lanes/remaining_work.py`).

    The tokens so far count as thinking: after its end the budget has no effect. A seed is mixed
    with the tokens; unchanged, it would repeat the same random draws.
    """
    if not emitted:
        return request
    count = token_count(emitted)
    stop, sampling = request.stop, request.sampling
    left = None if stop.max_tokens is None else max(stop.max_tokens - count, 0)
    budget = stop.max_thinking_tokens
    stop = replace(
        stop,
        max_tokens=left,
        min_tokens=max(stop.min_tokens - count, 0),
        max_thinking_tokens=None if budget is None else max(budget - count, 0),
    )
    if sampling.seed is not None:
        mixed = blake2b(b"%d" % sampling.seed + emitted, digest_size=4).digest()
        sampling = replace(sampling, seed=int.from_bytes(mixed, "little"))
    return replace(request, token_ids=request.token_ids + emitted, stop=stop, sampling=sampling)


class RunExecutor:
    """Executes runs of one epoch of a worker with its engine."""

    def __init__(
        self,
        ctx: ProcessContext,
        publisher: RecordPublisher,
        engine: Engine,
        chunks: ChunkWriter,
        model: Model,
        worker: str,
        epoch: int,
        *,
        broker_clock: BrokerClock,
        lease_s: float = 0.0,
    ) -> None:
        """`lease_s`: time that the engine holds the blocks of a prefill; 0 if unknown."""
        self._ctx = ctx
        self._publisher = publisher
        self._engine = engine
        self._chunks = chunks
        self._model = model
        self._worker = worker
        self._epoch = epoch
        self._broker_clock = broker_clock
        self._lease_s = lease_s

    async def execute(self, run: Run) -> RunEnd:
        """Run it to its end. If cancelled without `run.forced_outcome`, nothing more is written."""
        if run.forced_outcome is not None:
            return run.forced_outcome
        assignment = run.assignment
        if assignment.request.traceparent:
            run.span = self._start_span(
                "worker.run",
                run,
                below=spans.route_of(run.key.phase),
                own_id=spans.run_of(run.key.phase),
            )
        run.stream = stream = self._chunks.open(
            run.key.id,
            run.key.attempt,
            str(run.run_id),
            index=token_count(assignment.taken),
            chars=assignment.taken_chars,
            model=assignment.request.asked_model,
        )
        announced = self._ctx.spawn(f"announce {run.key.id}", self._announce(run, stream))
        try:
            if run.is_prefill:
                outcome = await self._outcome(run, self._hand_over(run, stream, announced))
            else:
                outcome = await self._outcome(run, self._answer(run, stream))
            run.state = "closing"
            if run.generated_tokens and not stream.is_broken and not run.is_prefill:
                await asyncio.wait([announced])  # PrefillDone must precede Finished
            run.span.set_attribute("code", outcome.code)
            return outcome
        finally:
            announced.cancel()
            stream.discard()
            run.span.end()

    def _start_span(self, name: str, run: Run, *, below: str, own_id: str = "") -> Span:
        """A span of a run whose request is sampled."""
        return spans.start_span(
            name,
            run.assignment.request,
            {"worker_id": self._worker, "epoch": self._epoch, "phase": run.key.phase},
            run.key.attempt,
            below=below,
            own_id=own_id,
        )

    async def abort(self, run: Run) -> None:
        """Pass an explicit cancel on to the engine; an error is only logged."""
        try:
            await self._engine.abort(run.context)
        except Exception:
            log.exception("%s: the engine failed to abort it", run.key.id)

    async def _announce(self, run: Run, stream: ChunkStream) -> None:
        """Publish Started; then, unless it is a prefill, PrefillDone after the first token."""
        assignment, request_id = run.assignment, run.key.id
        started = Started(
            **asdict(run.key), worker=self._worker, epoch=self._epoch,
            run=run.run_id, origin=assignment.origin,
            responses_from=assignment.responses_from, deadline_ms=assignment.deadline_ms,
            prompt_tokens=assignment.request.prompt_tokens,
            is_prompt=assignment.request.queued_ms > 0, account=assignment.request.account,
        )  # fmt: skip
        try:
            await self._publisher.publish(LEDGER, request_id, started, until=run.deadline_at)
        except AppendFailed as e:
            log.warning("%s: Started was not acknowledged before its deadline: %s", request_id, e)
            stream.discard()
            return
        stream.release()
        if run.is_prefill:
            return
        await run.first_token_event.wait()
        try:
            await self._publisher.publish_once(LEDGER, request_id, self._prefill_done(run))
        except AppendFailed as e:  # routers overestimate the load of this worker for a while
            log.warning("%s: PrefillDone was not acknowledged: %s", request_id, e)

    def _prefill_done(self, run: Run, handoff: bytes = b"", lease_until_ms: int = 0) -> PrefillDone:
        return PrefillDone(
            **asdict(run.key), worker=self._worker, epoch=self._epoch,
            run=run.run_id, cached_tokens=run.cached_tokens,
            ttft_ms=run.ttft_ms, prefill_ms=run.prefill_ms, handoff=handoff,
            lease_until_ms=lease_until_ms,
        )  # fmt: skip

    async def _outcome(self, run: Run, work: Coroutine[Any, Any, RunEnd]) -> RunEnd:
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if not task.cancelling():
                return RunEnd("error", retryable=True, message="cancelled within the engine")
            if run.forced_outcome is None or task.uncancel() > 0:
                raise
            return run.forced_outcome
        except StreamBroken:
            return RunEnd("broken", message="a Chunk was not acknowledged")
        except EngineError as e:
            fatal = e if isinstance(e, EngineDead) else None
            is_full = isinstance(e, EngineFull) and not run.generated_tokens
            code: RunCode = "worker_full" if is_full else "error"
            reason = _text_of(e.reason)[:MAX_REASON_CHARS]
            stalled = e.is_stall and not run.generated_tokens
            return RunEnd(code, True, _text_of(e), fatal, reason, stalled)
        except Exception as e:
            log.exception("%s: the engine failed", run.key.id)
            return RunEnd("error", retryable=True, message=_text_of(repr(e)))

    async def _hand_over(
        self, run: Run, stream: ChunkStream, announced: asyncio.Task[None]
    ) -> RunEnd:
        """Compute the prompt and publish the engine's transfer. Raises EngineErrors. No reader has
        seen anything of it, so every failure leaves the request to its router."""
        clock, request = self._ctx.clock, self._request(run)
        request = replace(request, stop=replace(request.stop, max_tokens=1, min_tokens=0))
        run.started_at = clock.now()
        last = await self._generate(run, request, _discard)
        ended_at = clock.now()
        run.state = "closing"
        if last.finish_reason == "cancelled":
            # `cancelled` would mean that a last Chunk is in the log.
            return RunEnd("broken", message="cancelled during its prefill")
        if last.finish_reason == "error":
            raise EngineError(last.message)
        if last.transfer is None and not run.is_bootstrapped:
            raise EngineError(
                f"the engine of worker {self._worker} gave no transfer parameters for request "
                f"{run.key.id}: configure its KV connector"
            )
        run.count_tokens(1, ended_at)
        await asyncio.wait([announced])
        if stream.is_broken:
            return RunEnd("broken", message="Started was not acknowledged")
        return await self._publish_handoff(run, last.transfer or b"", ended_at)

    async def _publish_handoff(self, run: Run, transfer: bytes, ended_at: float) -> RunEnd:
        """Publish PrefillDone with the transfer, up to the deadline and the end of its lease.

        The lease counts from the start of the prefill: a stalled worker reads its end late, and a
        decode after the lease could fetch the blocks of another prompt. The append may take longer:
        routers read the end of the lease.
        """
        lease_s, clock, until = self._lease_s, self._ctx.clock, run.deadline_at
        if run.is_bootstrapped:
            lease_s = 0.0  # the decode worker waits for the blocks already
        if lease_s:
            until = min(until, ended_at + lease_s)

        lease_until_ms = 0
        if lease_s:
            passed_s = clock.now() - run.started_at
            lease_until_ms = self._broker_clock.now_ms() + int((lease_s - passed_s) * 1000)
        done = self._prefill_done(run, transfer, lease_until_ms)
        try:
            await self._publisher.publish(LEDGER, run.key.id, done, until=until)
        except (AppendFailed, BrokerUnavailable) as e:
            return RunEnd("broken", message=f"PrefillDone was not acknowledged: {e}")
        return RunEnd("handed_off")

    async def _answer(self, run: Run, stream: ChunkStream) -> RunEnd:
        """Generate and send the answer up to its last acknowledgement. Raises retryable
        EngineErrors."""
        assignment = run.assignment
        taken = unpack_tokens(assignment.taken)
        try:
            text = self._text_stream(assignment, taken)
        except UnfitReplay:
            run.is_unfit = True
            raise
        if assignment.request.output.logprobs is not None:
            text.token_chars = []
        invalid, status = "", 0
        run.started_at = self._ctx.clock.now()
        try:
            ended = await self._stream(run, stream, text)
        except EngineError as e:
            if e.retryable:
                raise
            ended = EngineOutput.error(_text_of(e))
            if isinstance(e, InvalidRequest):
                invalid, status = ended.message[:MAX_REASON_CHARS], e.status
        run.state = "closing"
        counts, reason = _counts(run, ended, text.reasoning_tokens), ended.finish_reason
        run.is_counted = counts is not None and "completion_tokens" not in counts.unknown
        if run.generated_tokens and counts is not None:
            # An engine that returns text has a more exact count than its outputs.
            run.generated_tokens = counts.completion_tokens - len(taken) or run.generated_tokens
        assert reason is not None
        rest = text.end()
        if isinstance(text, ParsedStream):
            run.calls = text.new_calls
        reason = text.finish_reason(reason)
        last = FinalChunk(
            reason, counts, ended.stop_reason, invalid, status if status != 400 else 0
        )
        await stream.finish(last, rest.text, rest.data)
        return RunEnd(RUN_CODES[reason], message=ended.message, usage=counts)

    def _text_stream(self, assignment: Assignment, taken: Sequence[int]) -> AnswerText:
        """The decoder of an answer, after the tokens that readers have. Raises EngineError if it
        does not give the text and the data that readers have."""
        request = assignment.request
        if request.parsing is None:
            return self._model.text_stream(request, taken)
        shown = request
        if has_special_tags(request.parsing):
            shown = replace(request, output=replace(request.output, skip_special_tokens=False))
        try:
            text = ParsedStream(
                self._model.text_stream(shown), request.parsing, request.id, taken,
                self._engine.calls_parser,
            )  # fmt: skip
        except ValueError as e:
            raise EngineError(str(e)) from e
        read = (assignment.taken_chars, assignment.taken_data_chars)
        if taken and read[1] >= 0 and (text.chars, text.data_chars) != read:
            raise UnfitReplay(
                f"the tokens of its answer give {text.chars} characters and {text.data_chars} of "
                f"data here, and its readers have {read[0]} and {read[1]}: the versions of its "
                "workers differ"
            )
        return text

    async def _stream(self, run: Run, stream: ChunkStream, text: AnswerText) -> EngineOutput:
        """Send the engine's outputs as they come; returns the final one, already sent.

        A stop string, which only the text contains, may end the answer before the engine's stream,
        whose closing stops the engine.
        """
        request = self._request(run)
        if text.ended is not None:
            return _ended(text, EngineOutput.stop())
        if request.stop.max_tokens == 0:
            return EngineOutput.length()
        return _ended(
            text, await self._generate(run, request, partial(self._pass_on, run, stream, text))
        )

    def _request(self, run: Run) -> Request:
        """The request for the engine. Raises EngineError if it cannot be resumed."""
        request = resumed_request(run.assignment.request, run.assignment.taken)
        run.context.taken_tokens = token_count(run.assignment.taken)
        if run.assignment.taken and not self._chunks.with_tokens:
            # The log would not show where this run resumed, and no other could resume it.
            raise EngineError("the engine returns no token ids to resume from", retryable=True)
        if (rank := run.assignment.rank) != (request.hints.dp_rank or 0):
            request = replace(request, hints=replace(request.hints, dp_rank=rank))
        return request

    async def _generate(self, run: Run, request: Request, consume: Consumer) -> EngineOutput:
        """Pass the engine's outputs on; returns the last one. Raises EngineErrors."""
        clock, span = self._ctx.clock, spans.NO_SPAN
        if request.traceparent:
            span = self._start_span("engine.generate", run, below=spans.run_of(run.key.phase))
            run.context.traceparent = spans.traceparent_of(span, request.traceparent)
        run.waiting_since = clock.now()
        compile_limit = asyncio.timeout(COMPILE_TIMEOUT_S if run.is_compiling else None)
        try:
            async with (
                compile_limit,
                aclosing(self._engine.generate(request, run.context)) as outputs,
            ):
                async for each in outputs:
                    compile_limit.reschedule(None)
                    output = checked_output(each)
                    run.waiting_since = None  # waiting for the log does not count as an idle engine
                    if output.usage is not None:
                        run.cached_tokens = output.usage.cached_tokens
                    if await consume(output) or output.finish_reason is not None:
                        return output
                    if run.cancel_pending and run.generated_tokens and not run.context.is_stopped:
                        run.context.cancel()
                        await self.abort(run)
                    run.waiting_since = clock.now()
        except TimeoutError:
            if not compile_limit.expired():
                raise
            raise not_compiled() from None
        finally:
            run.waiting_since = None
            span.set_attribute("cached_tokens", run.cached_tokens)
            span.set_attribute("output_tokens", run.output_tokens)
            span.end()
        raise EngineError("the engine ended its answer without a finish reason", retryable=True)

    async def _pass_on(
        self, run: Run, stream: ChunkStream, text: AnswerText, output: EngineOutput
    ) -> bool:
        """Send the content of an output; returns whether it ended the answer."""
        if output.is_empty:
            return False
        # Text without token ids counts as one token: most servers send each token separately.
        piece = text.feed(output.token_ids) if output.token_ids else text.feed_text(output.text)
        run.count_tokens(piece.tokens, self._ctx.clock.now())
        run.context.notify_first_token()
        log_probs = (output.log_probs or ())[: piece.tokens]
        token_chars = text.token_chars or ()
        if token_chars:
            text.token_chars = []
        await stream.push(
            output.token_ids[: piece.tokens],
            piece.text,
            log_probs,
            piece.data or output.data,
            token_chars,
        )
        return piece.finish_reason is not None


async def _discard(_: EngineOutput) -> bool:
    """The consumer of a prefill, whose tokens are generated again by the decode worker."""
    return False


def _text_of(error: Exception | str) -> str:
    """The message of an error of an engine, without characters that no record can carry."""
    return str(error).encode(errors="replace").decode()


def _counts(run: Run, output: EngineOutput, reasoning_tokens: int | None) -> Usage | None:
    """Token counts of a request over all its attempts; of a body, the engine's own counts, if it
    reports any."""
    request, taken = run.assignment.request, token_count(run.assignment.taken)
    if request.body is not None:
        return output.usage
    prefill = request.prefill_result
    details = prefill.prompt_tokens_details if prefill is not None else None
    cached_tokens = run.cached_tokens if details is None else details.cached_tokens or 0
    counts = token_usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=taken + run.generated_tokens,
        # To the engine, tokens of earlier attempts belong to the prompt; to the client they do not.
        cached_tokens=min(cached_tokens, request.prompt_tokens),
    )
    if reasoning_tokens is None:
        return counts
    return replace(
        counts, details={"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    )


def _ended(text: AnswerText, output: EngineOutput) -> EngineOutput:
    """The end of an answer: by its text, which has the limits of the whole answer, or by its
    engine."""
    if text.ended is None or text.ended.finish_reason is None:
        return output
    return replace(
        output, finish_reason=text.ended.finish_reason, stop_reason=text.ended.stop_reason
    )
