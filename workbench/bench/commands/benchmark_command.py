"""The common form of the commands of `kvlane bench`: options, progress bar, report, exit code."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import uvloop

from kvlane.app.commands import console as screen

if TYPE_CHECKING:
    from workbench.bench.report import Report

Callback = Callable[[Any], None]
RunBenchmark = Callable[[Callback, Callback], Coroutine[Any, Any, "Report"]]
"""A benchmark with its options: takes callbacks for a line of text and for a share of the work that
is done, and returns its report."""

Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the report to this file, as JSON.")
]
Full = Annotated[bool, typer.Option("--full", help="Run the long form, not the quick one.")]
Trace = Annotated[
    Path | None, typer.Option(help="File with the whole conversation trace of Mooncake.")
]


class Benchmark(NamedTuple):
    """A benchmark and the amounts of work of its quick and its full form."""

    run: Callable[..., Coroutine[Any, Any, Report]]
    quick: Any
    full: Any


Load = Callable[[], Benchmark]
"""Imports a benchmark when it is run, so that `--help` is quick; its docstring is the help text."""


def benchmark(app: typer.Typer, *, exits: bool = False) -> Callable[[Load], Callable[..., None]]:
    """A command with options `--full` and `--json` only.

    Its exit code is 0, also if a threshold is missed; with `exits` it is 1 then.
    """

    def decorate(load: Load) -> Callable[..., None]:
        name = load.__name__.replace("_", "-")

        def command(*, full: Full = False, json: Json = None) -> None:
            from kvlane.app.settings import Settings

            run, quick, form = load()
            report = measure(name, partial(run, Settings(), form if full else quick), json)
            if exits:
                require_passed(report)

        app.command(name, help=load.__doc__)(command)
        return command

    return decorate


def trace_benchmark(app: typer.Typer) -> Callable[[Load], Callable[..., None]]:
    """A command with option `--trace` as well, and exit code 1 if a threshold is missed."""

    def decorate(load: Load) -> Callable[..., None]:
        def command(*, trace: Trace = None, full: Full = False, json: Json = None) -> None:
            run, quick, form = load()
            scale = form if full else quick
            require_passed(measure(load.__name__, partial(run, scale, trace), json))

        app.command(load.__name__, help=load.__doc__)(command)
        return command

    return decorate


def measure(name: str, run: RunBenchmark, json: Path | None = None) -> Report:
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


def require_passed(report: Report) -> None:
    """End with exit code 1 if a threshold is missed."""
    if not report.is_passed:
        raise typer.Exit(1)
