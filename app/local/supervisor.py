"""Supervision of a local deployment: restarts its processes and its broker, each with a line.

Pauses between restarts double up to MAX_RESTART_PAUSE_S; a process that ran for STABLE_RUN_S starts
again with the shortest.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvlane.streams.brokers.broker import Broker, ReportLine
from kvlane.streams.clock import Clock
from kvlane.streams.errors import BrokerUnavailable

MIN_RESTART_PAUSE_S = 0.5
MAX_RESTART_PAUSE_S = 30.0
STABLE_RUN_S = 60.0
CHECK_INTERVAL_S = 0.25
BROKER_CHECK_INTERVAL_S = 1.0
MAX_MISSED_CHECKS = 3
"""Failed checks of an external broker before it counts as down; one for a broker started here."""
MAX_LAST_LINES = 2


class RestartBackoff:
    """Exponential back-off of restarts. Times are in seconds on one clock."""

    def __init__(self) -> None:
        self._started_at = float("-inf")
        self.exits = 0
        """Exits in a row, without STABLE_RUN_S of running in between."""

    def started(self, now: float) -> None:
        self._started_at = now

    def exited(self, now: float) -> float:
        """Returns the pause before the restart."""
        self.exits = 1 if now - self._started_at >= STABLE_RUN_S else self.exits + 1
        return float(min(MIN_RESTART_PAUSE_S * 2 ** min(self.exits - 1, 16), MAX_RESTART_PAUSE_S))


class SupervisedProcesses(Protocol):
    """The part of `ProcessDeployment` that a supervisor uses."""

    def take_exited(self) -> Mapping[str, int]:
        """The exit status of each process that ended since the last call."""

    def launch(self, *names: str) -> None:
        """Start processes that have ended."""

    def output_file(self, name: str) -> Path:
        """The output file of a process."""


class ProcessSupervisor:
    """Restarts processes. `watch` runs as a task."""

    def __init__(self, children: SupervisedProcesses, clock: Clock, report: ReportLine) -> None:
        self._children = children
        self._clock = clock
        self._report = report
        self._backoffs: dict[str, RestartBackoff] = {}
        self._due: dict[str, float] = {}

    async def watch(self) -> None:
        while True:
            self.check_once()
            await self._clock.sleep(CHECK_INTERVAL_S)

    def check_once(self) -> None:
        now = self._clock.now()
        for name, status in self._children.take_exited().items():
            backoff = self._backoffs.setdefault(name, RestartBackoff())
            pause_s = backoff.exited(now)
            self._due[name] = now + pause_s
            times = f", {backoff.exits} times in a row" if backoff.exits > 1 else ""
            self._report(f"{name} {_how(status)}{times}; started again in {pause_s:g} s")
            if status > 0:
                for line in last_lines(self._children.output_file(name)):
                    self._report(f"  {line}")
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._children.launch(name)
            self._backoffs[name].started(now)
            self._report(f"{name} is started again")


class BrokerSupervisor:
    """Restarts a broker that was started here, or waits for others'. `watch` runs as a task."""

    def __init__(self, broker: Broker, clock: Clock, report: ReportLine) -> None:
        self._broker = broker
        self._clock = clock
        self._report = report
        self._is_own = broker.kind != "env"
        self._backoff = RestartBackoff()

    async def watch(self) -> None:
        misses = 0
        while True:
            try:
                await asyncio.to_thread(self._broker.check_running)
                misses = 0
            except BrokerUnavailable as e:
                misses += 1
                if self._is_own or misses >= MAX_MISSED_CHECKS:
                    await self._mend(e)
                    misses = 0
            await self._clock.sleep(BROKER_CHECK_INTERVAL_S)

    async def _mend(self, error: BrokerUnavailable) -> None:
        since = self._clock.now()
        what = "started again on its data" if self._is_own else "waited for; nothing is ended"
        self._report(f"the broker is gone, and is {what}: {_first_line(error)}")
        while True:
            pause_s = self._backoff.exited(self._clock.now())
            await self._clock.sleep(pause_s if self._is_own else BROKER_CHECK_INTERVAL_S)
            self._backoff.started(self._clock.now())
            try:
                await asyncio.to_thread(self._broker.restart)
            except BrokerUnavailable as e:
                if self._is_own:
                    self._report(f"the broker does not start: {_first_line(e)}; trying again")
            else:
                self._report(f"the broker is back after {self._clock.now() - since:.1f} s")
                return


def last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            return file.read().decode(errors="replace").splitlines()[-MAX_LAST_LINES:]
    except OSError:
        return []


def _how(status: int) -> str:
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"
    return f"ended with code {status}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(":")
