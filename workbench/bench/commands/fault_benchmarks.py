"""`kvlane bench`: faults, overload and constant load on whole deployments."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.bench.commands.benchmark_command import (
    Benchmark,
    Callback,
    Full,
    Json,
    benchmark,
    measure,
    require_passed,
)

if TYPE_CHECKING:
    from workbench.bench.report import Report

app = typer.Typer()

FULL_MINUTES = 10.0


@app.command()
def faults(
    *,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="First seed.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="Parallel processes; 0: one per CPU.", min=0)] = 0,
    replay: Annotated[
        int | None, typer.Option(help="Print the history of this seed instead.")
    ] = None,
    about: Annotated[str, typer.Option(help="With --replay: only this request.")] = "",
    json: Json = None,
) -> None:
    """Simulate whole deployments under seeded faults, in virtual time.

    Each seed crashes processes, loses and delays records and reassigns lanes, then checks that
    every request ended once with the right text. A failed seed can be replayed exactly. Exit
    code 1 if a seed fails.
    """
    from workbench.bench.fault_seeds import seed_history, simulate_seeds

    if replay is not None:
        typer.echo(seed_history(replay, about))
        return
    at_a_time = jobs or os.cpu_count() or 1

    async def run(_: Callback, progress: Callback) -> Report:
        return simulate_seeds(seeds, first, at_a_time, lambda _: progress(1 / seeds))

    require_passed(measure("seeds", run, json))


@app.command()
def chaos(
    *,
    kills: Annotated[int, typer.Option(help="Number of injected faults.", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the sequence of faults.")] = 1,
    only: Annotated[str, typer.Option(help="Kinds of faults, separated by commas.")] = "",
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.1)] = 4.0,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=1)] = 90,
    workers: Annotated[int, typer.Option(help="Number of workers.", min=3)] = 6,
    prefill_workers: Annotated[
        int, typer.Option(help="Those of them that only compute prompts.", min=0)
    ] = 0,
    batch: Annotated[
        int, typer.Option(help="Batch prompts on Kafka, of each eight requests.", min=0, max=6)
    ] = 0,
    agent_workers: Annotated[
        int, typer.Option(help="Workers for a third of requests, with tools; 0: none.", min=0)
    ] = 2,
    minutes: Annotated[float, typer.Option(help="Stop after this many minutes.")] = float("inf"),
    resume: Annotated[
        Path | None, typer.Option(help="Log of all rounds: read first, then appended to.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Copy the output of all processes into this folder.")
    ] = None,
    json: Json = None,
) -> None:
    """Kill and stop real processes under load, on Kafka: no token lost, none repeated.

    OpenAI's own client sends requests, resumes at another gateway when its own dies, and every text
    is compared with the engine's. Without --only every process is hit, by kill -9, SIGSTOP and
    SIGTERM; with broker, broker-pause, broker-stall (20 s and 8 s of SIGSTOP) or broker-disk, one
    of three brokers, and most requests go through Kafka. --resume continues an earlier run. Exit
    code 1 if a threshold is missed.
    """
    from kvlane.app.settings import Settings
    from workbench.bench.chaos.chaos_run import PROCESS_FAULTS, ChaosScale, bench_chaos, read_rounds
    from workbench.bench.chaos.fault_injection import FAULT_KINDS

    kinds = tuple(filter(None, only.split(","))) or PROCESS_FAULTS
    if unknown := set(kinds) - set(FAULT_KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: one of {', '.join(FAULT_KINDS)}")
    scale = ChaosScale(
        kills, seed=seed, kinds=kinds, rate=rate, tokens=tokens, workers=workers,
        limit_s=60 * minutes, prefill_workers=prefill_workers, batch=batch,
        agent_workers=agent_workers,
    )  # fmt: skip
    if prefill_workers > workers - 2:
        raise typer.BadParameter(f"--prefill-workers {prefill_workers}: two workers must decode")
    lines = read_rounds(resume)
    report = measure(
        "chaos",
        lambda out, progress: bench_chaos(
            Settings(), scale, out, progress, lines, log_file=resume, output_folder=logs
        ),
        json,
    )
    require_passed(report)


@app.command()
def overload(
    *,
    minutes: Annotated[float, typer.Option(help="Duration of the overload.", min=0.1)] = 1.0,
    factor: Annotated[
        float, typer.Option(help="Load as a multiple of the capacity.", min=1.1)
    ] = 2.0,
    full: Full = False,
    json: Json = None,
) -> None:
    """More requests than the capacity: rejections, latency of the others, memory, on Kafka.

    Quick: one minute; --full: ten. Every text is compared with the engine's. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a threshold is missed.
    """
    from kvlane.app.settings import Settings
    from workbench.bench.chaos.overload import OverloadScale, bench_overload

    scale = OverloadScale(60 * (FULL_MINUTES if full else minutes), factor)
    report = measure("overload", partial(bench_overload, Settings(), scale), json)
    require_passed(report)


@benchmark(app, exits=True)
def soak() -> Benchmark:
    """Constant load without faults: growth of memory, CPU time and latency, on Kafka.

    Two minutes; --full: twenty. Every text is compared with the engine's. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a threshold is missed.
    """
    from workbench.bench.chaos.soak import FULL, QUICK, bench_soak

    return Benchmark(bench_soak, QUICK, FULL)


@app.command()
def backlog(
    *,
    prompts: Annotated[
        int | None, typer.Option(help="Number of prompts, instead of 20000.", min=200)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sequence of faults.")] = 1,
    dedup_window: Annotated[
        float | None,
        typer.Option(
            help="Keep ended ids for these seconds, and restart the readers of prompts "
            "and the writers of results alone.",
            min=5.0,
        ),
    ] = None,
    cut_links: Annotated[
        bool, typer.Option("--cut-links", help="Cut each process off from each of three brokers.")
    ] = False,
    kills: Annotated[
        int, typer.Option(help="With --dedup-window: kills and restarts.", min=1)
    ] = 200,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run 2000 prompts: three minutes.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Run 200000 prompts: three hours.")] = False,
    json: Json = None,
) -> None:
    """Drain prompts that were there before any worker, while everything is killed, on Kafka.

    A third of them without faults, a third under kill -9, SIGSTOP and SIGTERM of every process, a
    third with interactive HTTP requests at the same time. Each prompt must have exactly one
    result for a reader of committed records, with the engine's text; throughput is compared with
    the capacity of the engines, the memory of every process with itself. With --dedup-window
    preprocessors and collectors are killed and restarted while prompts wait for longer than ended
    ids are kept. With --cut-links a cluster of three brokers is started, nothing is killed, and
    each link of a process to a broker is cut in turn. Both begin with 2000 prompts, send HTTP
    requests meanwhile, and publish more prompts until all faults are done. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a threshold is missed.
    """
    from kvlane.app.settings import Settings
    from workbench.bench.chaos.backlog_drain import DEFAULT, FULL, QUICK, bench_backlog

    has_one_phase = cut_links or dedup_window is not None
    scale = (FULL if full else QUICK if quick or has_one_phase else DEFAULT)._replace(
        seed=seed, window_s=dedup_window, cuts_links=cut_links, kills=kills
    )
    if prompts is not None:
        scale = scale._replace(prompts=prompts)
    require_passed(measure("backlog", partial(bench_backlog, Settings(), scale), json))
