"""The commands `kvlane dead-letters`: list, show and retry malformed or misplaced records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvlane.app.commands import console as screen
from kvlane.app.commands import kafka_client
from kvlane.streams.clock import SystemClock

if TYPE_CHECKING:
    from kvlane.app.audit.dead_letter_retry import DeadLetterRecord
    from kvlane.streams.reading.dead_letter_format import DeadLetter

MAX_HEX_BYTES = 512
"""Most bytes of a malformed record to show."""
DeadLetterId = Annotated[
    str, typer.Argument(metavar="ID", help="PARTITION:OFFSET, as `list` shows it.")
]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Malformed and misplaced records: list them, show one, publish it again.\n\n"
    "Example: `kvlane dead-letters list`",
)


@app.command("list")
def list_letters(
    *,
    topic: Annotated[str, typer.Option(help="Only dead letters from this topic.")] = "",
    reason: Annotated[str, typer.Option(help="Only those whose reason contains this text.")] = "",
    limit: Annotated[int, typer.Option(help="Show the newest N.", min=1)] = 50,
    json: screen.JsonOption = None,
) -> None:
    """Show dead letters: origin, time, and reason. Reads only.

    Examples:

    - `kvlane dead-letters list`

    - `kvlane dead-letters list --topic requests --reason "does not belong"`
    """
    found, count = asyncio.run(_list(topic, reason, limit))
    rows = [letter._replace(value=None)._asdict() for letter in found]
    screen.show_result(json, rows, lambda: _show_list(found, count))


def _show_list(found: Sequence[DeadLetter], count: int) -> None:
    table = screen.plain_table(
        "id", "time (UTC)", "from", "key", "type", "bytes", "tries", "reason", right="bytes tries"
    )
    for letter in found:
        origin = f"{letter.origin_topic}/{letter.origin_partition}:{letter.origin_offset}"
        table.add_row(
            letter.name, _time(letter.at_ms),
            *map(screen.escape_text, (origin, _text(letter.key), _text(letter.type))),
            str(letter.value_bytes), str(letter.tries), screen.escape_text(letter.reason),
        )  # fmt: skip
    console = screen.make_console()
    if found:
        console.print(table)
    shown = f", showing the newest {len(found)}" if count > len(found) else ""
    console.print(f"{count} dead letters{shown}", style="dim")


@app.command()
def show(letter: DeadLetterId) -> None:
    """Show one dead letter, and its record as decoded by this version, or its bytes.

    With KVLANE_KEEP_PROMPTS the content is in the dead letter, else it is read from the original
    topic while retained (an hour for requests, a day for prompts). It may contain a prompt's text.

    Example: `kvlane dead-letters show 2:17`
    """
    asyncio.run(_show(letter))


@app.command()
def retry(
    dead_letter_retry: Annotated[
        list[str], typer.Argument(metavar="ID...", help="PARTITION:OFFSET each.")
    ],
) -> None:
    """Publish records again to their original topic, with their own key and headers.

    For records that an older version could not decode, or that were in a wrong lane. A second retry
    is harmless: a request is answered once. A record that is still malformed is refused, and so is
    one whose id was accepted already. Exit code 1 if any was refused.

    Example: `kvlane dead-letters retry 2:17 2:18`
    """
    refused = asyncio.run(_retry(dead_letter_retry))
    if refused:
        raise typer.Exit(1)


async def _list(topic: str, reason: str, limit: int) -> tuple[list[DeadLetter], int]:
    from kvlane.app.audit.dead_letter_retry import list_dead_letters
    from kvlane.app.settings import Settings

    def wanted(letter: DeadLetter) -> bool:
        return letter.origin_topic.startswith(topic) and reason in letter.reason

    async with kafka_client.connect_kafka(Settings(), "kvlane-dead-letters") as log:
        with screen.reading_progress() as bar:
            return await list_dead_letters(log, SystemClock(), limit, wanted, bar)


async def _show(name: str) -> None:
    from kvlane.app.audit import dead_letter_retry
    from kvlane.app.settings import Settings
    from kvlane.streams.errors import RecordError

    async with kafka_client.connect_kafka(Settings(), "kvlane-dead-letters") as log:
        clock = SystemClock()
        letter = await dead_letter_retry.find_dead_letter(log, clock, name)
        _print_letter(letter)
        try:
            content = await dead_letter_retry.record_of_dead_letter(log, clock, letter)
        except dead_letter_retry.InvalidDeadLetter as e:
            typer.echo(f"\n{screen.escape_lines(str(e))}")
            return
        try:
            record = dead_letter_retry.to_json_types(
                dead_letter_retry.decode_dead_letter(letter, content)
            )
        except RecordError as e:
            why = screen.escape_lines(str(e))
            typer.echo(f"\n{content.source}, still malformed: {why}\n{_hex(content)}")
            return
        typer.echo(f"\n{content.source}, decoded:")
        typer.echo(msgspec.json.format(msgspec.json.encode(record), indent=2).decode())


async def _retry(names: Sequence[str]) -> int:
    from kvlane.app.audit import dead_letter_retry
    from kvlane.app.settings import settings_for_writing

    refused = 0
    async with kafka_client.connect_kafka(settings_for_writing(), "kvlane-dead-letters") as log:
        clock = SystemClock()
        for name in dict.fromkeys(names):
            try:
                letter = await dead_letter_retry.find_dead_letter(log, clock, name)
                request_id, stands = await dead_letter_retry.retry_dead_letter(log, clock, letter)
            except dead_letter_retry.InvalidDeadLetter as e:
                refused += 1
                typer.echo(f"refused: {screen.escape_control(str(e))}", err=True)
                continue
            where = f"{letter.origin_topic}/{stands.partition}:{stands.offset}"
            shown_id = screen.escape_control(request_id)
            typer.echo(f"{name}: {shown_id} is published again, {where}")
    return refused


def _print_letter(letter: DeadLetter) -> None:
    rows = {
        "id": letter.name,
        "time": f"{_time(letter.at_ms)} UTC",
        "from": f"{letter.origin_topic}/{letter.origin_partition}:{letter.origin_offset}",
        "key": _text(letter.key),
        "type": _text(letter.type),
        "reason": letter.reason,
        "tries": letter.tries,
        "bytes": letter.value_bytes,
    }
    for name, value in rows.items():
        typer.echo(f"{name:10} {screen.escape_control(str(value))}")


def _hex(content: DeadLetterRecord) -> str:
    lines = []
    value = content.value[:MAX_HEX_BYTES]
    for start in range(0, len(value), 16):
        row = value[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):47}  {text}")
    if (more := len(content.value) - len(value)) > 0:
        lines.append(f"… {more} more bytes")
    return "\n".join(lines)


def _text(raw: bytes | None) -> str:
    """Bytes as one line of text, escaped where necessary."""
    if raw is None:
        return "none"
    return repr(raw.decode(errors="backslashreplace"))[1:-1]


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
