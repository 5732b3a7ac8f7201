"""Whether the engine still works: asked when it is idle, watched while it is not.

    idle for a while ──► a probe of one token ──► in time: healthy; else: a complaint, asked again
    requests run, and no step for long ─────────► a complaint; their runs are broken off
    no answer to any probe for very long ───────► EngineDead: the process ends and is started anew

A complaint stands in the heartbeats and keeps new work away; the first probe that is answered takes
it back. Owns the judgement and nothing else: what becomes of runs, heartbeats and the process is
`app/worker.py`'s. Cannot see an engine that blocks the event loop; then heartbeats stop, which
routers notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple

from app.engine.contract import Engine, EngineDead, GenerateContext
from app.lifetime import Lifetime
from streams.codecs import pack_tokens
from streams.records import Request, StopConditions

log = logging.getLogger(__name__)

LOOK_S = 1.0
PROBE = Request(
    id="probe",
    token_ids=pack_tokens([0]),
    stop=StopConditions(max_tokens=1, ignore_eos=True),
    is_probe=True,
)
"""One token in, one token out: less than a block, so that it leaves nothing in the cache."""


class Patience(NamedTuple):
    """How long an engine may be silent before something is done about it; seconds."""

    idle_s: float
    """Without a request, before it is asked."""
    answer_s: float
    """For a probe."""
    stall_s: float
    """Without a step while requests run; longer for engines that count none and see to it."""
    dead_s: float
    """From the first complaint, without an answer to any probe, before it is given up."""


class EngineWatch:
    """Watches one engine. `run` must be running.

    `quiet_s` tells for how long the engine has said nothing to requests that wait for its next
    word; None while none waits. `changed` is called when the complaint is another one, with whether
    the requests that run are to be broken off.
    """

    def __init__(
        self,
        engine: Engine,
        life: Lifetime,
        patience: Patience,
        quiet_s: Callable[[], float | None],
        changed: Callable[[bool], None],
    ) -> None:
        self.complaint = ""
        """What is wrong with the engine; "" for nothing."""
        self._engine = engine
        self._life = life
        self._clock = life.clock
        self._patience = patience
        self._quiet_s = quiet_s
        self._changed = changed
        self._busy_at = self._stepped_at = life.clock.now()
        self._ill_since = 0.0
        self._steps = -1
        self._probing: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Look once a second, until cancelled. Raises EngineDead when the engine is given up."""
        while True:
            await self._clock.sleep(LOOK_S)
            now = self._clock.now()
            if (quiet_s := self._quiet_s()) is not None:
                self._busy_at = now
                stepped_at, stall_s = self._last_step_at(now), self._patience.stall_s
                if stepped_at is None:
                    silent_s, stall_s = quiet_s, max(stall_s, self._engine.silence_s)
                else:
                    silent_s = min(quiet_s, now - stepped_at)
                if silent_s > stall_s:
                    self._complain(f"no step for {silent_s:.0f} s while requests run", stalls=True)
            if self.complaint or now - self._busy_at >= self._patience.idle_s:
                self._judge(await self._probe())

    def _last_step_at(self, now: float) -> float | None:
        """When its count of steps moved last; None for an engine that counts none."""
        figures = self._engine.figures()
        if figures is None or not figures.steps:
            return None
        if figures.steps != self._steps:
            self._steps, self._stepped_at = figures.steps, now
        return self._stepped_at

    def _judge(self, failure: str) -> None:
        now = self._clock.now()
        self._busy_at = now
        if failure:
            self._complain(failure)
            ill_s = now - self._ill_since
            if ill_s >= self._patience.dead_s:
                raise EngineDead(f"it answers no probe for {ill_s:.0f} s: {failure}")
        elif self.complaint:
            log.warning("the engine answers again, after: %s", self.complaint)
            self.complaint = ""
            self._changed(False)

    def _complain(self, what: str, *, stalls: bool = False) -> None:
        if not self.complaint:
            self._ill_since = self._clock.now()
            log.error("the engine is not healthy: %s", what)
        elif not stalls:
            return  # the first one says what happened
        self.complaint = what
        self._changed(stalls)

    async def _probe(self) -> str:
        """Ask for one token; "" when it came in time, else what went wrong. Raises EngineDead.

        A probe that does not come back is left behind and not waited for: an engine that hangs may
        hang in its clean-up, too. There is one at a time.
        """
        if self._probing is None or self._probing.done():
            self._probing = self._life.spawn("probe", self._ask())
        probing = self._probing
        await asyncio.wait([probing], timeout=self._patience.answer_s)
        if not probing.done():
            probing.cancel()
            return f"a probe was not answered within {self._patience.answer_s:g} s"
        return "a probe was cancelled" if probing.cancelled() else probing.result()

    async def _ask(self) -> str:
        context = GenerateContext(PROBE.id)
        try:
            async with aclosing(self._engine.generate(PROBE, context)) as outputs:
                async for output in outputs:
                    if output.finish_reason == "error":
                        return f"a probe failed: {output.message}"
                    if output.token_ids or output.finish_reason is not None:
                        return ""
        except EngineDead:
            raise
        except Exception as e:
            log.warning("a probe failed", exc_info=True)
            return f"a probe failed: {e!r}"
        return "a probe ended without an answer"
