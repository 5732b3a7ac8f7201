"""The commands `kvlane publish`, `follow` and `cancel`: a Kafka client on a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvlane.app.commands import kafka_client
from kvlane.app.commands.console import escape_control, escape_lines
from kvlane.app.operator_error import OperatorError
from kvlane.streams.clock import SystemClock
from kvlane.streams.errors import NotFound, PositionLost
from kvlane.streams.record_base import ServiceClass

if TYPE_CHECKING:
    from kvlane.streams.client import Client
    from kvlane.streams.prompt import Prompt

CHECK_AFTER_S = 3.0
"""Time without any text after which `follow` checks whether the id was ever published."""
CHECK_TIMEOUT_S = 10.0

MAX_PENDING_PROMPTS = 200
"""Most pending prompts; more wait, so that a large file needs little memory."""


class InvalidPromptFile(OperatorError):
    """A prompt that cannot be published; the message has its place and the reason."""


TimeoutOption = Annotated[float, typer.Option(help="Seconds to wait at most.", min=0.1)]


def publish(
    text: Annotated[str | None, typer.Argument(help="The prompt; default: standard input.")] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            exists=True,
            dir_okay=False,
            allow_dash=True,
            help="JSONL instead: one prompt a line, as in "
            '{"id":"job-1","kind":"chat","body":{"messages":[...]}}; - is standard input.',
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show answers as they arrive.")] = False,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    model: Annotated[str, typer.Option(help="Model to use; empty: any.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.", min=1, max=2**31 - 1)
    ] = None,
    request_id: Annotated[
        str | None, typer.Option("--id", help="Request id and idempotency key; default: a new one.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds the request may take.", min=0.001, max=600)
    ] = None,
    timeout: TimeoutOption = 660.0,
) -> None:
    """Publish prompts and print their request ids.

    The ids go to standard output, one a line, when Kafka has acknowledged the prompts. Publishing
    an id again is harmless. With --follow the text goes to standard output instead.

    Examples:

    - `kvlane publish --follow "What is a log?"`

    - `kvlane publish -f prompts.jsonl`
    """
    if file is not None and (text is not None or request_id is not None):
        raise InvalidPromptFile(
            "--file has its own prompts and ids: give no text and no --id with it"
        )
    if file is not None:
        source = sys.stdin if str(file) == "-" else file.open(encoding="utf-8")
        with source:
            lines = source.readlines()
        asyncio.run(_publish_lines(lines, follow=follow, timeout_s=timeout))
        return
    prompt = sys.stdin.read() if text is None else text
    if not prompt.strip():
        raise InvalidPromptFile("the prompt is empty: give it as an argument or on standard input")
    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    body = {"messages": messages} | {k: v for k, v in options.items() if v}
    fields = {"id": request_id, "body": body, "deadline_s": deadline}
    asyncio.run(_publish_one({k: v for k, v in fields.items() if v}, follow, timeout))


def follow(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    *,
    from_token: Annotated[
        int, typer.Option("--from", help="Leave out the tokens before this position.", min=0)
    ] = 0,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds to wait at most. If given, also waits for an id that is not published "
            "yet.",
            min=0.1,
            show_default="660",
        ),
    ] = None,
) -> None:
    """Show a request's answer as it arrives, from its beginning.

    Works for ended requests too, as long as their stream is retained (an hour by default).
    Exit code 1 if a router ended the request, or the log has nothing about it; the reason goes to
    standard error.

    Example: `kvlane follow job-1`
    """
    if not asyncio.run(_follow(request_id, from_token, timeout)):
        raise typer.Exit(1)


def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    *,
    batch: Annotated[
        bool, typer.Option("--batch", help="The prompt is of class batch: it may wait in `batch`.")
    ] = False,
) -> None:
    """Cancel a request. Its stream ends with `cancelled`, unless it ends by itself first.

    Example: `kvlane cancel job-1`
    """
    asyncio.run(_cancel(request_id, "batch" if batch else "interactive"))


async def _publish_one(fields: dict[str, Any], follow: bool, timeout_s: float) -> None:  # noqa: FBT001
    from kvlane.app.settings import settings_for_writing
    from kvlane.streams.prompt import Prompt

    async with kafka_client.connect_client(settings_for_writing()) as client:
        known = "id" in fields  # it may have been published before: read from its beginning
        prompt = Prompt(**({"id": client.new_request_id()} | fields))
        await client.publish(prompt, subscribe=follow and not known)
        typer.echo(escape_control(prompt.id), err=follow)
        if follow:
            await _show(client, [prompt.id], 0, timeout_s)


async def _publish_lines(lines: Sequence[str], *, follow: bool, timeout_s: float) -> None:
    from kvlane.app.settings import settings_for_writing

    async with kafka_client.connect_client(settings_for_writing()) as client:
        prompts = parse_prompts(lines, client.new_request_id)
        shown = (lambda _: None) if follow else (lambda name: typer.echo(escape_control(name)))
        await publish_prompts(client, prompts, shown)
        if follow:
            await _show(client, [p.id for p in prompts], 0, timeout_s)


async def _follow(request_id: str, from_token: int, timeout_s: float | None) -> bool:
    """Show an answer; False when the log has nothing about the request."""

    from kvlane.app.audit.unknown_ids import explain_unknown, is_published
    from kvlane.app.settings import Settings
    from kvlane.streams.client import STREAM_TIMEOUT_S, Client

    clock, seen, name = SystemClock(), asyncio.Event(), escape_control(request_id)

    def write(text: str) -> None:
        seen.set()
        _write(text)

    async with (
        kafka_client.connect_kafka(Settings(), "kvlane-cli") as log,
        Client(log, clock) as client,
    ):
        within_s = timeout_s or STREAM_TIMEOUT_S
        showing = asyncio.create_task(_show(client, [request_id], from_token, within_s, write))
        await asyncio.wait({showing}, timeout=CHECK_AFTER_S)
        is_silent = not showing.done() and not seen.is_set()
        if is_silent and await is_published(log, clock, request_id, CHECK_TIMEOUT_S) is False:
            why = explain_unknown(request_id, clock.wall_ms())
            if timeout_s is None and not seen.is_set():
                showing.cancel()
                await asyncio.wait({showing})
                typer.echo(f"error: {name}: {why}", err=True)
                return False
            typer.echo(f"{name}: {why} Waiting for it all the same (--timeout).", err=True)
        try:
            await showing
        except NotFound:
            typer.echo(f"error: {name}: {explain_unknown(request_id, clock.wall_ms())}", err=True)
            return False
        except PositionLost as e:
            gone = f"the beginning of its stream is no longer retained ({e})"
            typer.echo(f"error: {name}: {gone}", err=True)
            return False
    return True


async def _show(
    client: Client,
    ids: Sequence[str],
    from_token: int,
    timeout_s: float,
    write: Callable[[str], None] | None = None,
) -> None:
    """Write one text as it arrives; several one after the other, each after its id."""
    failed = 0
    for request_id in ids:
        if len(ids) > 1:
            typer.echo(f"{escape_control(request_id)}\t", nl=False)
        why = await write_stream(
            client, request_id, write or _write, from_token=from_token, timeout_s=timeout_s
        )
        typer.echo()
        if why:
            failed += 1
            typer.echo(f"{escape_control(request_id)} ended: {escape_control(why)}", err=True)
    if failed:
        raise typer.Exit(1)


def _write(text: str) -> None:
    sys.stdout.write(escape_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


async def _cancel(request_id: str, service_class: ServiceClass) -> None:
    from kvlane.app.settings import settings_for_writing

    async with kafka_client.connect_client(settings_for_writing()) as client:
        await client.cancel(request_id, service_class=service_class)
    typer.echo(f"published the cancel of {escape_control(request_id)}")


def parse_prompts(lines: Iterable[str], new_id: Callable[[], str]) -> list[Prompt]:
    """The prompts of a JSONL file, one object a line; new ids where none are given. Raises
    InvalidPromptFile with the line's number."""
    from pydantic import ValidationError

    from kvlane.streams.prompt import Prompt

    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line.removeprefix("\ufeff"), type=dict[str, Any])
            prompts.append(Prompt.model_validate({"id": new_id()} | fields))
        except msgspec.DecodeError as e:
            raise InvalidPromptFile(f"line {number} is not a JSON object: {e}") from e
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidPromptFile(f"line {number}, {where}: {first['msg']}") from e
    return prompts


async def publish_prompts(
    client: Client, prompts: Iterable[Prompt], on_published: Callable[[str], None]
) -> None:
    """Publish prompts, at most MAX_PENDING_PROMPTS at a time; `on_published` gets each id that is
    acknowledged."""
    places = asyncio.Semaphore(MAX_PENDING_PROMPTS)

    async def one(prompt: Prompt) -> None:
        try:
            on_published(await client.publish(prompt, subscribe=False))
        finally:
            places.release()

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            await places.acquire()
            tasks.create_task(one(prompt))


async def write_stream(
    client: Client,
    request_id: str,
    write: Callable[[str], None],
    *,
    from_token: int = 0,
    timeout_s: float,
) -> str:
    """Write the text of a request (of a dry run its worker and rank) as it arrives. Returns "" when
    it is complete, else the reason. Raises TimeoutError, and the errors of `Client.stream`."""
    from kvlane.streams.records import End

    async for piece in client.stream(request_id, from_token=from_token, timeout_s=timeout_s):
        if isinstance(piece, End):
            whole = piece.code in ("stop", "length")
            if piece.placed is not None:  # a dry run
                write(f"{piece.placed.worker_id} {piece.placed.dp_rank}")
            return "" if whole else f"{piece.code}: {piece.message}".removesuffix(": ")
        write(piece.text)
        if piece.finish_reason in ("cancelled", "error"):
            return f"{piece.finish_reason}: {piece.invalid}".removesuffix(": ")
    return ""
