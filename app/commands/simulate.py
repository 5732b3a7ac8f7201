"""`kvlane simulate`: what a policy does on a trace of requests, before anybody deploys it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from app.trace import TraceRow

TABLE_WIDTH = 160
"""Of tables in files and pipes, in characters."""


def simulate(
    context: typer.Context,
    *,
    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE|gen:KIND",
            help="Requests in Mooncake's form, or such as are made up: gen:shared-prefixes, "
            "gen:multi-turn, gen:agent-tools. Without, the 300 that come with kvlane.",
        ),
    ] = "",
    requests: Annotated[
        int | None, typer.Option(help="Of gen:KIND, how many requests.", min=1, show_default="3000")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Of gen:KIND, requests a second.", min=0.001, show_default="5"),
    ] = None,
    trace_seed: Annotated[
        int | None, typer.Option(help="Of gen:KIND, what it is made from.", show_default="0")
    ] = None,
    workers: Annotated[int, typer.Option(help="How many workers.", min=1, max=1024)] = 8,
    speed: Annotated[
        float, typer.Option(help="How many times faster than recorded requests come.", min=0.001)
    ] = 1.0,
    jitter: Annotated[
        float, typer.Option(help="Put each arrival off by up to so many seconds.", min=0.0)
    ] = 0.0,
    policy: Annotated[
        str,
        typer.Option(help="One or more, joined by commas; dynamo:64 sets its prefill_load_scale."),
    ] = "predictive,dynamo,round_robin",
    seeds: Annotated[int, typer.Option(help="Runs of each policy.", min=1)] = 1,
    blocks: Annotated[
        int, typer.Option(help="Blocks of 512 tokens in the cache of a worker.", min=1)
    ] = 2048,
    routers: Annotated[
        int, typer.Option(help="How many routers share the requests.", min=1, max=256)
    ] = 1,
    lag_ms: Annotated[
        float, typer.Option(help="Until routers read what is on the ledger.", min=0.0)
    ] = 0.0,
    hop_ms: Annotated[
        float, typer.Option(help="From a decision until its worker has the request.", min=0.0)
    ] = 0.0,
    notice_ms: Annotated[
        float, typer.Option(help="Until routers read what happened on a worker.", min=0.0)
    ] = 0.0,
    learn_curves: Annotated[
        bool, typer.Option("--learn-curves", help="Do not tell routers how fast engines are.")
    ] = False,
    slowness: Annotated[
        float, typer.Option(help="How many times longer engines take.", min=0.01, max=100.0)
    ] = 1.0,
    from_ledger: Annotated[
        str,
        typer.Option(
            metavar="FILE|PERIOD",
            help="Instead of a trace: what was decided in a capture, or in a period of the log "
            "(-1h, -1h..-5m), on the fleet that there was.",
        ),
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw the result into this file: .png, .svg, .pdf, .html.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file as well.")
    ] = None,
) -> None:
    """Play a trace against simulated workers, with the routing and the engine steps that ship.

    No broker and no processes: an hour of requests takes seconds. The same arguments give the same
    figures. Times are those of NVIDIA Dynamo's published engine profile.

    Examples:

    - `kvlane simulate --policy predictive,dynamo:32 --workers 4`

    - `kvlane simulate --trace conversation_trace.jsonl --workers 16 --speed 8 --jitter 3 --seeds 5`

    - `kvlane simulate --trace gen:agent-tools --policy predictive,dynamo:16 --plot it.html`

    - `kvlane simulate --from-ledger -1h`: what the last hour would have been under other policies
    """
    from app.bench.report import Report
    from app.bench.simulate import timed
    from app.engine.curves import Curves, curves_of
    from app.simulation.conditions import Conditions
    from app.simulation.runs import BadPolicy, Run, Trace, row, tuning_of
    from app.simulation.traffic import Pace
    from indexer.warm import compile_all

    policies = policy.split(",")
    try:
        for each in policies:
            tuning_of(each)
    except BadPolicy as e:
        raise typer.BadParameter(str(e)) from e
    conditions = Conditions(hop_ms, notice_ms, routers, lag_ms, tells_curves=not learn_curves)
    if from_ledger:
        from app.commands.redecided import show

        _refuse_others(context)
        show(from_ledger, policies, seeds, conditions, json)
        return
    _can_draw(plot)
    played = Trace(_rows(trace, requests, rate, trace_seed))
    compile_all()
    like = Run(
        "", workers, Pace(speed, jitter), blocks=blocks, conditions=conditions,
        curves=curves_of(Curves().numbers(1 / slowness)) or Curves(),
    )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    rows = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=console,
    ) as progress:  # fmt: skip
        bar = progress.add_task("", total=len(policies) * seeds * len(played.rows))
        for each, seed in product(policies, range(seeds)):
            progress.update(bar, description=each)
            run = like._replace(policy=each, seed=seed)
            rows.append(row(*timed(played, run, lambda n: progress.advance(bar, n))))
    if rows[0]["conditions"]:
        console.print(rows[0]["conditions"], style="dim", highlight=False)
    shown = [{name: value for name, value in each.items() if name != "conditions"} for each in rows]
    Report("simulate", shown, []).show(console)
    if json is not None:
        Report("simulate", rows, []).write(json)
    if plot is not None:
        from app.bench.drawing import draw_policies

        draw_policies(rows, plot)


DRAWN = (".png", ".svg", ".pdf", ".html")


def _can_draw(plot: Path | None) -> None:
    """Say before the work, and not after it, that a picture is not to be had."""
    if plot is None:
        return
    if plot.suffix not in DRAWN:
        raise typer.BadParameter(f"--plot {plot}: its name must end in one of {', '.join(DRAWN)}")
    if find_spec("matplotlib") is None:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'kvlane[plot]'")


def _rows(trace: str, requests: int | None, rate: float | None, seed: int | None) -> list[TraceRow]:
    """The trace that was asked for. Raises BadParameter, BadTrace."""
    from app.simulation.generated import PREFIX, Size, UnknownKind, generated
    from app.trace import SHIPPED, read_trace

    if not trace.startswith(PREFIX):
        if (requests, rate, seed) != (None, None, None):
            raise typer.BadParameter("--requests, --rate and --trace-seed are for --trace gen:KIND")
        return read_trace(Path(trace) if trace else SHIPPED)
    usual = Size()
    size = Size(
        usual.requests if requests is None else requests,
        usual.rate if rate is None else rate,
        usual.seed if seed is None else seed,
    )
    try:
        return generated(trace.removeprefix(PREFIX), size)
    except UnknownKind as e:
        raise typer.BadParameter(f"--trace {e}") from e


def _refuse_others(context: typer.Context) -> None:
    """Raises BadParameter for options that say what a capture says itself."""
    own = ("trace", "requests", "rate", "trace_seed", "workers", "speed", "jitter", "blocks",
           "slowness", "plot")  # fmt: skip
    for name in own:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"--from-ledger takes its own requests and fleet, no --{name.replace('_', '-')}"
            )
