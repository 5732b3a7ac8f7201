"""Health monitor of an engine: probes while it is idle, a watch on its steps while it is busy.

    idle for `idle_s` ───────────────────► a probe of one token ──► in time: healthy
                                                                └─► late: unhealthy, probed again
    requests run, no step in `stall_s` ──► unhealthy; the runs are aborted
    no probe answered in `dead_s` ───────► EngineDead: the process ends and is restarted

The reason is in the heartbeats and keeps new runs away until a probe is answered; `app/worker.py`
has the consequences. An engine that blocks the event loop stops its heartbeats, which routers
notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple

from kvlane.app.engine.interface import Engine, EngineDead, GenerateContext
from kvlane.app.engine.output_values import checked_stats
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import Request, StopConditions

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
PROBE = Request(
    id="probe",
    token_ids=pack_tokens([0]),
    stop=StopConditions(max_tokens=1, ignore_eos=True),
    is_probe=True,
)
"""One token in and one out: less than a block, so it leaves nothing in the cache."""


class HealthTimeouts(NamedTuple):
    """Time limits for an engine without output, in seconds."""

    idle_s: float
    """Without a request, before a probe is sent."""
    probe_s: float
    """For the answer to a probe."""
    stall_s: float
    """Without a step while requests run; longer for an engine that counts no steps and has its own
    timeout (`Engine.output_timeout_s`)."""
    dead_s: float
    """From the first failure, without an answer to any probe, until the engine counts as dead."""


class EngineHealthMonitor:
    """Monitors one engine while `run` is running.

    `quiet_s`: seconds since the last output to any waiting request, or None. `changed`: called with
    the reason, and whether open runs must be aborted.
    """

    def __init__(
        self,
        engine: Engine,
        ctx: ProcessContext,
        timeouts: HealthTimeouts,
        quiet_s: Callable[[], float | None],
        changed: Callable[[bool], None],
    ) -> None:
        self.unhealthy_reason = ""
        """Why the engine is unhealthy; "" if it is healthy."""
        self._engine = engine
        self._ctx = ctx
        self._clock = ctx.clock
        self._timeouts = timeouts
        self._quiet_s = quiet_s
        self._changed = changed
        self._busy_at = self._stepped_at = ctx.clock.now()
        self._unhealthy_since = 0.0
        self._steps = -1
        self._probing: asyncio.Task[str] | None = None

    async def run(self) -> None:
        """Check once a second until cancelled. Raises EngineDead."""
        while True:
            await self._clock.sleep(CHECK_INTERVAL_S)
            now = self._clock.now()
            if (quiet_s := self._quiet_s()) is not None:
                self._busy_at = now
                stepped_at, stall_s = self._last_step_at(now), self._timeouts.stall_s
                if stepped_at is None:
                    silent_s, stall_s = quiet_s, max(stall_s, self._engine.output_timeout_s)
                else:
                    silent_s = min(quiet_s, now - stepped_at)
                if silent_s > stall_s:
                    self._mark_unhealthy(
                        f"no step for {silent_s:.0f} s while requests run", stalls=True
                    )
            if self.unhealthy_reason or now - self._busy_at >= self._timeouts.idle_s:
                self._apply_probe(await self._probe())

    def _last_step_at(self, now: float) -> float | None:
        """When the engine's count of steps last changed; None for an engine that counts none."""
        figures = checked_stats(self._engine.stats())
        if figures is None or not figures.steps:
            return None
        if figures.steps != self._steps:
            self._steps, self._stepped_at = figures.steps, now
        return self._stepped_at

    def _apply_probe(self, failure: str) -> None:
        now = self._clock.now()
        self._busy_at = now
        if failure:
            self._mark_unhealthy(failure)
            unhealthy_s = now - self._unhealthy_since
            if unhealthy_s >= self._timeouts.dead_s:
                raise EngineDead(f"the engine answered no probe for {unhealthy_s:.0f} s: {failure}")
        elif self.unhealthy_reason:
            log.warning("the engine is healthy again, after: %s", self.unhealthy_reason)
            self.unhealthy_reason = ""
            self._changed(False)

    def _mark_unhealthy(self, what: str, *, stalls: bool = False) -> None:
        if not self.unhealthy_reason:
            self._unhealthy_since = self._clock.now()
            log.error("the engine is unhealthy: %s", what)
        elif not stalls:
            return  # the first reason is the cause
        self.unhealthy_reason = what
        self._changed(stalls)

    async def _probe(self) -> str:
        """Request one token; returns "" if it came in time, else the failure. Raises EngineDead.
        One probe at a time; a late one is cancelled and not awaited, since its engine may hang."""
        if self._probing is None or self._probing.done():
            self._probing = self._ctx.spawn("probe", self._run_probe())
        probing = self._probing
        await asyncio.wait([probing], timeout=self._timeouts.probe_s)
        if not probing.done():
            probing.cancel()
            return f"a probe was not answered within {self._timeouts.probe_s:g} s"
        return "a probe was cancelled" if probing.cancelled() else probing.result()

    async def _run_probe(self) -> str:
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
