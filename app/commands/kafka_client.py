"""The Kafka client of the command line: publishes prompts, writes streams to a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from pydantic import ValidationError

from kvlane.app.operator_error import OperatorError
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import End

MAX_PENDING_PROMPTS = 200
"""Most pending prompts; more wait, so that a large file needs little memory."""


class InvalidPromptFile(OperatorError):
    """A prompt that cannot be published; the message has its place and the reason."""


@asynccontextmanager
async def connect_kafka(settings: Settings, name: str) -> AsyncIterator[KafkaLog]:
    """A connection for one command. Raises BrokerUnavailable, and SettingsError without servers."""
    settings.require_bootstrap_servers()
    log = open_log(settings, name)
    try:
        await log.start()
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def connect_client(settings: Settings) -> AsyncIterator[Client]:
    """A client of the deployment. Raises BrokerUnavailable, TopicMismatch."""
    async with connect_kafka(settings, "kvlane-cli") as log, Client(log, SystemClock()) as opened:
        yield opened


def chat_body(text: str, system: str, options: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages} | options


def parse_prompts(lines: Iterable[str], new_id: Callable[[], str]) -> list[Prompt]:
    """The prompts of a JSONL file, one object a line; new ids where none are given. Raises
    InvalidPromptFile with the line's number."""
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
    client: Client,
    prompts: Iterable[Prompt],
    *,
    wants_stream: bool,
    on_published: Callable[[str], None],
) -> None:
    """Publish prompts, at most MAX_PENDING_PROMPTS at a time; `on_published` gets each id that is
    acknowledged."""
    places = asyncio.Semaphore(MAX_PENDING_PROMPTS)

    async def one(prompt: Prompt) -> None:
        try:
            on_published(await client.publish(prompt, subscribe=wants_stream))
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
