"""`kvlane bench`: benchmarks and fault simulation on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import uvloop

from app.commands import console as screen
from app.settings import Settings

if TYPE_CHECKING:
    from app.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure and stress kvlane on this machine.")

Callback = Callable[[Any], None]
RunBenchmark = Callable[[Callback, Callback], Coroutine[Any, Any, "Report"]]
"""A benchmark with its options: takes callbacks for a line of text and for a share of the work that
is done, and returns its report."""

QUICK_SEEDS = 200
FULL_SEEDS = 5000
QUICK_KILLS = 10
FULL_KILLS = 1000
FULL_MINUTES = 10.0

Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the report to this file, as JSON.")
]
Full = Annotated[bool, typer.Option("--full", help="Run the long form, not the quick one.")]
Trace = Annotated[
    Path | None, typer.Option(help="File with the whole conversation trace of Mooncake.")
]


class Benchmark(NamedTuple):
    """A benchmark and the amounts of work of its quick and its full form."""

    run: Callable[[Settings, Any, Callback, Callback], Coroutine[Any, Any, Report]]
    quick: Any
    full: Any


Load = Callable[[], Benchmark]
"""Imports a benchmark when it is run, so that `--help` is quick; its docstring is the help text."""


def _command(load: Load, *, exits: bool = False) -> Callable[..., None]:
    """A command with options `--full` and `--json` only.

    Its exit code is 0 whatever the figures are; with `exits`, 1 if a threshold is missed.
    """
    name = load.__name__.replace("_", "-")

    def command(*, full: Full = False, json: Json = None) -> None:
        run, quick, form = load()
        report = _measure(name, partial(run, Settings(), form if full else quick), json)
        if exits:
            _require_passed(report)

    app.command(name, help=load.__doc__)(command)
    return command


_checked_command = partial(_command, exits=True)


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
    from app.bench.fault_seeds import seed_history, simulate_seeds

    if replay is not None:
        typer.echo(seed_history(replay, about))
        return
    at_a_time = jobs or os.cpu_count() or 1

    async def measure(_: Callback, progress: Callback) -> Report:
        return simulate_seeds(seeds, first, at_a_time, lambda _: progress(1 / seeds))

    _require_passed(_measure("seeds", measure, json))


@_command
def router_latency() -> Benchmark:
    """Latency, CPU time by part and capacity of the router, beside a bare echo, on Kafka.

    From a request to its readable assignment. Open loop, 2000-token prompts, 64 workers,
    alternating rounds. Quick: 100 and 500 requests/s, and the capacity; --full: 1000, 1.5 x the
    capacity and two routers, too: ten minutes. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a
    broker.
    """
    from app.bench.routing.router_latency import FULL, QUICK, bench_router_latency

    return Benchmark(bench_router_latency, QUICK, FULL)


@_command
def tokens() -> Benchmark:
    """CPU time and added latency of a token from worker to client, on Kafka.

    100 streams, 5000 tokens/s, 1 and 8 tokens per step, beside a bare server that sends the same
    events. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.streaming.token_latency import FULL, QUICK, bench_tokens

    return Benchmark(bench_tokens, QUICK, FULL)


@_command
def gateway() -> Benchmark:
    """Requests/s over HTTP, and the event loop delay from prompts of 100 to 100000 tokens.

    Beside a bare FastAPI server that renders and tokenizes the same bodies. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.streaming.gateway_load import FULL, QUICK, bench_gateway

    return Benchmark(bench_gateway, QUICK, FULL)


@_command
def peer_router() -> Benchmark:
    """Requests and tokens from client to model server and back, beside SGLang's router.

    Mock servers, the same for both; bodies are forwarded unchanged. Needs `tests/peers/build.sh
    router`. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.streaming.peer_router import FULL, QUICK, bench_peer_router

    return Benchmark(bench_peer_router, QUICK, FULL)


@_command
def growth() -> Benchmark:
    """Costs at a tenth and at ten times the usual workers, blocks, requests, lanes and streams.

    And the memory of a stream and of a waiting request. Uses KVLANE_BOOTSTRAP_SERVERS if set, else
    starts brokers.
    """
    from app.bench.growth import FULL, QUICK, bench_growth

    return Benchmark(bench_growth, QUICK, FULL)


@_command
def access() -> Benchmark:
    """Latency of refusing requests without a valid API key, beside 64 streams.

    Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.streaming.key_refusals import FULL, QUICK, bench_key_refusals

    return Benchmark(bench_key_refusals, QUICK, FULL)


@_checked_command
def attach() -> Benchmark:
    """Time to first text of clients that attach to streams of one lane, 20 per second, on Kafka.

    Quick: 100 000 Chunks in the lane, for 5 s; --full: 400 000, for 25 s. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if one waits more than 5 s.
    """
    from app.bench.streaming.attach_latency import FULL, QUICK, bench_attach

    return Benchmark(bench_attach, QUICK, FULL)


@_command
def bodies() -> Benchmark:
    """Event loop stalls of a gateway and a preprocessor from 8 MiB bodies of unusual shapes.

    The longest stall for each shape, on topics in memory.
    """
    from app.bench.streaming.body_stalls import FULL, QUICK, bench_bodies

    return Benchmark(bench_bodies, QUICK, FULL)


@app.command()
def rebuild(
    *,
    blocks: Annotated[int, typer.Option(help="Number of blocks.", min=64_000)] = 2_300_000,
    full: Full = False,
    json: Json = None,
) -> None:
    """Cold start of a router until it is ready, with many blocks and no live worker, on Kafka.

    From snapshots and the tail, and from the log alone, beside a start with empty topics. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.routing.cold_start import ColdStartScale, bench_cold_start

    scale = ColdStartScale(blocks, rounds=5 if full else 2)
    _measure("rebuild", partial(bench_cold_start, Settings(), scale), json)


@app.command()
def index(
    *,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Compare with Dynamo's index, which cargo builds."),
    ] = False,
    pauses: Annotated[
        bool, typer.Option("--pauses", help="Measure only read latency while the index changes.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Run the long form, or the quick one.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests to replay; by default copies of those in app/data."),
    ] = None,
    json: Json = None,
) -> None:
    """The index: matches, updates, tokens to scores, a trace, memory, records.

    With --peers beside the Rust crate of Dynamo in the same process, on the same data, with
    answers compared. Throughput is CPU time; latencies are measured inside the compiled code.
    """
    from app.bench.index.index_bench import FULL, QUICK, bench_index, bench_index_pauses

    if pauses:
        _measure("index pauses", lambda _, progress: bench_index_pauses(progress), json)
    else:
        scale = FULL if full else QUICK
        _measure("index", partial(bench_index, scale, peers=peers, trace=trace), json)


@_command
def decision() -> Benchmark:
    """CPU time of a routing decision, and of planning all queued requests again.

    Fleets of 8, 64 and 512 workers; --full: 1 to 1024. Every decision is compared with the one
    recomputed from its record, and with a plain implementation of the formulas.
    """
    from app.bench.routing.decision_latency import FULL, QUICK, bench_decisions

    return Benchmark(bench_decisions, QUICK, FULL)


@app.command()
def simulate(
    *,
    trace: Trace = None,
    full: Full = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="Cache results in this file; cached runs are not repeated."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Parallel runs; 0: one per CPU.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Plot ours to dynamo's best setting into this file.")
    ] = None,
    json: Json = None,
) -> None:
    """All policies on a production trace and four simulated fleets, beside published figures.

    Round robin validates the simulation. Quick: one seed, arrivals as recorded; --full: three, also
    with arrivals spread out, Dynamo's cost at five settings, delayed events, and engines whose
    performance is on no card: twenty minutes on two CPUs. Generated traces run without --trace,
    too. Exit code 1 if a threshold is missed; those that need --trace are missed without it.
    """
    screen.require_matplotlib(plot)
    from app.bench.plots import plot_thresholds
    from app.bench.routing.policy_scenarios import FULL, QUICK
    from app.bench.routing.policy_simulation import bench_policies

    scale, at_a_time = FULL if full else QUICK, jobs or os.cpu_count() or 1
    report = _measure(
        "simulate",
        lambda out, progress: bench_policies(scale, trace, out, progress, keep, at_a_time),
        json,
    )
    if plot is not None:
        plot_thresholds(report.thresholds, plot)
    _require_passed(report)


@app.command()
def disagg(*, trace: Trace = None, full: Full = False, json: Json = None) -> None:
    """Prefill and decode on workers of their own, beside published figures; simulated.

    Needs --trace with the conversation trace. Quick: 8 workers at the recorded rate; --full: two
    more fleets at 4 and 8 times the rate. Exit code 1 if a threshold is missed.
    """
    from app.bench.routing.disagg import FLEETS, QUICK, bench_disagg

    fleets = FLEETS if full else QUICK
    _require_passed(
        _measure("disagg", lambda out, progress: bench_disagg(fleets, trace, out, progress), json)
    )


@app.command()
def mix(*, trace: Trace = None, full: Full = False, json: Json = None) -> None:
    """Latency of a trace beside endless batch work, and what the latter gets; simulated.

    Rows beside it: batch work without preemption, and without classes. Quick: 150 requests of the
    trace that ships with kvlane; --full: the hour of --trace. Exit code 1 if a threshold is missed.
    """
    from app.bench.routing.mix import FULL, QUICK, bench_mix

    scale = FULL if full else QUICK
    _require_passed(
        _measure("mix", lambda out, progress: bench_mix(scale, trace, out, progress), json)
    )


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
    minutes: Annotated[float, typer.Option(help="Stop after this many minutes.")] = float("inf"),
    resume: Annotated[
        Path | None, typer.Option(help="Log of all rounds: read first, then appended to.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Copy the output of all processes into this folder.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the gaps into this file.")] = None,
    json: Json = None,
) -> None:
    """Kill and stop real processes under load, on Kafka: no token lost, none repeated.

    OpenAI's own client sends requests, resumes at another gateway when its own dies, and every text
    is compared with the engine's. Without --only every process is hit, by kill -9, SIGSTOP and
    SIGTERM; with broker, broker-pause, broker-stall (20 s and 8 s of SIGSTOP) or broker-disk, one
    of three brokers, and most requests go through Kafka. --resume continues an earlier run. Exit
    code 1 if a threshold is missed.
    """
    from app.bench.chaos.chaos_run import PROCESS_FAULTS, ChaosScale, bench_chaos, read_rounds
    from app.bench.chaos.fault_injection import FAULT_KINDS
    from app.bench.plots import plot_chaos

    kinds = tuple(filter(None, only.split(","))) or PROCESS_FAULTS
    if unknown := set(kinds) - set(FAULT_KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: one of {', '.join(FAULT_KINDS)}")
    screen.require_matplotlib(plot)
    scale = ChaosScale(
        kills, seed=seed, kinds=kinds, rate=rate, tokens=tokens, workers=workers,
        limit_s=60 * minutes, prefill_workers=prefill_workers, batch=batch,
    )  # fmt: skip
    if prefill_workers > workers - 2:
        raise typer.BadParameter(f"--prefill-workers {prefill_workers}: two workers must decode")
    lines = read_rounds(resume)
    report = _measure(
        "chaos",
        lambda out, progress: bench_chaos(
            Settings(), scale, out, progress, lines, log_file=resume, output_folder=logs
        ),
        json,
    )
    if plot is not None:
        plot_chaos(lines, plot)
    _require_passed(report)


@app.command()
def overload(
    *,
    minutes: Annotated[float, typer.Option(help="Duration of the overload.", min=0.1)] = 1.0,
    factor: Annotated[
        float, typer.Option(help="Load as a multiple of the capacity.", min=1.1)
    ] = 2.0,
    full: Full = False,
    plot: Annotated[Path | None, typer.Option(help="Plot memory and times into this file.")] = None,
    json: Json = None,
) -> None:
    """More requests than the capacity: rejections, latency of the others, memory, on Kafka.

    Quick: one minute; --full: ten. Every text is compared with the engine's. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a threshold is missed.
    """
    screen.require_matplotlib(plot)
    from app.bench.chaos.overload import OverloadResult, OverloadScale, bench_overload
    from app.bench.plots import plot_overload

    scale = OverloadScale(60 * (FULL_MINUTES if full else minutes), factor)
    results: list[OverloadResult] = []

    async def measure(out: Callback, progress: Callback) -> Report:
        report, found = await bench_overload(Settings(), scale, out, progress)
        results.append(found)
        return report

    report = _measure("overload", measure, json)
    if plot is not None:
        plot_overload(results[0], plot)
    _require_passed(report)


@_checked_command
def soak() -> Benchmark:
    """Constant load without faults: growth of memory, CPU time and latency, on Kafka.

    Two minutes; --full: twenty. Every text is compared with the engine's. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a threshold is missed.
    """
    from app.bench.chaos.soak import FULL, QUICK, bench_soak

    return Benchmark(bench_soak, QUICK, FULL)


@app.command()
def backlog(
    *,
    prompts: Annotated[
        int | None, typer.Option(help="Number of prompts, instead of 20000.", min=200)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sequence of faults.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run 2000 prompts: three minutes.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Run 200000 prompts: three hours.")] = False,
    json: Json = None,
) -> None:
    """Drain prompts that were there before any worker, while everything is killed, on Kafka.

    A third of them without faults, a third under kill -9, SIGSTOP and SIGTERM of every process, a
    third with interactive HTTP requests beside them as well. Each prompt must have exactly one
    result for a reader of committed records, with the engine's text; throughput is compared with
    the capacity of the engines, the memory of every process with itself. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a threshold is missed.
    """
    from app.bench.chaos.backlog_drain import DEFAULT, FULL, QUICK, bench_backlog

    scale = (FULL if full else QUICK if quick else DEFAULT)._replace(seed=seed)
    if prompts is not None:
        scale = scale._replace(prompts=prompts)
    _require_passed(_measure("backlog", partial(bench_backlog, Settings(), scale), json))


@_command
def vllm() -> Benchmark:
    """A worker around the real vLLM, beside vLLM alone: tokens/s, and the cost of KV events.

    Eight streams of a tiny model on this CPU; needs deploy/vllm-cpu/install.sh. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.streaming.vllm_overhead import FULL, QUICK, bench_vllm

    return Benchmark(bench_vllm, QUICK, FULL)


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
    """Several routers with 5 ms of ledger lag, beside one, on simulated workers.

    With single arrivals and with bursts; with bursts also beside routers that do not read each
    other's decisions. Quick: eight routers; --full: one, two, four and eight.

    --kafka: one and three router processes before six workers. Their state is compared with the log
    and with each other, and concurrent decisions for the same worker are counted. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Quick: half a minute of each; --full: one
    and a half. Exit code 1 if the state of a router is wrong.
    """
    from app.bench.routing import routers_kafka, routers_simulated

    if not kafka:
        size = routers_simulated.FULL if full else routers_simulated.QUICK
        run = partial(routers_simulated.bench_simulated_routers, size, trace)
        _measure("routers", run, json)
        return
    if trace is not None:
        raise typer.BadParameter("--kafka generates its requests: leave --trace out")
    scale = routers_kafka.FULL if full else routers_kafka.QUICK
    run = partial(routers_kafka.bench_kafka_routers, Settings(), scale)
    _require_passed(_measure("routers", run, json))


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


def _measure(name: str, run: RunBenchmark, json: Path | None = None) -> Report:
    """Run a benchmark behind a progress bar; show and write its report."""
    console = screen.make_console()
    with screen.progress_bar(console) as progress:
        bar = progress.add_task(name, total=1.0)
        report = uvloop.run(
            run(
                lambda line: console.print(line, style="dim", markup=False),
                lambda share: progress.advance(bar, share),
            )
        )
    report.show(console)
    if json is not None:
        report.write(json)
    return report


def _require_passed(report: Report) -> None:
    """End with exit code 1 if a threshold is missed."""
    if not report.is_passed:
        raise typer.Exit(1)


def _passes(command: Callable[..., None], **options: Any) -> bool:
    """Run a command of this module; whether it passed all its thresholds."""
    try:
        command(**options)
    except typer.Exit:
        return False
    return True
