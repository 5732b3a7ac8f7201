"""A limit on the CPU time of a process, so that it and not the machine is the bottleneck.

Two routers on a machine with two cores share them with the broker and the client; with a limit for
each, the machine has room for all of them.
"""

from __future__ import annotations

from kvlane.app.local.processes import ManagedProcess
from kvlane.streams.clock import Clock
from workbench.bench.process_usage import cpu_time_s

PERIOD_S = 0.01
"""The clock of CPU times on Linux has the same period."""
MAX_CREDIT_S = 0.1
"""Time without work that a process may make up for."""


async def limit_cpu(process: ManagedProcess, share: float, clock: Clock) -> None:
    """Stop a process whenever it has used more than `share` of a core, until cancelled.

    It runs on after that. Linux only: elsewhere the CPU time is not known, and nothing is limited.
    """
    credit_s, now, used_s = 0.0, clock.now(), cpu_time_s(process)
    try:
        while process.status is None:
            await clock.sleep(PERIOD_S)
            before, now = now, clock.now()
            used_before_s, used_s = used_s, cpu_time_s(process)
            credit_s += share * (now - before) - (used_s - used_before_s)
            credit_s = min(credit_s, share * MAX_CREDIT_S)
            if credit_s < 0:
                process.pause()
            else:
                process.resume()
    finally:
        process.resume()
