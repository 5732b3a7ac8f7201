"""The command `kvlane rehearse`: requests of the log again at another model, answers compared."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client
from kvlane.app.commands.simulation.simulate_command import check_drawable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlane.app.rehearsal.rehearsal import Rehearsal
    from kvlane.app.routing.state.fleet import Fleet
    from kvlane.streams.records import ModelCard

TIMEOUT_S = 43_200.0
INTERRUPTED = 130
"""Exit code after Ctrl-C, as of other programs."""


def rehearse(
    *,
    to: Annotated[str, typer.Option(metavar="MODEL", help="The model that answers again.")],
    since: Annotated[
        str, typer.Option("--from", metavar="TIME", help="A time (2026-11-01T22:00Z), or an age.")
    ] = "-1h",
    until: Annotated[str, typer.Option(metavar="TIME", help="Empty: now.")] = "",
    model: Annotated[
        str, typer.Option(help="Only requests for this model or alias; empty: for any.")
    ] = "",
    share: Annotated[
        float, typer.Option(help="Share of the requests, chosen by their ids.", min=1e-9, max=1.0)
    ] = 0.1,
    limit: Annotated[
        int, typer.Option(help="Requests at most, chosen likewise.", min=1, max=100_000)
    ] = 1000,
    in_flight: Annotated[
        int, typer.Option(help="Requests that wait or run at a time.", min=1, max=10_000)
    ] = 100,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.", min=1)] = TIMEOUT_S,
    label: Annotated[
        str, typer.Option(help="Another label runs the same requests anew, as for other weights.")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write a page with diagrams to this file: .html.")
    ] = None,
    json: screen.JsonOption = None,
) -> None:
    """Run requests of the log again at another model, and compare the answers.

    They run in class batch: on the capacity that interactive requests leave. No client gets an
    answer, and their tenant is `rehearsal`. Answers are compared token by token, with another
    tokenizer by their texts, and all by length, times and finish reasons. Of a request that draws
    tokens without a seed only these figures count.

    After Ctrl-C run the same command again: it continues, and repeats each request once.

    Examples:

    - `kvlane rehearse --from -12h --to model-b --share .1`

    - `kvlane rehearse --model llama-a --to llama-b --limit 200 --html rehearsal.html`

    - `kvlane rehearse --to llama-a --label awq-2 --json - | jq .verdicts`
    """
    from kvlane.app.audit.time_range import range_between
    from kvlane.app.commands.rehearsal.rehearsal_report import show_report, write_page
    from kvlane.app.commands.worker_commands import followed_fleet
    from kvlane.app.preprocess.models.model_names import ModelNames
    from kvlane.app.rehearsal.rehearsal import Rehearsal, RehearsalPlan
    from kvlane.app.settings import settings_for_writing
    from kvlane.streams.clock import SystemClock
    from kvlane.streams.errors import StreamError

    check_drawable(html, (".html",), "--html")
    settings, clock = settings_for_writing(), SystemClock()
    period = range_between(since, until, clock.wall_ms())
    begun: list[Rehearsal] = []

    async def run() -> None:
        async with kafka_client.connect_kafka(settings, "kvlane-rehearse") as log:
            async with followed_fleet(log, clock) as fleet:
                cards = ModelNames(fleet).cards()
                target = _ready_model(fleet, cards, to)
            plan = RehearsalPlan(
                period, target, model, share, limit, in_flight,
                min(timeout, settings.batch_max_lifetime_s), label,
            )  # fmt: skip
            begun.append(rehearsal := Rehearsal(log, clock, plan, cards))
            with screen.progress_bar(Console(stderr=True), transient=True) as bar:
                task = bar.add_task("reading")

                def compared(done: int, total: int) -> None:
                    name = f"rehearsing, {rehearsal.differing} differ"
                    bar.update(task, description=name, completed=done, total=total)

                await rehearsal.run(
                    lambda done, total: bar.update(task, completed=done, total=total), compared
                )

    error: BaseException | None = None
    try:
        asyncio.run(run())
    except (KeyboardInterrupt, StreamError) as e:
        if not begun or not begun[0].pairs:
            raise
        error = e
    report, pairs = begun[0].report(), begun[0].pairs
    screen.show_result(json, report, lambda: show_report(report, screen.make_console()))
    if html is not None:
        write_page(report, pairs, html)
    if isinstance(error, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED)
    if error is not None:
        raise error


def _ready_model(fleet: Fleet, cards: Mapping[str, ModelCard], name: str) -> ModelCard:
    """The card of a model with a ready worker. Raises RehearsalRefused."""
    from kvlane.app.preprocess.models.model_names import unknown_model
    from kvlane.app.rehearsal.request_sample import RehearsalRefused

    if (card := cards.get(name)) is None:
        if (alias := fleet.aliases.get(name)) is not None:
            models = ", ".join(target.model for target in alias.targets)
            raise RehearsalRefused(f"{name!r} is an alias: name one of its models ({models})")
        raise RehearsalRefused(unknown_model(name, cards), correction="`kvlane models` lists all.")
    if not any(fleet.is_ready(m.card.id) for m in fleet.members.values() if m.card.model == name):
        raise RehearsalRefused(
            f"the model {name!r} has no ready worker",
            correction="Start one; `kvlane workers` shows the state of each.",
        )
    return card
