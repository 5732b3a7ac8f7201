"""An engine without a model that behaves as one with: batches, a prefix cache, times, preemption.

What a step costs and does is `app/engine/step.py`'s; here it happens, on the injected clock, for
real requests with real tokens. What the tokens are is a `Continuation`. Cache events come out as an
engine's own: blocks under opaque hashes, with the tokens in them, once the step that computed them
is over.

One task makes the steps, from `start` to `cleanup`. Cancels count between two steps. If that task
dies, every request fails with EngineDead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from app.engine.batch import EngineState, Shape, Step
from app.engine.batch import Sequence as Modelled
from app.engine.continuation import Continuation, echo
from app.engine.contract import (
    BlocksListener,
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
    usage,
)
from app.engine.simulated_run import MEDIUM, SimulatedRun
from app.engine.step import admit, cancel, clear, step
from indexer.engine_events import AllCleared, BlocksRemoved, EngineEvent
from streams.clock import Clock
from streams.codecs import token_count
from streams.records import EngineConfig, EngineFigures, Request

log = logging.getLogger(__name__)

LATE_S = 1.0
"""How far the engine may lag behind its own times and still catch up, in seconds."""
SHAPE = Shape(block_size=16, blocks=16_384)


class SimulatedEngine(Engine):
    """See the module.

    `speedup`: how many times faster than the modelled hardware; infinite for no waiting at all.
    `max_waiting`: requests that may wait for a place in the batch; more fail, retryable. The
    context must fit into the cache of `shape`, or ValueError is raised.
    """

    def __init__(
        self,
        clock: Clock,
        shape: Shape = SHAPE,
        *,
        model: str = "simulated",
        context_length: int = 131_072,
        continuation: Continuation = echo,
        speedup: float = 1.0,
        max_waiting: int = 1024,
        on_blocks: BlocksListener | None = None,
    ) -> None:
        if context_length > shape.capacity_tokens:
            raise ValueError(f"the cache holds {shape.capacity_tokens} tokens, the context more")
        if speedup <= 0:
            raise ValueError(f"speedup {speedup}: above 0")
        self._clock = clock
        self._shape = shape
        self._model = model
        self._context_length = context_length
        self._continuation = continuation
        self._speedup = speedup
        self._max_waiting = max_waiting
        self._on_blocks = on_blocks
        self._state = EngineState(shape)
        self._runs: dict[SimulatedRun, None] = {}
        """In the order of arrival, so that all that is done to them together has an order."""
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._dead: EngineError | None = None

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._state.running

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in it."""
        return self._state.waiting_count

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold now."""
        return self._state.cache.used

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._state.clock

    def listen(self, listener: BlocksListener) -> None:
        """As `Engine.listen`."""
        self._on_blocks = listener

    def figures(self) -> EngineFigures:
        """As `Engine.figures`."""
        return EngineFigures(
            running=self.running,
            waiting=self.waiting,
            kv_used_blocks=self.used_blocks,
            kv_total_blocks=self._shape.blocks,
            steps=self.steps,
        )

    async def start(self, worker_id: str) -> EngineConfig:
        """Ready at once."""
        log.info("simulated engine of %s: %s", worker_id, self._shape)
        self._stepping = asyncio.create_task(self._make_steps(), name=f"{worker_id}/steps")
        return EngineConfig(
            model=self._model,
            context_length=self._context_length,
            kv_cache_block_size=self._shape.block_size,
            total_kv_blocks=self._shape.blocks,
            max_num_seqs=self._shape.max_sequences,
            max_num_batched_tokens=self._shape.max_batched_tokens,
            curve=self._shape.curves.numbers(self._speedup),
        )

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The continuation's tokens, as the steps make them."""
        prompt_tokens = token_count(request.token_ids)
        room = self._context_length - prompt_tokens
        wanted = request.stop.max_tokens
        limit = room if wanted is None else min(wanted, room)
        if limit <= 0:
            yield EngineOutput.length().with_usage(usage(prompt_tokens, 0))
            return
        self._check_admission(prompt_tokens)
        run = SimulatedRun(request, context, self._continuation, limit, self._shape.block_size)
        admit(self._state, run.sequence)
        self._runs[run] = None
        self._work.set()
        try:
            while run.finish_reason is None:
                await run.changed.wait()
                run.changed.clear()
                if run.error is not None:
                    raise run.error
                yield run.output()
        finally:
            self._leave(run)

    def clear_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while requests hold any."""
        cleared = clear(self._state)
        if cleared:
            self._tell([AllCleared()])
        return cleared

    async def cleanup(self) -> None:
        """Stop stepping; what is still open fails."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.cancel()
            await asyncio.wait([stepping])
            self._fail(EngineError("the engine was shut down", retryable=True))

    # --- steps -----------------------------------------------------------------------------------

    async def _make_steps(self) -> None:
        try:
            await self._step_after_step()
        except Exception as e:
            log.exception("the simulated engine failed")
            self._fail(EngineDead(repr(e)))

    async def _step_after_step(self) -> None:
        """Steps follow one another without a gap, whatever the clock's sleep adds to them."""
        clock, over_at = self._clock, self._clock.now()
        while True:
            self._drop_stopped()
            done = step(self._state)
            if done is None:
                self._work.clear()
                await self._work.wait()
                over_at = clock.now()
                continue
            over_at = max(over_at, clock.now() - LATE_S) + done.duration_ms / 1000 / self._speedup
            await clock.sleep(max(over_at - clock.now(), 0.0))
            self._deliver(done)

    def _check_admission(self, prompt_tokens: int) -> None:
        """Raises EngineError for what cannot be taken."""
        if self._dead is not None:
            raise self._dead
        if not prompt_tokens:
            raise EngineError("an empty prompt")
        if self.waiting >= self._max_waiting:
            raise EngineError(f"{self.waiting} requests are waiting already", retryable=True)

    def _leave(self, run: SimulatedRun) -> None:
        """A run is over, or nobody listens to it any more."""
        self._runs.pop(run, None)
        cancel(self._state, run.sequence)

    def _drop_stopped(self) -> None:
        for run in [run for run in self._runs if run.context.stopped]:
            run.finish("cancelled")
            self._leave(run)

    def _deliver(self, done: Step) -> None:
        """A step is over: what it did to the cache, and a token for everybody who got one."""
        events: list[EngineEvent] = []
        if done.removed:
            events.append(BlocksRemoved(done.removed, MEDIUM))
        events += [_run_of(blocks.sequence).stored(blocks) for blocks in done.stored]
        if events:
            self._tell(events)
        finished = set(done.finished)
        for sequence in (*done.decoded, *(c.sequence for c in done.chunks if c.last)):
            run = _run_of(sequence)
            if run not in self._runs:
                continue  # cancelled, or left, while the step was under way
            run.make_token(last=sequence in finished)
            if run.finish_reason is not None:
                self._leave(run)

    def _tell(self, events: Sequence[EngineEvent]) -> None:
        if self._on_blocks is not None:
            self._on_blocks(events)

    def _fail(self, error: EngineError) -> None:
        """Nothing will ever be generated again."""
        self._dead = error
        for run in self._runs:
            run.fail(error)


def _run_of(sequence: Modelled) -> SimulatedRun:
    run = sequence.key
    assert isinstance(run, SimulatedRun)
    return run
