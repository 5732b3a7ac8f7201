"""One run, executed: Started, the engine's answer, its Chunks, and how it ended.

    Started ─────────► acknowledged: Chunks may go out ─────► PrefillDone after the first token
    engine.generate ─► text ─► ChunkStream ─► last Chunk acknowledged ─► Outcome

Both lines run side by side, so that the acknowledgement of Started hides behind the prefill.
Owns the run's tokens, text and times. Who may run, and the Finished that reports the outcome, are
`app/serving/runs.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from msgspec.structs import replace

from app.engine.contract import (
    Engine,
    EngineDead,
    EngineError,
    EngineFull,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    usage,
)
from app.lifetime import Lifetime
from app.preprocess.byte_model import Model
from app.preprocess.stops import Piece, TextStream
from app.serving.chunks import ChunkStream, ChunkWriters, Last, StreamBroken
from streams.codecs import token_count, unpack_tokens
from streams.errors import AppendFailed
from streams.outbox import Outbox
from streams.records import (
    Assignment,
    FinishReason,
    PrefillDone,
    Request,
    RunCode,
    RunKey,
    Started,
    Usage,
)
from streams.topics import LEDGER

log = logging.getLogger(__name__)

LONGEST_REASON = 1000
"""Of what is wrong with a request, in characters; engines may quote from it at any length."""

_CODES: dict[FinishReason, RunCode] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "cancelled",
    "error": "error",
    "content_filter": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
}


class Outcome(NamedTuple):
    """How a run ended. `fatal`: the engine is dead, and the process has to go with it."""

    code: RunCode
    retryable: bool = False
    message: str = ""
    fatal: EngineDead | None = None


@dataclass(eq=False)
class Run:
    """One run of this worker. Times are of the injected clock, in seconds."""

    key: RunKey
    assignment: Assignment
    number: int
    accepted_at: float
    deadline: float
    context: GenerateContext
    first_token: asyncio.Event
    state: Literal["waiting", "running", "closing"] = "waiting"
    started_at: float = 0.0
    """When it was given to the engine."""
    tokens: int = 0
    cached_tokens: int = 0
    handoff: bytes = b""
    """What a prefill hands to decode, from its engine."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    heard_at: float | None = None
    """Since when it waits for the engine's next word; None while it does not."""
    stream: ChunkStream | None = None
    task: asyncio.Task[None] | None = None
    stopped_as: Outcome | None = None
    """What the run ends as when it is stopped from outside; its task is cancelled for it."""

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer; an embedding is none, though what it says counts as one here."""
        return 0 if self.assignment.request.kind == "embedding" else self.tokens

    @property
    def ttft_ms(self) -> float:
        """From the acceptance to the first token; 0 before."""
        return (self.first_token_at - self.accepted_at) * 1000 if self.tokens else 0.0

    @property
    def prefill_ms(self) -> float:
        """From being given to the engine to the first token; 0 before."""
        return (self.first_token_at - self.started_at) * 1000 if self.tokens else 0.0

    @property
    def itl_ms(self) -> float:
        """Mean time from token to token; 0 for fewer than two."""
        if self.tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) * 1000 / (self.tokens - 1)

    def count(self, tokens: int, now: float) -> None:
        """So many more tokens of the answer came out of the engine."""
        if not tokens:
            return
        if not self.tokens:
            self.first_token_at = now
        self.tokens += tokens
        self.last_token_at = now


def continuation(request: Request, taken: bytes) -> Request:
    """What is left to generate when `taken` (u32 token ids) is out: longer prompt, lower limits.

    A seed is mixed with the tokens: drawn again as it is, it would repeat the same draws.
    """
    if not taken:
        return request
    count = token_count(taken)
    stop, sampling = request.stop, request.sampling
    left = None if stop.max_tokens is None else max(stop.max_tokens - count, 0)
    stop = replace(stop, max_tokens=left, min_tokens=max(stop.min_tokens - count, 0))
    if sampling.seed is not None:
        mixed = blake2b(b"%d" % sampling.seed + taken, digest_size=4).digest()
        sampling = replace(sampling, seed=int.from_bytes(mixed, "little"))
    return replace(request, token_ids=request.token_ids + taken, stop=stop, sampling=sampling)


class Executor:
    """Executes runs of one epoch of a worker with its engine."""

    def __init__(
        self,
        life: Lifetime,
        outbox: Outbox,
        engine: Engine,
        chunks: ChunkWriters,
        model: Model,
        worker: str,
        epoch: int,
    ) -> None:
        self._life = life
        self._outbox = outbox
        self._engine = engine
        self._chunks = chunks
        self._model = model
        self._worker = worker
        self._epoch = epoch

    async def execute(self, run: Run) -> Outcome:
        """Run it to its end. Cancelled without `run.stopped_as`, it leaves no further word."""
        if run.stopped_as is not None:
            return run.stopped_as
        assignment = run.assignment
        run.stream = stream = self._chunks.open(
            run.key.id,
            run.key.attempt,
            str(run.number),
            index=token_count(assignment.taken),
            chars=assignment.taken_chars,
        )
        announced = self._life.spawn(f"announce {run.key.id}", self._announce(run, stream))
        try:
            outcome = await self._outcome(run, stream)
            run.state = "closing"
            if run.tokens and not stream.broken:
                await asyncio.wait([announced])  # PrefillDone comes before Finished
            return outcome
        finally:
            announced.cancel()
            stream.abandon()

    async def abort(self, run: Run) -> None:
        """Pass an explicit cancel on to the engine; what it says about it is only logged."""
        try:
            await self._engine.abort(run.context)
        except Exception:
            log.exception("abort of %s failed", run.key.id)

    async def _announce(self, run: Run, stream: ChunkStream) -> None:
        assignment, (request_id, attempt, phase) = run.assignment, run.key
        started = Started(
            id=request_id, attempt=attempt, phase=phase, worker=self._worker, epoch=self._epoch,
            run=run.number, origin=assignment.origin, responses_from=assignment.responses_from,
            deadline_ms=assignment.deadline_ms,
            prompt_tokens=assignment.request.prompt_tokens,
        )  # fmt: skip
        try:
            await self._outbox.persist(LEDGER, request_id, started, until=run.deadline)
        except AppendFailed as e:
            log.warning("%s: Started was not acknowledged before its deadline: %s", request_id, e)
            stream.abandon()
            return
        stream.release()
        await run.first_token.wait()
        done = PrefillDone(
            id=request_id, attempt=attempt, phase=phase, worker=self._worker, epoch=self._epoch,
            run=run.number, cached_tokens=run.cached_tokens, ttft_ms=run.ttft_ms,
            prefill_ms=run.prefill_ms, handoff=run.handoff,
        )  # fmt: skip
        try:
            await self._outbox.send(LEDGER, request_id, done)
        except AppendFailed as e:  # only the load of this worker is overestimated for a while
            log.warning("%s: PrefillDone was not acknowledged: %s", request_id, e)

    async def _outcome(self, run: Run, stream: ChunkStream) -> Outcome:
        """The answer's outcome, whatever goes wrong in it."""
        try:
            return await self._answer(run, stream)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if not task.cancelling():
                return Outcome("error", retryable=True, message="cancelled inside the engine")
            if run.stopped_as is None or task.uncancel() > 0:
                raise
            return run.stopped_as
        except StreamBroken:
            return Outcome("broken", message="a Chunk was not acknowledged")
        except EngineError as e:
            fatal = e if isinstance(e, EngineDead) else None
            is_full = isinstance(e, EngineFull) and not run.tokens
            code: RunCode = "worker_full" if is_full else "error"
            return Outcome(code, retryable=True, message=str(e), fatal=fatal)
        except Exception as e:
            log.exception("%s: the engine failed", run.key.id)
            return Outcome("error", retryable=True, message=repr(e))

    async def _answer(self, run: Run, stream: ChunkStream) -> Outcome:
        """Generate and send the answer, up to its last ack. Raises retryable EngineErrors."""
        assignment = run.assignment
        taken = unpack_tokens(assignment.taken)
        text = self._model.text_stream(assignment.request, taken)
        invalid = ""
        run.started_at = self._life.clock.now()
        try:
            ended = await self._generate(run, stream, text)
        except EngineError as e:
            if e.retryable:
                raise
            ended = EngineOutput.error(str(e))
            invalid = str(e)[:LONGEST_REASON] if isinstance(e, InvalidRequest) else ""
        run.state = "closing"
        counts, reason = _counts(run, ended), ended.finish_reason
        if run.tokens:  # an engine that gives text counts better than its outputs were counted
            run.tokens = counts.completion_tokens - len(taken) or run.tokens
        assert reason is not None
        await stream.finish(Last(reason, counts, ended.stop_reason, invalid), text.end())
        return Outcome(_CODES[reason], message=ended.message)

    async def _generate(self, run: Run, stream: ChunkStream, text: TextStream) -> EngineOutput:
        """Pass the engine's outputs on as they come; how they ended, its tokens passed on.

        The answer may end before the engine does: at a stop string, which only the text shows.
        Leaving its stream tells it so.
        """
        request = continuation(run.assignment.request, run.assignment.taken)
        if run.assignment.taken and not self._chunks.with_tokens:
            # Readers could not tell where it went on, and nobody could go on from there.
            raise EngineError("the engine gives no token ids, to go on with others", retryable=True)
        if (rank := run.assignment.rank) != (request.hints.dp_rank or 0):
            request = replace(request, hints=replace(request.hints, dp_rank=rank))
        if text.ended is not None:
            return _ended(text, EngineOutput.stop())
        if request.stop.max_tokens == 0:
            return EngineOutput.length()
        clock = self._life.clock
        run.heard_at = clock.now()
        try:
            async with aclosing(self._engine.generate(request, run.context)) as outputs:
                async for output in outputs:
                    run.heard_at = None  # what the log keeps waiting is not the engine's silence
                    over = await self._pass_on(run, stream, text, output)
                    if over or output.finish_reason is not None:
                        return _ended(text, output)
                    run.heard_at = clock.now()
        finally:
            run.heard_at = None
        raise EngineError("the engine ended its answer without a finish reason", retryable=True)

    async def _pass_on(
        self, run: Run, stream: ChunkStream, text: TextStream, output: EngineOutput
    ) -> bool:
        """Send what an output brings; whether that ended the answer."""
        if output.usage is not None:
            run.cached_tokens = output.usage.cached_tokens
        if output.transfer is not None:
            run.handoff = output.transfer
        if output.is_empty:
            return False
        # Text that comes without tokens counts as one: most servers send each token by itself.
        piece = text.feed(output.token_ids) if output.token_ids else Piece(output.text, 1)
        run.count(piece.tokens, self._life.clock.now())
        run.context.notify_first_token()
        log_probs = (output.log_probs or ())[: piece.tokens]
        await stream.push(output.token_ids[: piece.tokens], piece.text, log_probs, output.data)
        return piece.finish_reason is not None


def _counts(run: Run, ended: EngineOutput) -> Usage:
    """What a request took, over all its attempts; of a body, what its engine has counted."""
    request, taken = run.assignment.request, token_count(run.assignment.taken)
    if request.body is not None:
        return ended.usage or usage(0, run.tokens)
    return usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=taken + run.tokens,
        # To the engine the tokens taken belong to the prompt, to the client they do not.
        cached_tokens=min(run.cached_tokens, request.prompt_tokens),
    )


def _ended(text: TextStream, output: EngineOutput) -> EngineOutput:
    """How an answer ended: as its text says, which sees the limits of the whole, or its engine."""
    if text.ended is None or text.ended.finish_reason is None:
        return output
    return replace(
        output, finish_reason=text.ended.finish_reason, stop_reason=text.ended.stop_reason
    )
