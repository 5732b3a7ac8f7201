"""`kvlane bench`: policies and several routers, most of them on simulated fleets."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from workbench.bench.commands.benchmark_command import (
    Benchmark,
    Full,
    Json,
    Trace,
    measure,
    require_passed,
    trace_benchmark,
)

app = typer.Typer()


@app.command()
def simulate(
    *,
    trace: Trace = None,
    full: Full = False,
    keep: Annotated[
        Path | None, typer.Option(help="Cache results in this file; cached runs are not repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs; 0: one per CPU.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Also plot the policies on each fleet into this .html file.")
    ] = None,
    json: Json = None,
) -> None:
    """All policies on a production trace and four simulated fleets, with published figures.

    Round robin validates the simulation. Quick: one seed, arrivals as recorded; --full: three, also
    with arrivals spread out, Dynamo's cost at five settings, delayed events, and engines whose
    performance is on no card. Our policy and Dynamo's also run on engines of the other profiles of
    kvlane simulate. Generated traces run without --trace, too. Exit code 1 if a threshold is
    missed; those that need --trace are missed without it.
    """
    from kvlane.app.commands.simulation.simulate_command import check_drawable
    from workbench.bench.routing.policy_scenarios import FULL, QUICK
    from workbench.bench.routing.policy_simulation import bench_policies, plot_scenarios

    check_drawable(plot, (".html",))
    scale, at_a_time = FULL if full else QUICK, jobs or os.cpu_count() or 1
    report = measure(
        "simulate",
        lambda out, progress: bench_policies(scale, trace, out, progress, keep, at_a_time),
        json,
    )
    if plot is not None:
        plot_scenarios(report.rows, plot)
    require_passed(report)


@app.command()
def traffic(
    *,
    trace: Trace = None,
    full: Full = False,
    keep: Annotated[
        Path | None, typer.Option(help="Cache results in this file; cached runs are not repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs; 0: one per CPU.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the traces; with --full the first of three.")] = 0,
    foreign: Annotated[
        bool,
        typer.Option(
            "--foreign", help="Instead: engines of other shapes, learned against known ones."
        ),
    ] = False,
    json: Json = None,
) -> None:
    """All policies on many kinds of traffic, relative to the best one of each; simulated.

    Short prompts at random times and in bursts, chats with long answers, the generated traces, and
    with --trace the conversation trace, on engines of each profile of kvlane simulate. Quick: one
    seed, three fleets of that trace; --full: three seeds and four fleets. With --foreign, engines
    with a larger constant, a steeper line, a square and a change of speed, learned and known. Exit
    code 1 if a threshold is missed.
    """
    from workbench.bench.routing.policy_traffic import FULL, QUICK, bench_traffic
    from workbench.bench.routing.result_cache import ResultCache

    scale, at_a_time = FULL if full else QUICK, jobs or os.cpu_count() or 1
    if foreign:
        from workbench.bench.foreign_engines import bench_foreign_engines

        report = measure(
            "traffic",
            lambda _, progress: bench_foreign_engines(progress, ResultCache(keep), at_a_time),
            json,
        )
        require_passed(report)
        return
    report = measure(
        "traffic",
        lambda out, progress: bench_traffic(scale, trace, out, progress, keep, at_a_time, seed),
        json,
    )
    require_passed(report)


@trace_benchmark(app)
def disagg() -> Benchmark:
    """Prefill and decode on workers of their own, with published figures; simulated.

    Needs --trace with the conversation trace. Free roles also on engines of the other profiles of
    kvlane simulate. Quick: 8 workers at the recorded rate; --full: two more fleets at 4 and 8 times
    the rate. Exit code 1 if a threshold is missed.
    """
    from workbench.bench.routing.disagg import FLEETS, QUICK, bench_disagg

    return Benchmark(bench_disagg, QUICK, FLEETS)


@trace_benchmark(app)
def mix() -> Benchmark:
    """Latency of a trace during endless batch work, and throughput of both; simulated.

    Rows to compare, on engines of each profile of kvlane simulate: batch work without preemption,
    and without classes. Quick: 150 requests of the trace that ships with kvlane; --full: the hour
    of --trace. Exit code 1 if a threshold is missed.
    """
    from workbench.bench.routing.mix import FULL, QUICK, bench_mix

    return Benchmark(bench_mix, QUICK, FULL)


@app.command()
def routers(
    *,
    trace: Trace = None,
    kafka: Annotated[
        bool, typer.Option("--kafka", help="Run three real routers on Kafka, without the trace.")
    ] = False,
    full: Full = False,
    json: Json = None,
) -> None:
    """Several routers with 5 ms of ledger lag, and one, on simulated workers.

    With single arrivals and with bursts; with bursts also with routers that do not read each
    other's decisions. Quick: eight routers; --full: one, two, four and eight.

    --kafka: one and three router processes before six workers. Their state is compared with the log
    and with each other, and concurrent decisions for the same worker are counted. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Quick: half a minute of each; --full: one
    and a half. Exit code 1 if the state of a router is wrong.
    """
    from kvlane.app.settings import Settings
    from workbench.bench.routing import routers_kafka, routers_simulated

    if not kafka:
        size = routers_simulated.FULL if full else routers_simulated.QUICK
        run = partial(routers_simulated.bench_simulated_routers, size, trace)
        measure("routers", run, json)
        return
    if trace is not None:
        raise typer.BadParameter("--kafka generates its requests: leave --trace out")
    scale = routers_kafka.FULL if full else routers_kafka.QUICK
    run = partial(routers_kafka.bench_kafka_routers, Settings(), scale)
    require_passed(measure("routers", run, json))
