"""What the command line does as a client: prompts from people and files, streams to a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from pydantic import ValidationError

from app.settings import Settings, SettingsError
from streams.client import Client
from streams.clock import SystemClock
from streams.kafka.log import KafkaLog
from streams.prompt import Prompt
from streams.records import End

AT_ONCE = 200
"""Prompts that are on their way together; more wait, so that a large file needs no large memory."""


class BadPrompt(Exception):
    """Prompts that cannot be published as they are; the message says which and why."""


@asynccontextmanager
async def kafka(settings: Settings, name: str) -> AsyncIterator[KafkaLog]:
    """A connection for one command. Raises BrokerUnavailable, and SettingsError without servers."""
    if not settings.bootstrap_servers:
        raise SettingsError(
            "KVLANE_BOOTSTRAP_SERVERS is not set: name a Kafka as host:port, or start one with "
            "`kvlane up`"
        )
    log = KafkaLog(settings.connection(name), prefix=settings.topic_prefix)
    try:
        await log.start()
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def client(settings: Settings) -> AsyncIterator[Client]:
    """A client of the deployment. Raises BrokerUnavailable, TopicsDiffer."""
    async with kafka(settings, "kvlane-cli") as log, Client(log, SystemClock()) as opened:
        yield opened


def chat(text: str, system: str, options: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat of one turn."""
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages} | options


def prompts_of(lines: Iterable[str], new_id: Callable[[], str]) -> list[Prompt]:
    """The prompts of a JSONL file, one object a line; ids are made up where there are none.

    Raises BadPrompt with the line's number.
    """
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            prompts.append(Prompt.model_validate({"id": new_id()} | fields))
        except msgspec.DecodeError as e:
            raise BadPrompt(f"line {number} is no JSON object: {e}") from e
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise BadPrompt(f"line {number}, {where}: {first['msg']}") from e
    return prompts


async def publish(
    asking: Client, prompts: Iterable[Prompt], *, listen: bool, published: Callable[[str], None]
) -> None:
    """Publish prompts, at most AT_ONCE together; `published` gets each id when it is in the log."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> None:
        try:
            published(await asking.publish(prompt, listen=listen))
        finally:
            places.release()

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            await places.acquire()
            tasks.create_task(one(prompt))


async def stream(
    asking: Client,
    request_id: str,
    write: Callable[[str], None],
    *,
    from_token: int = 0,
    timeout_s: float,
) -> str:
    """Write the text of a request as it comes; "" when it is whole, else what ended it.

    Of a dry run the worker and the rank are written.

    Raises TimeoutError, and what `Client.stream` raises.
    """
    async for piece in asking.stream(request_id, from_token=from_token, timeout_s=timeout_s):
        if isinstance(piece, End):
            whole = piece.code in ("stop", "length")
            if piece.placed is not None:  # it only asked where it would go
                write(f"{piece.placed.worker_id} {piece.placed.dp_rank}")
            return "" if whole else f"{piece.code}: {piece.message}".removesuffix(": ")
        write(piece.text)
        if piece.finish_reason in ("cancelled", "error"):
            return str(piece.finish_reason)
    return ""
