"""Simulated engine: batching, prefix cache, step times and preemption, without a model.

Runs the steps of `app/engine/simulated/step.py` on the injected clock, for real requests with the
tokens of a `Continuation`. Cache events are those of a real engine, at the end of the step that
computed the blocks. Blocks of a prefill are held for decode (`app/engine/simulated/transfers.py`).

One task runs the steps; if it fails, every request fails with EngineDead. A cancel takes effect
between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib.metadata import version

from kvlane.app.engine.interface import (
    TEXT_ONLY_UNSUPPORTED,
    Engine,
    EngineDead,
    EngineError,
    EngineOutput,
    GenerateContext,
    KvEventListener,
    check_text_only,
    token_usage,
)
from kvlane.app.engine.simulated.batch import HELD, BatchState, EngineLimits, StepResult
from kvlane.app.engine.simulated.batch import BatchSequence as Modelled
from kvlane.app.engine.simulated.simulated_run import STORAGE_MEDIUM, SimulatedRun
from kvlane.app.engine.simulated.step import add_sequence, release_held, remove_sequence, run_step
from kvlane.app.engine.simulated.text_generator import Continuation, echo_continuation
from kvlane.app.engine.simulated.transfers import KvTransfers
from kvlane.indexer.cache_events.engine_events import BlocksRemoved, EngineEvent
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import token_count
from kvlane.streams.record_base import JsonText
from kvlane.streams.records import EngineConfig, EngineStats
from kvlane.streams.request import Request

log = logging.getLogger(__name__)

MAX_LAG_S = 1.0
"""Lag of steps behind their schedule up to which they catch up, in seconds."""
BOOTSTRAP_PORT = 8998
DEFAULT_LIMITS = EngineLimits(block_size=16, cache_blocks=16_384)


class SimulatedEngine(Engine):
    """An engine whose steps are simulated.

    `speedup`: relative to the modelled hardware; infinite for steps without duration.
    `max_waiting`: bound on requests that wait for the batch; more fail as retryable. `transfers`:
    shared by engines that hand over to each other. Raises ValueError if the context does not fit
    into the cache.
    """

    def __init__(
        self,
        clock: Clock,
        limits: EngineLimits = DEFAULT_LIMITS,
        *,
        model: str = "simulated",
        context_length: int = 131_072,
        continuation: Continuation = echo_continuation,
        speedup: float = 1.0,
        max_waiting: int = 1024,
        listener: KvEventListener | None = None,
        transfers: KvTransfers | None = None,
    ) -> None:
        if context_length > limits.capacity_tokens:
            raise ValueError(
                f"the context of {context_length} tokens exceeds the cache of "
                f"{limits.capacity_tokens}"
            )
        if speedup <= 0:
            raise ValueError(f"speedup is {speedup}, and must be above 0")
        self._clock = clock
        self._shape = limits
        self._model = model
        self._context_length = context_length
        self._continuation = continuation
        self._speedup = speedup
        self._max_waiting = max_waiting
        self._on_blocks = listener
        self._transfers = transfers or KvTransfers(clock)
        self._name = ""
        """Its name among `transfers`."""
        self._state = BatchState(limits)
        self._runs: dict[SimulatedRun, None] = {}
        """In the order of arrival, so that actions on all of them have a fixed order."""
        self._meetings: dict[GenerateContext, asyncio.Task[JsonText]] = {}
        """Of the requests that wait for their blocks in a room."""
        self._work = asyncio.Event()
        self._step_loop: asyncio.Task[None] | None = None
        self._dead: EngineError | None = None

    @property
    def running_count(self) -> int:
        return self._state.running_count

    @property
    def waiting_count(self) -> int:
        return self._state.waiting_count

    @property
    def used_blocks(self) -> int:
        return self._state.cache.used_blocks

    @property
    def step_count(self) -> int:
        return self._state.step_count

    @property
    def transfer_name(self) -> str:
        """Its name among its transfers; empty before the start."""
        return self._name

    def set_kv_event_listener(self, listener: KvEventListener) -> None:
        self._on_blocks = listener

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running_count,
            waiting=self.waiting_count,
            kv_used_blocks=self.used_blocks,
            kv_total_blocks=self._shape.cache_blocks,
            steps=self.step_count,
        )

    def versions(self) -> Mapping[str, str]:
        return {"simulated": version("kvlane")}

    async def start(self, worker_id: str) -> EngineConfig:
        log.info("simulated engine of %s: %s", worker_id, self._shape)
        self._name = self._transfers.add_engine(worker_id)
        has_bootstrap = self._transfers.has_bootstrap
        self._step_loop = asyncio.create_task(self._steps_task(), name=f"{worker_id}/steps")
        return EngineConfig(
            model=self._model,
            context_length=self._context_length,
            kv_cache_block_size=self._shape.block_size,
            total_kv_blocks=self._shape.cache_blocks,
            max_num_seqs=self._shape.max_sequences,
            max_num_batched_tokens=self._shape.max_batched_tokens,
            bootstrap_host=worker_id if has_bootstrap else None,
            bootstrap_port=BOOTSTRAP_PORT if has_bootstrap else None,
            curve=self._shape.curves.coefficients(self._speedup),
            unsupported=TEXT_ONLY_UNSUPPORTED,
            transfer_lease_s=self._transfers.model.lease_s,
            transfer_bytes_per_token=self._transfers.model.bytes_per_token,
        )

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the tokens of the continuation as the steps generate them."""
        check_text_only(request)
        prompt_tokens = token_count(request.token_ids)
        room = self._context_length - prompt_tokens
        wanted = request.stop.max_tokens
        limit = room if wanted is None else min(wanted, room)
        if limit <= 0:
            yield EngineOutput.length().with_usage(token_usage(prompt_tokens, 0))
            return
        self._check_admission(prompt_tokens)
        params = await self._params_of(request, context)
        if context.is_stopped:
            yield EngineOutput.cancelled()
            return
        is_received = params is not None
        run = SimulatedRun(
            request, context, self._continuation, limit, self._shape.block_size,
            is_received=is_received,
        )  # fmt: skip
        if params is not None:
            is_met = request.bootstrap_info is not None
            await self._fetch(params, context, prompt_tokens, is_met=is_met)
        add_sequence(self._state, run.sequence)
        self._runs[run] = None
        self._work.set()
        try:
            while run.finish_reason is None:
                await run.changed.wait()
                run.changed.clear()
                if run.error is not None:
                    raise run.error
                yield run.next_output()
        finally:
            self._remove(run)

    async def abort(self, context: GenerateContext) -> None:
        """As `Engine.abort`: no other run comes to the room where it waits."""
        if (meeting := self._meetings.get(context)) is not None:
            meeting.cancel()

    async def drain(self) -> None:
        """Wait until other engines have fetched the held blocks, or their leases are over."""
        await self._transfers.wait_released(self._name)

    async def cleanup(self) -> None:
        """Stop the steps; open requests fail, and held blocks are released."""
        step_loop, self._step_loop = self._step_loop, None
        if step_loop is not None:
            step_loop.cancel()
            await asyncio.wait([step_loop])
            for meeting in self._meetings.values():
                meeting.cancel()
            self._fail(EngineError("the engine was shut down", retryable=True))
            self._transfers.remove_engine(self._name)

    # --- transfers -------------------------------------------------------------------------------

    def _hold(self, run: SimulatedRun) -> None:
        def release() -> None:
            release_held(self._state, run.sequence)
            self._work.set()  # prompts may have waited for these blocks

        blocks = len(run.sequence.blocks)
        run.transfer = self._transfers.offer(
            self._name, run.prompt_tokens, blocks, release, run.room
        )

    async def _params_of(self, request: Request, context: GenerateContext) -> JsonText | None:
        """The transfer parameters of a decode; of one that meets its prefill in a room, when the
        blocks are there. None for other requests, and for one that is cancelled meanwhile."""
        if context.phase != "decode" or request.is_probe:
            return None
        if request.bootstrap_info is None:
            return (
                None
                if request.prefill_result is None
                else request.prefill_result.disaggregated_params
            )
        room = request.bootstrap_info.bootstrap_room
        meeting = asyncio.create_task(self._transfers.meet(room), name=f"{self._name}/room")
        self._meetings[context] = meeting
        try:
            await asyncio.wait([meeting])
            if meeting.cancelled():
                if context.is_stopped:
                    return None
                raise EngineError("the engine was shut down", retryable=True)
            return meeting.result()
        finally:
            meeting.cancel()
            del self._meetings[context]

    async def _fetch(
        self, params: JsonText, context: GenerateContext, prompt_tokens: int, *, is_met: bool
    ) -> None:
        """Fetch the blocks of a prompt that another engine has computed. Raises EngineError."""
        transfer = self._transfers.take(params, prompt_tokens, is_met=is_met)
        try:
            await self._clock.sleep(transfer.duration_s / self._speedup)
        finally:
            is_complete = transfer.finish()
        if context.is_stopped:
            self._transfers.interrupted.add(context.request_id)
        if not is_complete:
            raise EngineError("the blocks of the prompt were released too early", retryable=True)
        self._check_admission(prompt_tokens)

    # --- steps -----------------------------------------------------------------------------------

    async def _steps_task(self) -> None:
        try:
            await self._run_steps()
        except Exception as e:
            log.exception("the simulated engine failed")
            self._fail(EngineDead(repr(e)))

    async def _run_steps(self) -> None:
        """Run steps without a gap between them, although the clock's sleep adds time."""
        clock, ends_at = self._clock, self._clock.now()
        while True:
            self._drop_stopped()
            done = run_step(self._state)
            if done is None:
                self._work.clear()
                await self._work.wait()
                ends_at = clock.now()
                continue
            ends_at = (
                max(ends_at, clock.now() - MAX_LAG_S) + done.duration_ms / 1000 / self._speedup
            )
            await clock.sleep(max(ends_at - clock.now(), 0.0))
            self._deliver(done)

    def _check_admission(self, prompt_tokens: int) -> None:
        """Raises EngineError for a request that cannot be accepted."""
        if self._dead is not None:
            raise self._dead
        if not prompt_tokens:
            raise EngineError("the prompt is empty")
        if self.waiting_count >= self._max_waiting:
            raise EngineError(f"{self.waiting_count} requests are waiting already", retryable=True)

    def _remove(self, run: SimulatedRun) -> None:
        """Remove a run that has ended, or whose consumer has left. Blocks held for another engine
        stay."""
        self._runs.pop(run, None)
        if run.transfer is None:
            remove_sequence(self._state, run.sequence)

    def _drop_stopped(self) -> None:
        for run in [run for run in self._runs if run.context.is_stopped]:
            run.finish("cancelled")
            self._remove(run)

    def _deliver(self, done: StepResult) -> None:
        """Publish the results of a step: its cache events, and one token for each sequence."""
        events: list[EngineEvent] = []
        if done.removed:
            events.append(BlocksRemoved(done.removed, STORAGE_MEDIUM))
        events += [_run_of(blocks.sequence).stored_event(blocks) for blocks in done.stored]
        if events:
            self._publish(events)
        finished = set(done.finished)
        for sequence in (*done.decoded, *(c.sequence for c in done.chunks if c.is_last)):
            run = _run_of(sequence)
            if run not in self._runs:
                continue  # cancelled, or its consumer left, during the step
            run.make_token(last=sequence in finished)
            if sequence.phase == HELD:
                self._hold(run)
            if run.finish_reason is not None:
                self._remove(run)

    def _publish(self, events: Sequence[EngineEvent]) -> None:
        if self._on_blocks is not None:
            self._on_blocks(events)

    def _fail(self, error: EngineError) -> None:
        self._dead = error
        for run in self._runs:
            run.fail(error)


def _run_of(sequence: Modelled) -> SimulatedRun:
    run = sequence.key
    assert isinstance(run, SimulatedRun)
    return run
