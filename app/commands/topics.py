"""`kvlane topics`: making the topics of a deployment, telling what differs, and who may do what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from app.settings import Settings
from streams.topics import Right, rights

if TYPE_CHECKING:
    from streams.provision import TopicState

app = typer.Typer(no_args_is_help=True, help="Create and check the topics of a deployment.")


@app.command()
def create() -> None:
    """Create the topics that are missing. What exists stays as it is; run it as often as you like.

    KVLANE_LANES, KVLANE_REPLICATION and KVLANE_MIN_INSYNC decide how new ones look.
    """
    if not asyncio.run(_topics(creating=True)):
        raise typer.Exit(1)


@app.command()
def describe() -> None:
    """Show every topic and what differs from what it should be. Exit code 1 if anything does."""
    if not asyncio.run(_topics(creating=False)):
        raise typer.Exit(1)


@app.command()
def acls() -> None:
    """Print the commands that give each role its rights, and no more, for Kafka's own tool.

    The principals are named after the roles (User:router …): put in those of your processes.
    """
    settings = Settings()
    servers = settings.bootstrap_servers or "HOST:PORT"
    for right in rights():
        typer.echo(" ".join(_command(right, servers, settings.topic_prefix)))


def _command(right: Right, servers: str, prefix: str) -> list[str]:
    """One command line of kafka-acls.sh."""
    name = prefix + right.name
    kind = "literal" if right.name else "prefixed"
    return [
        *("kafka-acls.sh", "--bootstrap-server", servers, "--add"),
        *("--allow-principal", f"User:{right.role}", "--operation", right.operation),
        *(f"--{right.resource}", name or "'*'"),
        *("--resource-pattern-type", kind if name else "literal"),
    ]


async def _topics(*, creating: bool) -> bool:
    from app.publishing import kafka
    from streams import provision

    settings = Settings()
    work = provision.create if creating else provision.describe
    async with kafka(settings, "kvlane-topics") as log:
        states = await work(
            log,
            lanes=settings.lanes,
            replication=settings.replication,
            min_insync=settings.min_insync,
        )
    Console().print(_table(states, settings.topic_prefix), highlight=False)
    return all(state.as_it_should_be for state in states)


def _table(states: Sequence[TopicState], prefix: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("topic", "partitions", "state"):
        table.add_column(column)
    for state in states:
        wrong = [f"{k} is {v}, should be {w}" for k, (v, w) in state.differing_configs.items()]
        if not state.exists:
            wrong = ["missing: kvlane topics create"]
        elif state.partitions != state.expected_partitions:
            wrong.insert(0, f"should have {state.expected_partitions} partitions")
        table.add_row(
            f"{prefix}{state.name}",
            str(state.partitions),
            "[yellow]" + "\n".join(wrong) + "[/]" if wrong else "as it should be",
        )
    return table
