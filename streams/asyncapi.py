"""The AsyncAPI document of the client topics: `faststream docs gen kvlane.app.preprocessor:app`.

The preprocessor's broker describes `prompts` and `batch`; `responses` and `results` are declared
here, since no publisher of FastStream writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from faststream import FastStream
from faststream.kafka import KafkaBroker
from faststream.specification import AsyncAPI
from pydantic import Field, WithJsonSchema

from kvlane.streams.ports import Log
from kvlane.streams.prompt import Prompt
from kvlane.streams.reading.log_broker import LogBroker
from kvlane.streams.records import Chunk, End, Fence, Result
from kvlane.streams.topics import RESPONSES, RESULTS


def specification() -> AsyncAPI:
    return AsyncAPI(
        title="kvlane",
        description="Prompts in, streams of answers out, and one result record of each request "
        "that asks for it. All topics are keyed by the request id. The rule by which a stream is "
        "read stands in streams/responses/transcript.py, with test vectors in streams/vectors.",
    )


PromptPayload = Annotated[Any, Field(title="Prompt"), WithJsonSchema(Prompt.model_json_schema())]
"""Records of a topic of prompts; the schema describes one of them."""


def answers_broker(log: Log, prefix: str, servers: Sequence[str]) -> LogBroker:
    """The broker of a process that has no subscriber."""
    broker = LogBroker(log, prefix, servers)
    describe_answers(broker, prefix)
    return broker


def describe_answers(broker: KafkaBroker, prefix: str) -> None:
    """Declare the topics of answers. Other code writes them: see the module."""
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


def document(broker: KafkaBroker) -> str:
    """The whole document of a broker, in YAML; the same text for the same topics."""
    app = FastStream(broker, specification=specification())
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
