"""`kvlane replay` and `kvlane explain`: what was known, and why things went as they did."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.markup import escape

from app.commands import capture, screen
from app.settings import Settings

if TYPE_CHECKING:
    from app.audit.explain import Explained
    from app.audit.recompute import Recomputed
    from app.audit.replay import Replayed

Json = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as well.")]


def replay(
    *,
    fold: Annotated[
        Literal["load", "fleet", "index"] | None,
        typer.Option(help="load: requests and runs; fleet: workers; index: cached blocks."),
    ] = None,
    decisions: Annotated[
        str,
        typer.Option(
            metavar="FILE|PERIOD",
            help="Instead: take the decisions of a capture, or of a period (-1h, -1h..-5m), again.",
        ),
    ] = "",
    at: Annotated[
        str,
        typer.Option(
            metavar="TIME|OFFSETS",
            help="A fold up to here, not to the end: 2025-11-21T06:40:00Z, -15m, or "
            "ledger/3:1200,ledger/4:980.",
        ),
    ] = "",
    json: Json = None,
) -> None:
    """Build again, from the log alone, what every router knows; or what they decided.

    --fold prints the positions that were read to, a hash of the state (two replicas at the same
    positions have the same one), and what is in it. --decisions takes every decision again from its
    own record, place and costs to the last bit, and prints how many came out the same and the first
    that did not; exit code 1 if there is one. Reads only.

    Examples:

    - `kvlane replay --fold load`: which requests are open, and on which worker

    - `kvlane replay --fold fleet --at -15m`: which workers there were a quarter of an hour ago

    - `kvlane replay --fold load --at ledger/3:1200 --json load.json`: lane 3 before offset 1200

    - `kvlane replay --decisions -1h`: all decisions of the last hour
    """
    if (fold is None) == (not decisions):
        raise typer.BadParameter("give one of --fold and --decisions")
    if decisions:
        found = _recompute(decisions)
        _show_recomputed(found)
        _write(json, found)
        if found.differ:
            raise typer.Exit(1)
        return
    result = asyncio.run(_replay(fold, at))
    _show_replayed(result)
    _write(json, result)


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    *,
    inputs: Annotated[
        bool, typer.Option("--inputs", help="Show all inputs of every candidate's cost.")
    ] = False,
    json: Json = None,
) -> None:
    """Tell why a request went where it went, and how it went there.

    First each decision with who came next and what the engine found, then the story: what was
    asked for, the candidates with the terms of their costs, what the workers reported, why it
    moved, what readers saw, and the end. From the log alone: the ledger is kept for a day, requests
    and answers for an hour. Never shows prompts or answers.

    Examples:

    - `kvlane explain 019aa5c1-7f3e-7c02-9d41-0123456789ab-5e884898`

    - `kvlane explain job-17 --inputs`: an id without a time in it; the whole lane is read
    """
    from app.commands import story

    told = asyncio.run(_explain(request_id))
    if json is not None and told.steps:
        _write(json, story.as_data(told))
    if not story.show(told, screen.console(), inputs=inputs):
        raise typer.Exit(1)


async def _replay(fold: Any, at: str) -> Replayed:
    from app import publishing
    from app.audit.moments import moment
    from app.audit.replay import replay as build
    from streams.clock import SystemClock

    settings, clock = Settings(), SystemClock()
    wanted = moment(at, clock.wall_ms()) if at else None
    async with publishing.kafka(settings, "kvlane-replay") as log:
        with screen.progress("reading") as progress:
            return await build(log, settings, clock, fold, wanted, progress)


async def _explain(request_id: str) -> Explained:
    from app import publishing
    from app.audit.explain import explain as tell
    from streams.clock import SystemClock

    async with publishing.kafka(Settings(), "kvlane-explain") as log:
        with screen.progress("reading") as progress:
            return await tell(log, SystemClock(), request_id, progress)


def _recompute(source: str) -> Recomputed:
    from app.audit.recompute import Recomputed

    found = Recomputed()
    capture.read(source, found.take)
    return found


def _write(file: Path | None, result: Any) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def _show_recomputed(found: Recomputed) -> None:
    console = screen.console()
    policies = ", ".join(f"{name} {count}" for name, count in found.policies.most_common())
    console.print(
        f"{found.decisions} decisions taken again ({policies or 'none'}): "
        f"[bold]{found.same} the same to the last bit[/], {found.differ} otherwise"
    )
    for count, why in (
        (found.without_inputs, "record no candidates, or a policy of another version"),
        (found.without_session, "depend on a session whose request is not kept any more"),
    ):
        if count:
            console.print(f"{count} could not be taken again: they {why}", style="yellow")
    if found.first:
        console.print(f"[red]the first:[/] {escape(found.first)}")


def _show_replayed(result: Replayed) -> None:
    console = screen.console()
    table = screen.table("partition", "read from", "position", "records", "malformed", "state hash")
    for state in result.partitions:
        if state.records or state.start < state.position:
            numbers = (state.start, state.position, state.records, state.malformed)
            name = f"{state.topic}/{state.partition}"
            table.add_row(name, *map(str, numbers), state.state_hash)
    console.print(table)
    empty = sum(not s.records and s.start == s.position for s in result.partitions)
    if empty:
        console.print(f"{empty} partitions without records", style="dim")
    console.print(f"\n[bold]{result.fold}[/] state hash {result.state_hash}")
    summary = screen.table("", "")
    summary.show_header = False
    for name, value in result.summary.items():
        rows = value.items() if isinstance(value, dict) else [("", screen.said(value))]
        for number, (key, item) in enumerate(rows or [("", "none")]):
            summary.add_row(name if number == 0 else "", escape(f"{key}  {item}".strip()))
    console.print(summary)
