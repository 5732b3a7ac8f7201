"""What clients need to know of a deployment's topics, as AsyncAPI: `prompts` and `responses`.

    faststream docs gen app:app      (or any other process: they all say the same)

The FastStream broker here is a description. It never connects: how far a process has read is part
of its state, so it reads and writes through a `Log` of its own.
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
from streams.records import Chunk, End, Fence
from streams.topics import PROMPTS, RESPONSES


def specification() -> AsyncAPI:
    """What the document says of the deployment as a whole; of one application each."""
    return AsyncAPI(
        title="kvlane",
        description="Prompts in, streams of answers out. Both topics are keyed by the request id. "
        "The rule by which a stream is read stands in streams/transcript.py, with test vectors in "
        "streams/vectors.",
    )


class Description(KafkaBroker):
    """A broker that is described and never started."""

    async def start(self) -> None:
        """Nothing: see the module."""

    async def stop(self, *_: object) -> None:
        """Nothing was started."""


def public_topics(servers: Sequence[str], prefix: str) -> Description:
    """The topics that clients write and read, in a deployment with this prefix."""
    broker = Description(servers)

    @broker.subscriber(prefix + PROMPTS, title=PROMPTS, description="What clients ask.")
    async def prompts(prompt: Prompt) -> None:
        """Never called."""

    broker.publisher(
        prefix + RESPONSES,
        title=RESPONSES,
        description="What clients are told.",
        schema=Annotated[Any, WithJsonSchema(_schema(Chunk | Fence | End))],
    )
    return broker


def document(servers: Sequence[str], prefix: str) -> str:
    """The whole document, in YAML; the same text for the same arguments."""
    app = FastStream(public_topics(servers, prefix), specification=specification())
    text: str = app.schema.to_specification().to_yaml()
    return text


def _schema(types: Any) -> dict[str, Any]:
    """The JSON schema of records, without references: FastStream moves it to another place."""
    schema = msgspec.json.schema(types)
    definitions = schema.pop("$defs")

    def whole(value: Any) -> Any:
        if isinstance(value, dict) and "$ref" in value:
            return whole(definitions[value["$ref"].rpartition("/")[2]])
        if isinstance(value, dict):
            return {k: whole(v) for k, v in value.items() if k != "discriminator"}
        return [whole(v) for v in value] if isinstance(value, list) else value

    flat: dict[str, Any] = whole(schema)
    return flat
