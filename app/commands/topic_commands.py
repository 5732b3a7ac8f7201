"""The commands `kvlane topics`: create and check the topics of a deployment, and print ACLs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client
from kvlane.streams.clock import SystemClock
from kvlane.streams.topics import AclRule, required_acls

if TYPE_CHECKING:
    from kvlane.streams.kafka.provision import TopicState

app = typer.Typer(
    no_args_is_help=True,
    help="Create and check the topics of a deployment.\n\nExample: `kvlane topics create`",
)


@app.command()
def create(*, json: screen.JsonOption = None) -> None:
    """Create missing topics. Existing topics are not changed; safe to repeat.

    KVLANE_LANES, KVLANE_REPLICATION_FACTOR and KVLANE_MIN_INSYNC_REPLICAS configure new topics.
    Exit code 1 if a topic that exists differs.

    Example: `KVLANE_LANES=16 kvlane topics create`
    """
    _show_topics(json, creating=True)


@app.command()
def describe(*, json: screen.JsonOption = None) -> None:
    """Show every topic and its differences from the expected state. Exit code 1 if any.

    Example: `kvlane topics describe --json - | jq '.topics[] | select(.exists | not) | .name'`
    """
    _show_topics(json, creating=False)


@app.command()
def skip(
    place: Annotated[
        str, typer.Argument(metavar="TOPIC:PARTITION:OFFSET", help="The record in the error.")
    ],
) -> None:
    """Skip a record of a newer version that older readers must not skip by themselves.

    Processes that failed at its position continue after it when they are restarted. They miss the
    change that the record describes: an upgrade is better.

    Example: `kvlane topics skip registry:0:1234`
    """
    name, _, position = place.partition(":")
    partition, _, offset = position.partition(":")
    if not (name and partition.isdecimal() and offset.isdecimal()):
        raise typer.BadParameter(f"invalid position {place!r}: expected TOPIC:PARTITION:OFFSET")
    stands = asyncio.run(_skip(name, int(partition), int(offset)))
    typer.echo(f"readers skip {place} from now on (registry:0:{stands})")


@app.command()
def acls() -> None:
    """Print `kafka-acls.sh` commands that grant each role exactly the rights it needs.

    The principals are named after the roles (User:router …): replace them with yours.

    Example: `kvlane topics acls > acls.sh`
    """
    from kvlane.app.settings import Settings

    settings = Settings()
    servers = settings.bootstrap_servers or "HOST:PORT"
    for right in required_acls(settings.reply_prefixes):
        typer.echo(" ".join(_command(right, servers, settings.topic_prefix)))


def _command(right: AclRule, servers: str, prefix: str) -> list[str]:
    name = right.name if right.is_foreign else prefix + right.name
    kind = "prefixed" if right.is_prefix or not right.name else "literal"
    return [
        *("kafka-acls.sh", "--bootstrap-server", servers, "--add"),
        *("--allow-principal", f"User:{right.role}", "--operation", right.operation),
        *(f"--{right.resource}", name or "'*'"),
        *("--resource-pattern-type", kind if name else "literal"),
    ]


async def _skip(topic: str, partition: int, offset: int) -> int:
    from kvlane.app.settings import settings_for_writing
    from kvlane.streams.ports import Partition
    from kvlane.streams.reading.decoding import write_skip

    settings = settings_for_writing()
    name = topic.removeprefix(settings.topic_prefix)
    async with kafka_client.connect_kafka(settings, "kvlane-topics") as log:
        source = Partition(name, partition)
        return (await write_skip(log, SystemClock(), source, offset)).offset


def _show_topics(json: Path | None, *, creating: bool) -> None:
    from kvlane.app.settings import Settings

    states, prefix = asyncio.run(_topics(creating=creating)), Settings().topic_prefix
    rows = [state._asdict() for state in states]
    shown = Console()
    screen.show_result(
        json, {"topics": rows}, lambda: shown.print(_table(states, prefix), highlight=False)
    )
    if not all(state.is_as_expected for state in states):
        raise typer.Exit(1)


async def _topics(*, creating: bool) -> Sequence[TopicState]:
    from kvlane.app.settings import Settings, settings_for_writing
    from kvlane.streams.kafka import provision

    settings = settings_for_writing() if creating else Settings()
    work = provision.create_topics if creating else provision.describe_topics
    async with kafka_client.connect_kafka(settings, "kvlane-topics") as log:
        return await work(log, **settings.topic_options())


def _table(states: Sequence[TopicState], prefix: str) -> Table:
    table = screen.plain_table("topic", "partitions", "state")
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
