"""asyncio in virtual time, with a seeded scheduler and processes that can be paused and killed.

`VirtualLoop` is an event loop that never waits: when nothing is ready to run, its clock jumps to
the next timer. When no timer is left either, it raises Deadlock and names the tasks that wait.
Everything in one loop, under one seed, runs the same way every time.

A *process* is a set of tasks that share the context variable `PROCESS`; tasks inherit it from the
task that creates them. The order among processes is drawn from the seed; within one process it is
the order asyncio guarantees. A held process does not run at all: its
callbacks and timers queue up until it is released. That is SIGSTOP, and without a release kill -9.

There is no I/O in this loop: sockets, threads and subprocesses do not work in it.
"""

# ruff: noqa: SLF001 - an event loop is made of the private parts of asyncio

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop
from typing import Any, TypeVar

T = TypeVar("T")

CLEANUP_STEPS = 1_000_000
"""Callbacks that the cleanup of cancelled tasks may take; with more, they cannot be cancelled."""

PROCESS: ContextVar[str] = ContextVar("process", default="")
"""Name of the process that a task belongs to; "" outside of all processes."""

START_MS = 1_700_000_000_000
"""Wall clock at virtual time 0."""


class Deadlock(RuntimeError):
    """Nothing can ever run again."""


class StepLimitExceeded(RuntimeError):
    """The loop ran more callbacks than it was allowed to: something spins."""


class _Future(asyncio.Future[Any]):
    """A future whose hash depends on the seed, not on its address: so does the order of sets."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """A task with a hash like that of `_Future`."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number  # first of all: the constructor puts the task into a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. Without `rng` the order is asyncio's own."""

    def __init__(self, rng: random.Random | None = None, max_steps: int = 50_000_000) -> None:
        super().__init__()
        self.steps = 0
        self._made = 0
        self._rng = rng
        self._now = 0.0
        self._max_steps = max_steps
        self._held: dict[str, list[Any]] = {}

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    def pause(self, process: str) -> None:
        """Stop a process where it is."""
        self._held.setdefault(process, [])

    def resume(self, process: str) -> None:
        """Let a held process go on; its queued callbacks run first."""
        self._ready.extendleft(reversed(self._held.pop(process, [])))

    def is_paused(self, process: str) -> bool:
        return process in self._held

    def create_future(self) -> asyncio.Future[Any]:
        self._made += 1
        return _Future(self._made, self)

    def create_task(
        self, coro: Any, *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        self._made += 1
        return _Task(self._made, coro, loop=self, name=name, context=context)

    # --- the parts of BaseEventLoop that a subclass has to implement ---

    _ready: deque[Any]
    _scheduled: list[Any]
    _stopping: bool

    def _run_once(self) -> None:
        if self.steps > self._max_steps:
            raise StepLimitExceeded(
                f"{self.steps} callbacks by {self._now:.3f} s\n{self.describe_tasks()}"
            )
        ready, timers = self._ready, self._scheduled
        while timers and timers[0]._cancelled:
            heappop(timers)._scheduled = False
        if not ready and not self._stopping:
            if not timers:
                raise Deadlock(
                    f"at {self._now:.3f} s nothing is left to run\n{self.describe_tasks()}"
                )
            self._now = max(self._now, timers[0]._when)
        while timers and timers[0]._when <= self._now:
            timer = heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                ready.append(timer)
        if self._rng is None and not self._held:
            self._run(ready.popleft() for _ in range(len(ready)))
        else:
            self._run_shuffled()

    def _run(self, handles: Any) -> None:
        for handle in handles:
            if not handle._cancelled:
                self.steps += 1
                handle._run()

    def _run_shuffled(self) -> None:
        """Run ready callbacks: processes in random order, each one's callbacks in theirs."""
        ready, held = self._ready, self._held
        if len(ready) == 1 and not held:
            self._run((ready.popleft(),))
            return
        queues: dict[str, deque[Any]] = {}
        turns: list[str] = []
        while ready:
            handle = ready.popleft()
            process = handle._context.get(PROCESS, "")
            if process in held:
                held[process].append(handle)
                continue
            turns.append(process)
            queue = queues.get(process)
            if queue is None:
                queues[process] = queue = deque()
            queue.append(handle)
        if self._rng is not None and len(queues) > 1:
            self._rng.shuffle(turns)
        for process in turns:
            handle = queues[process].popleft()
            if process in held:  # held by a callback that ran just now
                held[process].append(handle)
            else:
                self._run((handle,))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: cancelled timers are dropped when their time comes."""

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nothing to do: the loop never blocks."""

    def describe_tasks(self) -> str:
        """The unfinished tasks and where they wait, one a line."""
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=lambda t: t.get_name()):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_name}:{frames[0].f_lineno}" if frames else "?"
            lines.append(f"  {task.get_name()}: {where}")
        return "\n".join(lines)


class VirtualClock:
    """A process's clock in virtual time: `ahead_ms` of others, and going `rate` times as fast.

    Time-outs of asyncio itself follow the loop's time, not this clock.
    """

    def __init__(self, loop: VirtualLoop, ahead_ms: int = 0, rate: float = 1.0) -> None:
        self._loop = loop
        self._ahead_ms = ahead_ms
        self._rate = rate

    def now(self) -> float:
        """Seconds of this clock since the loop was created."""
        return self._loop._now * self._rate

    def wall_ms(self) -> int:
        """Milliseconds since 1970 by this process's clock."""
        return START_MS + self._ahead_ms + int(self.now() * 1000)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)


def process_context(name: str) -> Context:
    """A context for the tasks of a new process."""
    context = copy_context()
    context.run(PROCESS.set, name)
    return context


def run_virtual(
    main: Callable[[VirtualLoop], Coroutine[Any, Any, T]],
    rng: random.Random | None = None,
    max_steps: int = 50_000_000,
) -> T:
    """Run `main` in a loop of its own, in virtual time; its tasks are cancelled at the end.

    Raises the errors of `main`, Deadlock, or StepLimitExceeded.
    """
    loop = VirtualLoop(rng, max_steps)
    try:
        return loop.run_until_complete(main(loop))
    finally:
        try:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    """Cancel all tasks, of held processes too, repeatedly while their cleanup waits."""
    loop._max_steps = loop.steps + CLEANUP_STEPS
    for process in list(loop._held):
        loop.resume(process)
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(_a_little())


async def _a_little() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
