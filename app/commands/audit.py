"""`kvlane replay` and `kvlane explain`: what was known, and why things went as they did."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from app.settings import Settings

if TYPE_CHECKING:
    from app.audit.explain import Explained, Step
    from app.audit.replay import Replayed

TABLE_WIDTH = 160
"""Of tables in files and pipes, in characters."""
Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as well.")]


def replay(
    *,
    fold: Annotated[
        Literal["load", "fleet", "index"],
        typer.Option(help="load: requests and runs; fleet: workers; index: cached blocks."),
    ],
    at: Annotated[
        str,
        typer.Option(
            metavar="TIME|OFFSETS",
            help="Up to here, not to the end: 2025-11-21T06:40:00Z, -15m, or "
            "ledger/3:1200,ledger/4:980.",
        ),
    ] = "",
    json: Json = None,
) -> None:
    """Build again, from the log alone, what every router knows.

    Prints the positions that were read to, a hash of the state (two replicas at the same positions
    have the same one), and what is in it. Reads only.

    Examples:

    - `kvlane replay --fold load`: which requests are open, and on which worker

    - `kvlane replay --fold fleet --at -15m`: which workers there were a quarter of an hour ago

    - `kvlane replay --fold load --at ledger/3:1200 --json load.json`: lane 3 before offset 1200
    """
    result = asyncio.run(_replay(fold, at))
    _show_replayed(result, _console())
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
) -> None:
    """Tell the story of a request: who decided what, from which figures, and how it went.

    Shows what was asked for, each decision with its candidates and the inputs of their costs, what
    the workers reported, why it moved, what readers saw, and the end. From the log alone: the
    ledger is kept for a day, requests and answers for an hour. Never shows prompts or answers.

    Examples:

    - `kvlane explain 019aa5c1-7f3e-7c02-9d41-0123456789ab-5e884898`

    - `kvlane explain job-17`: an id without a time in it; the whole lane is read
    """
    story = asyncio.run(_explain(request_id))
    console = _console()
    if not story.steps:
        console.print(
            f"[red]nothing is known of[/] {escape(request_id)}: no record of it is in lane "
            f"{story.lane}. Is the id whole, KVLANE_TOPIC_PREFIX right, and is it less than a day "
            "old?",
            highlight=False,
        )
        raise typer.Exit(1)
    _show_story(story, console)


async def _replay(fold: Any, at: str) -> Replayed:
    from app import publishing
    from app.audit.moments import moment
    from app.audit.replay import replay as build
    from streams.clock import SystemClock

    settings, clock = Settings(), SystemClock()
    wanted = moment(at, clock.wall_ms()) if at else None
    async with publishing.kafka(settings, "kvlane-replay") as log:
        with _progress("reading") as progress:
            return await build(log, settings, clock, fold, wanted, progress)


async def _explain(request_id: str) -> Explained:
    from app import publishing
    from app.audit.explain import explain as tell
    from streams.clock import SystemClock

    async with publishing.kafka(Settings(), "kvlane-explain") as log:
        with _progress("reading") as progress:
            return await tell(log, SystemClock(), request_id, progress)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, gone when it is done."""
    with Progress(
        TextColumn(name), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _show_replayed(result: Replayed, console: Console) -> None:
    table = _table("partition", "read from", "position", "records", "malformed", "state hash")
    for state in result.partitions:
        if state.records or state.start < state.position:
            numbers = (state.start, state.position, state.records, state.malformed)
            name = f"{state.topic}/{state.partition}"
            table.add_row(name, *map(str, numbers), state.state_hash)
    console.print(table, highlight=False)
    empty = sum(not s.records and s.start == s.position for s in result.partitions)
    if empty:
        console.print(f"{empty} partitions without records", style="dim", highlight=False)
    console.print(f"\n[bold]{result.fold}[/] state hash {result.state_hash}", highlight=False)
    summary = _table("", "")
    summary.show_header = False
    for name, value in result.summary.items():
        rows = value.items() if isinstance(value, dict) else [("", _said(value))]
        for number, (key, item) in enumerate(rows or [("", "none")]):
            summary.add_row(name if number == 0 else "", escape(f"{key}  {item}".strip()))
    console.print(summary, highlight=False)


def _show_story(story: Explained, console: Console) -> None:
    from app.audit.moments import clock_time

    began_ms = story.steps[0].at_ms
    console.print(
        f"[bold]{escape(story.request_id)}[/] in lane {story.lane}, "
        f"from {clock_time(began_ms)} UTC",
        highlight=False,
    )
    for step in story.steps:
        after_ms = step.at_ms - began_ms
        said = "  ".join(f"[dim]{name}[/] {escape(_said(v))}" for name, v in step.fields.items())
        place = f"[dim]{step.source.topic}/{step.source.partition}:{step.offset}[/]"
        console.print(f"\n+{after_ms / 1000:.3f} s  [bold]{step.name}[/]  {place}", highlight=False)
        console.print(f"  {said}", highlight=False)
        if step.candidates:
            console.print(_candidates(step), highlight=False)
    ending = story.ending or "not ended yet, or its end is not kept any more"
    console.print(f"\n[bold]ended:[/] {escape(ending)}", highlight=False)


def _candidates(step: Step) -> Table:
    """One row for each candidate, the chosen one marked; a column for each input that any has."""
    from app.audit.explain import is_chosen

    fields = [
        field.name
        for field in msgspec.structs.fields(step.candidates[0])
        if field.required
        or field.name in ("rank", "cost")
        or any(getattr(candidate, field.name) != field.default for candidate in step.candidates)
    ]
    table = _table("", *fields)
    for candidate in sorted(step.candidates, key=lambda c: c.cost):
        chosen = is_chosen(candidate, step.fields)
        values = (escape(_said(getattr(candidate, name))) for name in fields)
        table.add_row("  *" if chosen else "", *values, style="bold" if chosen else "")
    return table


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_said(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value)) or "none"
    return str(value)
