"""`kvlane dead-letters`: what could not be read, why, and how to have it taken in again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape

from app.commands import screen
from app.settings import Settings

if TYPE_CHECKING:
    from app.letters import Content
    from streams.deadletters import Letter

HEX_BYTES = 512
"""What is shown of a record that cannot be read."""
Name = Annotated[
    str, typer.Argument(metavar="LETTER", help="PARTITION:OFFSET, as `list` shows it.")
]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Records that could not be read: list them, look at one, take it in again.",
)


@app.command("list")
def list_letters(
    *,
    topic: Annotated[str, typer.Option(help="Only those from this topic.")] = "",
    reason: Annotated[str, typer.Option(help="Only those whose reason has this in it.")] = "",
    limit: Annotated[int, typer.Option(help="Show so many, the newest.", min=1)] = 50,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write them to this file as well.")
    ] = None,
) -> None:
    """Show what was put aside: where it was from, when, and why. Reads only.

    Examples:

    - `kvlane dead-letters list`

    - `kvlane dead-letters list --topic requests --reason "does not belong"`
    """
    found, count = asyncio.run(_list(topic, reason, limit))
    table = screen.table(
        "letter", "put aside (UTC)", "from", "key", "type", "bytes", "tries", "reason",
        right="bytes tries",
    )  # fmt: skip
    for letter in found:
        origin = f"{letter.origin_topic}/{letter.origin_partition}:{letter.origin_offset}"
        table.add_row(
            letter.name, _time(letter.at_ms), escape(origin), escape(_text(letter.key)),
            escape(_text(letter.type)), str(letter.value_bytes), str(letter.tries),
            escape(letter.reason),
        )  # fmt: skip
    console = screen.console()
    if found:
        console.print(table)
    shown = f", the newest {len(found)} are shown" if count > len(found) else ""
    console.print(f"{count} dead letters{shown}", style="dim")
    if json is not None:
        told = [letter._replace(value=None)._asdict() for letter in found]
        json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")


@app.command()
def show(letter: Name) -> None:
    """Show one letter, and the record as this version reads it, or its bytes.

    The content is in the letter with KVLANE_KEEP_PROMPTS, else it is read from where it stood, as
    long as that is kept (an hour for requests, a day for prompts). It may hold what a prompt says.
    """
    asyncio.run(_show(letter))


@app.command()
def retry(
    letters: Annotated[
        list[str], typer.Argument(metavar="LETTER...", help="PARTITION:OFFSET each.")
    ],
) -> None:
    """Publish records again to the topic they are from, with their own key and headers.

    For those that could not be read by an older version, or that lay in a wrong lane. Doing it
    twice is harmless: a request is answered once. A record that still cannot be read is refused,
    and so is one whose id was taken in already. Exit code 1 when any was refused.
    """
    refused = asyncio.run(_retry(letters))
    if refused:
        raise typer.Exit(1)


async def _list(topic: str, reason: str, limit: int) -> tuple[list[Letter], int]:
    from app import publishing
    from app.letters import letters
    from streams.clock import SystemClock

    def wanted(letter: Letter) -> bool:
        return letter.origin_topic.startswith(topic) and reason in letter.reason

    async with publishing.kafka(Settings(), "kvlane-dead-letters") as log:
        with screen.progress("reading") as bar:
            return await letters(log, SystemClock(), limit, wanted, bar)


async def _show(name: str) -> None:
    from app import letters, publishing
    from streams.clock import SystemClock
    from streams.errors import RecordError

    async with publishing.kafka(Settings(), "kvlane-dead-letters") as log:
        clock = SystemClock()
        letter = await letters.find(log, clock, name)
        _print_letter(letter)
        try:
            content = await letters.content_of(log, clock, letter)
        except letters.BadLetter as e:
            typer.echo(f"\n{e}")
            return
        try:
            said = letters.plain(letters.meaning_of(letter, content))
        except RecordError as e:
            typer.echo(f"\n{content.where}, it still cannot be read: {e}\n{_hex(content)}")
            return
        typer.echo(f"\n{content.where}, it can be read:")
        typer.echo(msgspec.json.format(msgspec.json.encode(said), indent=2).decode())


async def _retry(names: Sequence[str]) -> int:
    from app import letters, publishing
    from streams.clock import SystemClock

    refused = 0
    async with publishing.kafka(Settings(), "kvlane-dead-letters") as log:
        clock = SystemClock()
        for name in dict.fromkeys(names):
            try:
                letter = await letters.find(log, clock, name)
                request_id, stands = await letters.retry(log, clock, letter)
            except letters.BadLetter as e:
                refused += 1
                typer.echo(f"refused: {e}", err=True)
                continue
            where = f"{letter.origin_topic}/{stands.partition}:{stands.offset}"
            typer.echo(f"{name}: {request_id} is published again, {where}")
    return refused


def _print_letter(letter: Letter) -> None:
    rows = {
        "letter": letter.name,
        "put aside": f"{_time(letter.at_ms)} UTC",
        "from": f"{letter.origin_topic}/{letter.origin_partition}:{letter.origin_offset}",
        "key": _text(letter.key),
        "type": _text(letter.type),
        "reason": letter.reason,
        "tries": letter.tries,
        "bytes": letter.value_bytes,
    }
    for name, value in rows.items():
        typer.echo(f"{name:10} {value}")


def _hex(content: Content) -> str:
    lines = []
    value = content.value[:HEX_BYTES]
    for start in range(0, len(value), 16):
        row = value[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):47}  {text}")
    if (more := len(content.value) - len(value)) > 0:
        lines.append(f"… {more} bytes more")
    return "\n".join(lines)


def _text(raw: bytes | None) -> str:
    """Bytes that are mostly text, on one line."""
    if raw is None:
        return "none"
    return repr(raw.decode(errors="backslashreplace"))[1:-1]


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
