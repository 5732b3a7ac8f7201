"""`kvlane bench`: benchmarks and fault simulation on this machine; `all` runs them one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from workbench.bench.commands import fault_benchmarks, latency_benchmarks, policy_benchmarks
from workbench.bench.commands.benchmark_command import Full
from workbench.bench.commands.fault_benchmarks import backlog, chaos, faults, overload
from workbench.bench.commands.latency_benchmarks import (
    attach,
    decision,
    gateway,
    index,
    rebuild,
    router_latency,
    tokens,
)
from workbench.bench.commands.policy_benchmarks import mix, routers, simulate

app = typer.Typer(no_args_is_help=True, help="Measure and stress kvlane on this machine.")
for group in (latency_benchmarks, policy_benchmarks, fault_benchmarks):
    app.add_typer(group.app)

QUICK_SEEDS = 200
FULL_SEEDS = 5000
QUICK_KILLS = 10
FULL_KILLS = 1000


@app.command(name="all")
def every(*, full: Full = False) -> None:
    """Run the benchmarks one after the other. Exit code 1 if a threshold is missed.

    Without those that need the recorded trace or a peer, and without soak.
    """
    for ungated in (router_latency, tokens, gateway, rebuild):
        ungated(full=full)
    passed = [_passes(attach, full=full)]
    index(full=full, peers=True)
    decision(full=full)
    _passes(simulate, full=full)  # most of its thresholds need a trace that is not part of kvlane
    routers(full=full)
    passed += [
        _passes(routers, kafka=True, full=full),
        _passes(chaos, kills=FULL_KILLS if full else QUICK_KILLS),
        _passes(overload, full=full),
        _passes(backlog, quick=not full),
        _passes(mix, full=full),
        _passes(faults, seeds=FULL_SEEDS if full else QUICK_SEEDS),
    ]
    if not all(passed):
        raise typer.Exit(1)


def _passes(command: Callable[..., None], **options: Any) -> bool:
    """Run a command; whether it passed all its thresholds."""
    try:
        command(**options)
    except typer.Exit:
        return False
    return True
