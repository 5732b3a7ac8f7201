"""The AsyncAPI document of the client topics: `prompts`, `responses` and `results`.

    faststream docs gen app:app      (or any other process: the result is the same)

The FastStream broker is only a description and never connects: read positions are part of the state
of a process, so it uses a `Log`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from faststream import FastStream
from faststream.kafka import KafkaBroker
from faststream.specification import AsyncAPI
from pydantic import WithJsonSchema

from streams.prompt import Prompt
from streams.records import Chunk, End, Fence, Result
from streams.topics import BATCH, PROMPTS, RESPONSES, RESULTS


def specification() -> AsyncAPI:
    """Title and description of the document, one per application."""
    return AsyncAPI(
        title="kvlane",
        description="Prompts in, streams of answers out, and one result record of each request "
        "that asks for it. All topics are keyed by the request id. The rule by which a stream is "
        "read stands in streams/responses/transcript.py, with test vectors in streams/vectors.",
    )


class Description(KafkaBroker):
    """A broker for documentation that is never started."""

    async def start(self) -> None:
        """Nothing: see the module."""

    async def stop(self, *_: object) -> None:
        """Nothing was started."""


def public_topics(servers: Sequence[str], prefix: str) -> Description:
    """The topics that clients write and read."""
    broker = Description(servers)

    @broker.subscriber(prefix + PROMPTS, title=PROMPTS, description="What clients ask.")
    async def prompts(prompt: Prompt) -> None:
        """Never called."""

    @broker.subscriber(prefix + BATCH, title=BATCH, description="Prompts that give way to others.")
    async def batch(prompt: Prompt) -> None:
        """Never called."""

    broker.publisher(
        prefix + RESPONSES,
        title=RESPONSES,
        description="Records that clients read.",
        schema=Annotated[Any, WithJsonSchema(_schema(Chunk | Fence | End))],
    )
    broker.publisher(
        prefix + RESULTS,
        title=RESULTS,
        description="One record per finished request. Read it with isolation.level=read_committed.",
        schema=Annotated[Any, WithJsonSchema(_schema(Result))],
    )
    return broker


def document(servers: Sequence[str], prefix: str) -> str:
    """The whole document, in YAML; the same text for the same arguments."""
    app = FastStream(public_topics(servers, prefix), specification=specification())
    described: Any = app.schema.to_specification()
    for message in described.components.messages.values():
        message.correlationId = None  # FastStream's default: no record of kvlane has this header
    # FastStream keeps subscribers in a set: their order differs from run to run.
    described.channels = dict(sorted(described.channels.items()))
    described.operations = dict(sorted(described.operations.items()))
    described.components.messages = dict(sorted(described.components.messages.items()))
    described.components.schemas = dict(sorted(described.components.schemas.items()))
    text: str = described.to_yaml()
    return text


def _schema(types: Any) -> dict[str, Any]:
    """The JSON schema of records, without references: FastStream moves it to another place."""
    schema = msgspec.json.schema(types)
    definitions = schema.pop("$defs")
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]

    def whole(value: Any) -> Any:
        if isinstance(value, dict) and "$ref" in value:
            return whole(definitions[value["$ref"].rpartition("/")[2]])
        if isinstance(value, dict):
            return {k: whole(v) for k, v in value.items() if k != "discriminator"}
        return [whole(v) for v in value] if isinstance(value, list) else value

    flat: dict[str, Any] = whole(schema)
    return flat
