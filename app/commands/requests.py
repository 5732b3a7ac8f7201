"""`kvlane publish`, `follow` and `cancel`: what any Kafka client can do, from a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.settings import Settings

Timeout = Annotated[float, typer.Option(help="Give up waiting after so many seconds.", min=0.1)]


def publish(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; without it, standard input is the prompt.")
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", exists=True, dir_okay=False, allow_dash=True,
            help="JSONL instead: one prompt a line, as in "
            '{"id":"job-1","kind":"chat","body":{"messages":[...]}}; - is standard input.',
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show answers as they come.")] = False,
    system: Annotated[str, typer.Option(help="What the system says first.")] = "",
    model: Annotated[str, typer.Option(help="Ask this model; empty: any.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    request_id: Annotated[
        str | None,
        typer.Option("--id", help="Request id and idempotency key; without it, one is drawn."),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds the request may take.", min=0.001, max=600)
    ] = None,
    timeout: Timeout = 660.0,
) -> None:  # fmt: skip
    """Publish prompts and print their request ids.

    The ids go to standard output, one a line, when the log has the prompts. Publishing the same id
    again is harmless. With --follow the text goes to standard output instead.
    """
    from app.publishing import BadPrompt, chat

    if file is not None and (text is not None or request_id is not None):
        raise BadPrompt("--file brings its own prompts and ids: give no text and no --id with it")
    if file is not None:
        source = sys.stdin if str(file) == "-" else file.open(encoding="utf-8")
        with source:
            lines = source.readlines()
        asyncio.run(_publish_lines(lines, follow=follow, timeout_s=timeout))
        return
    prompt = sys.stdin.read() if text is None else text
    if not prompt.strip():
        raise BadPrompt("the prompt is empty: give it as an argument or on standard input")
    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens}
    body = chat(prompt, system, {k: v for k, v in options.items() if v})
    fields = {"id": request_id, "body": body, "deadline_s": deadline}
    asyncio.run(_publish_one({k: v for k, v in fields.items() if v}, follow, timeout))


def follow(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    *,
    from_token: Annotated[
        int, typer.Option("--from", help="Leave out the tokens before this position.", min=0)
    ] = 0,
    timeout: Timeout = 660.0,
) -> None:
    """Show a request's answer as it comes, from its beginning, however long ago that was.

    Works for finished requests too, as long as the log keeps their stream (an hour by default).
    Exit code 1 when a router ended the request; the reason goes to standard error.
    """
    asyncio.run(_follow([request_id], from_token, timeout))


def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
) -> None:
    """Ask for the end of a request. Its stream ends with `cancelled`, or as it was about to."""
    asyncio.run(_cancel(request_id))


async def _publish_one(fields: dict[str, Any], follow: bool, timeout_s: float) -> None:  # noqa: FBT001
    from app.publishing import client
    from streams.prompt import Prompt

    async with client(Settings()) as asking:
        known = "id" in fields  # it may have been published before: read from its beginning
        prompt = Prompt(**({"id": asking.new_request_id()} | fields))
        await asking.publish(prompt, listen=follow and not known)
        typer.echo(prompt.id, err=follow)
        if follow:
            await _show(asking, [prompt.id], 0, timeout_s)


async def _publish_lines(lines: Sequence[str], *, follow: bool, timeout_s: float) -> None:
    from app.publishing import client, prompts_of, publish

    async with client(Settings()) as asking:
        prompts = prompts_of(lines, asking.new_request_id)
        shown = (lambda _: None) if follow else typer.echo
        await publish(asking, prompts, listen=False, published=shown)
        if follow:
            await _show(asking, [p.id for p in prompts], 0, timeout_s)


async def _follow(ids: Sequence[str], from_token: int, timeout_s: float) -> None:
    from app.publishing import client

    async with client(Settings()) as asking:
        await _show(asking, ids, from_token, timeout_s)


async def _show(asking: Any, ids: Sequence[str], from_token: int, timeout_s: float) -> None:
    """One text as it comes; several one after the other, each after its id."""
    from app.publishing import stream

    failed = 0
    for request_id in ids:
        if len(ids) > 1:
            typer.echo(f"{request_id}\t", nl=False)
        why = await stream(asking, request_id, _write, from_token=from_token, timeout_s=timeout_s)
        typer.echo()
        if why:
            failed += 1
            typer.echo(f"{request_id} ended: {why}", err=True)
    if failed:
        raise typer.Exit(1)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _cancel(request_id: str) -> None:
    from app.publishing import client

    async with client(Settings()) as asking:
        await asking.cancel(request_id)
    typer.echo(f"the cancel of {request_id} is published")
