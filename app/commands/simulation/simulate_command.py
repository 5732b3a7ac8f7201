"""The command `kvlane simulate`: routing policies on a request trace, without a deployment."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvlane.app.commands import console as screen
from kvlane.app.operator_error import install_hint
from kvlane.app.perf_curves import ProfileName
from kvlane.app.routing.policy_names import Objective, QueueOrder

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvlane.app.simulation.mixed_runs import MixedRun
    from kvlane.app.traces.mooncake_trace import TraceRow


DEFAULT_WORKERS = 8


def simulate(
    context: typer.Context,
    *,
    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE|gen:KIND",
            help="Requests in the Mooncake format, or generated: gen:shared-prefixes, "
            "gen:multi-turn, gen:agent-tools. Default: the 300 that ship with kvlane.",
        ),
    ] = "",
    requests: Annotated[
        int | None, typer.Option(help="Requests of gen:KIND.", min=1, show_default="3000")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second of gen:KIND.", min=0.001, show_default="5"),
    ] = None,
    trace_seed: Annotated[
        int | None, typer.Option(help="Random seed of gen:KIND.", show_default="0")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of workers.", min=1, max=1024, show_default="8")
    ] = None,
    prefill_workers: Annotated[
        int,
        typer.Option(
            help="Workers that compute prompts only, and hand them over to --decode-workers.",
            min=0,
            max=1024,
        ),
    ] = 0,
    decode_workers: Annotated[
        int, typer.Option(help="Workers that only decode.", min=0, max=1024)
    ] = 0,
    speed: Annotated[
        float, typer.Option(help="Factor on the recorded request rate.", min=0.001)
    ] = 1.0,
    jitter: Annotated[
        float, typer.Option(help="Largest random delay of an arrival, in seconds.", min=0.0)
    ] = 0.0,
    policy: Annotated[
        str,
        typer.Option(
            help="Policies (docs/routing.md), joined by commas; dynamo:64 sets its "
            "prefill_load_scale."
        ),
    ] = "predictive,dynamo,round_robin",
    seeds: Annotated[int, typer.Option(help="Runs of each policy.", min=1)] = 1,
    blocks: Annotated[
        int, typer.Option(help="Cache size of a worker, in blocks of 512 tokens.", min=1)
    ] = 2048,
    routers: Annotated[
        int, typer.Option(help="Number of routers that share the requests.", min=1, max=256)
    ] = 1,
    ledger_lag_ms: Annotated[
        float, typer.Option(help="Delay until routers read a ledger record.", min=0.0)
    ] = 0.0,
    no_stagger: Annotated[
        bool, typer.Option("--no-stagger", help="Routers do not take turns at each worker.")
    ] = False,
    dispatch_delay_ms: Annotated[
        float, typer.Option(help="Delay from a decision until the worker has it.", min=0.0)
    ] = 0.0,
    event_delay_ms: Annotated[
        float, typer.Option(help="Delay until routers read a worker's event.", min=0.0)
    ] = 0.0,
    learn_performance: Annotated[
        bool, typer.Option("--learn-performance", help="Routers learn the engines' performance.")
    ] = False,
    objective: Annotated[
        Objective, typer.Option(help="As KVLANE_OBJECTIVE, for policy predictive.")
    ] = "balanced",
    queue_order: Annotated[
        QueueOrder, typer.Option(help="As KVLANE_QUEUE_ORDER, for policy predictive.")
    ] = "sjf",
    ttft_target: Annotated[
        str,
        typer.Option(
            metavar="MS[,MS...]",
            help="Targets of the time to a first token, of the requests in turn; the table has the "
            "share that met theirs.",
        ),
    ] = "",
    profile: Annotated[
        ProfileName,
        typer.Option(
            help="Step times of engines: as published by NVIDIA Dynamo, or fitted to vLLM with a "
            "small model on an H100."
        ),
    ] = "published",
    slowdown: Annotated[
        float, typer.Option(help="Factor on the times of engines.", min=0.01, max=100.0)
    ] = 1.0,
    from_ledger: Annotated[
        str,
        typer.Option(
            metavar="FILE|PERIOD",
            help="Instead of a trace: the requests and decisions of a capture, or of a period of "
            "the log (-1h, -1h..-5m), on the recorded fleet.",
        ),
    ] = "",
    batch: Annotated[
        str,
        typer.Option(
            metavar="FILE|gen:KIND",
            help="Endless batch work of these requests during the trace, under policy predictive: "
            "compares no batch work, classes, classes without preemption, and no classes.",
        ),
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Plot the result to this file: .png, .svg, .pdf, .html.")
    ] = None,
    json: screen.JsonOption = None,
) -> None:
    """Replay a trace on simulated workers, with the product's own routing and simulated engine.

    Needs no broker and no processes: an hour of requests takes seconds. The same arguments give the
    same figures.

    Examples:

    - `kvlane simulate --policy predictive,dynamo:32 --workers 4`

    - `kvlane simulate --trace conversation_trace.jsonl --workers 16 --speed 8 --jitter 3 --seeds 5`

    - `kvlane simulate --trace gen:agent-tools --policy predictive,dynamo:16 --plot it.html`

    - `kvlane simulate --prefill-workers 4 --decode-workers 4`

    - `kvlane simulate --batch gen:offline`

    - `kvlane simulate --from-ledger -1h`: the last hour under other policies
    """
    from kvlane.app.commands.simulation.simulation_report import (
        plot_policies,
        rows_report,
        show_counterfactuals,
    )
    from kvlane.app.perf_curves import PROFILES, curves_from
    from kvlane.app.simulation.simulated_router import NetworkConditions
    from kvlane.app.simulation.simulation_runs import (
        PreparedTrace,
        SimulationRun,
        UnknownPolicy,
        parse_policy,
        result_row,
        run_timed,
    )
    from kvlane.app.simulation.trace_requests import ArrivalRate
    from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE
    from kvlane.indexer.precompile import compile_all

    policies = policy.split(",")
    try:
        for each in policies:
            parse_policy(each)
    except UnknownPolicy as e:
        raise typer.BadParameter(str(e)) from e
    conditions = NetworkConditions(
        dispatch_delay_ms,
        event_delay_ms,
        routers,
        ledger_lag_ms,
        publishes_curves=not learn_performance,
        staggers_routers=not no_stagger,
    )
    if from_ledger:
        _refuse_others(context)
        show_counterfactuals(from_ledger, policies, seeds, conditions, json)
        return
    if bool(prefill_workers) != bool(decode_workers):
        raise typer.BadParameter("--prefill-workers and --decode-workers are given together")
    if prefill_workers and (workers is not None or batch):
        raise typer.BadParameter("--prefill-workers excludes --workers and --batch")
    workers = prefill_workers + decode_workers or workers or DEFAULT_WORKERS
    curves = curves_from(PROFILES[profile].coefficients(1 / slowdown)) or PROFILES[profile]
    if batch:
        from kvlane.app.simulation.mixed_runs import MixedRun

        mixed = MixedRun(workers, speed, blocks, curves=curves)
        _show_mix(_rows(trace, requests, rate, trace_seed), batch, mixed, json)
        return
    check_drawable(plot)
    played = PreparedTrace(_rows(trace, requests, rate, trace_seed), _targets_ms(ttft_target))
    compile_all()
    like = SimulationRun(
        "", workers, ArrivalRate(speed, jitter), cache_blocks=blocks, conditions=conditions,
        curves=curves, prefill_workers=prefill_workers, objective=objective,
        queue_order=queue_order,
    )  # fmt: skip
    rows = []
    with screen.progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(policies) * seeds * len(played.rows))
        for each, seed in product(policies, range(seeds)):
            progress.update(bar, description=each)
            run = like._replace(policy=each, seed=seed)
            rows.append(result_row(*run_timed(played, run, lambda n: progress.advance(bar, n))))
    screen.show_result(json, rows_report(rows), lambda: _show(screen.make_console(), rows))
    if plot is not None:
        name = Path(trace).name if trace else BUNDLED_TRACE.name
        plot_policies(rows, name, datetime.now(UTC).date(), plot)


def _show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the common parameters in one line, and a table that fits into 80 columns."""
    like = rows[0]
    jitter = f", each up to {like['jitter_s']:g} s later" if like["jitter_s"] else ""
    conditions = f"; {like['conditions']}" if like["conditions"] else ""
    console.print(
        f"{like['requests']} requests for {like['workers']} workers, {like['speed']:g} times as "
        f"fast as recorded{jitter}{conditions}"
    )
    has_seeds = any(row["seed"] for row in rows)
    seed = ("seed",) if has_seeds else ()
    on_time = ("on time",) if rows[0]["on_time"] is not None else ()
    times = ("TTFT ms", "p50", "p99", "ITL ms", "p99 ", "E2E ms", "p99  ")
    table = screen.plain_table("policy", *seed, "reuse", *times, *on_time)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        figures = [*row["ttft_ms"].values(), *row["itl_ms"].values(), *row["e2e_ms"].values()]
        seed = (str(row["seed"]),) if has_seeds else ()
        table.add_row(
            row["policy"],
            *seed,
            f"{row['reuse']:.1%}",
            *(f"{ms:.3g}" if ms < 100 else f"{ms:.0f}" for ms in figures),
            *([f"{row['on_time']:.1%}"] if on_time else []),
        )
    console.print(table)
    for row in rows:
        if (error := row["prediction_error"])["itl_p90"] is not None:
            console.print(
                f"{row['policy']}: error of the predicted TTFT {error['ttft_p50']:.1%} (median), "
                f"{error['ttft_p90']:.1%} (p90); of the predicted ITL {error['itl_p50']:.1%}, "
                f"{error['itl_p90']:.1%}"
            )
    console.print(
        "reuse: prompt tokens found in a cache; times are means unless named otherwise", style="dim"
    )


BATCH_REQUESTS = 20_000
"""Requests of a generated kind that differ; then they come again with other contents."""


def _show_mix(rows: list[TraceRow], batch: str, run: MixedRun, json: Path | None) -> None:
    from kvlane.app.commands.simulation.simulation_report import rows_report, rows_table
    from kvlane.app.simulation.batch_work import MODES
    from kvlane.app.simulation.mixed_runs import Mix, mixed_row
    from kvlane.indexer.precompile import compile_all

    is_generated = batch.startswith("gen:")
    batch_rows = _rows(batch, BATCH_REQUESTS if is_generated else None, None, None)
    compile_all()
    with screen.progress_bar(Console(stderr=True)) as progress:
        bar = progress.add_task("", total=(1 + len(MODES)) * len(rows))
        mix = Mix(rows, batch_rows, run)
        found = mix.compare(MODES, lambda n: progress.advance(bar, n))
    compared = [mixed_row(each) for each in found]
    screen.show_result(
        json, rows_report(compared), lambda: screen.make_console().print(rows_table(compared))
    )


PLOT_SUFFIXES = (".png", ".svg", ".pdf", ".html")


def check_drawable(
    plot: Path | None, suffixes: Collection[str] = PLOT_SUFFIXES, option: str = "--plot"
) -> None:
    """Check before the work that the plot of an option can be drawn. Raises BadParameter."""
    if plot is None:
        return
    if plot.suffix not in suffixes:
        raise typer.BadParameter(
            f"{option} {plot}: its name must end in one of {', '.join(suffixes)}"
        )
    if find_spec("matplotlib") is None:
        raise typer.BadParameter(f"{option} needs matplotlib: {install_hint('plot')}")


def _rows(trace: str, requests: int | None, rate: float | None, seed: int | None) -> list[TraceRow]:
    """The requests of --trace. Raises BadParameter, InvalidTrace."""
    from kvlane.app.simulation.synthetic_traces import (
        NAME_PREFIX,
        TraceSize,
        UnknownTraceKind,
        generate_trace,
    )
    from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, read_trace

    if not trace.startswith(NAME_PREFIX):
        if (requests, rate, seed) != (None, None, None):
            raise typer.BadParameter("--requests, --rate and --trace-seed are for --trace gen:KIND")
        return read_trace(Path(trace) if trace else BUNDLED_TRACE)
    usual = TraceSize()
    size = TraceSize(
        usual.requests if requests is None else requests,
        usual.rate if rate is None else rate,
        usual.seed if seed is None else seed,
    )
    try:
        return generate_trace(trace.removeprefix(NAME_PREFIX), size)
    except UnknownTraceKind as e:
        raise typer.BadParameter(f"--trace {e}") from e


def _targets_ms(text: str) -> list[float]:
    """Raises BadParameter for anything but times."""
    try:
        targets_ms = [float(each) for each in text.split(",") if text]
    except ValueError:
        targets_ms = [0.0]
    if not all(0 < each < math.inf for each in targets_ms):
        raise typer.BadParameter("--ttft-target takes milliseconds, joined by commas")
    return targets_ms


def _refuse_others(context: typer.Context) -> None:
    """Raises BadParameter for options that contradict --from-ledger."""
    own = ("trace", "batch", "requests", "rate", "trace_seed", "workers", "speed", "jitter",
           "blocks", "profile", "slowdown", "plot", "objective", "queue_order",
           "ttft_target")  # fmt: skip
    for name in own:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--from-ledger takes its own requests and fleet, no --{name.replace('_', '-')}"
            )
