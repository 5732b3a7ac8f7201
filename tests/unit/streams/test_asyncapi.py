"""Tests of the AsyncAPI document of the topics of clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faststream import FastStream
from jsonschema import Draft202012Validator

from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.streams.asyncapi import document as written
from kvlane.streams.asyncapi import specification
from kvlane.streams.kafka.connection_options import ConnectionOptions
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt
from kvlane.streams.reading.log_broker import LogBroker
from kvlane.streams.records import Chunk, End, Fence, Result

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:faststream")


def public_broker(**options: str) -> LogBroker:
    """The broker of a preprocessor that was not started."""
    log = KafkaLog(ConnectionOptions("127.0.0.1:1", "test"))
    return Preprocessor(log, Settings(**options), ProcessContext("test")).broker  # type: ignore[arg-type]


@pytest.fixture
def document() -> dict[str, Any]:
    broker = public_broker(bootstrap_servers="kafka:9092", topic_prefix="mine.")
    app = FastStream(broker, specification=specification())
    got: dict[str, Any] = json.loads(app.schema.to_specification().to_json())
    return got


def test_public_topics_have_the_names_of_the_broker(document: dict[str, Any]) -> None:
    addresses = {name: channel["address"] for name, channel in document["channels"].items()}
    assert addresses == {
        name: f"mine.{name}" for name in ("prompts", "batch", "responses", "results")
    }


def test_prompt_schema_has_every_field(document: dict[str, Any]) -> None:
    got = document["components"]["schemas"]["Prompt"]
    assert set(got["properties"]) == set(Prompt.model_fields)


@pytest.mark.parametrize("record", [Chunk, Fence, End])
def test_answer_schema_has_every_field(
    document: dict[str, Any], record: type[Chunk | Fence | End]
) -> None:
    kinds = document["components"]["schemas"]["responses:Message:Payload"]["anyOf"]
    got = next(kind for kind in kinds if kind["title"] == record.__name__)
    fields = {f.encode_name for f in msgspec.structs.fields(record)}
    assert set(got["properties"]) == fields | {"t"}
    assert got["properties"]["t"] == {"enum": [record.__name__]}
    assert "$ref" not in json.dumps(got)


def test_result_is_described_field_by_field(document: dict[str, Any]) -> None:
    got = document["components"]["schemas"]["results:Message:Payload"]
    assert set(got["properties"]) == set(Result.__struct_fields__) | {"t"}
    assert "$ref" not in json.dumps(got)


async def test_description_opens_no_connection() -> None:
    broker = public_broker()
    await broker.start()
    await broker.stop()


def test_committed_document_matches_the_code() -> None:
    file = Path(__file__).parents[3] / "deploy/asyncapi.yaml"
    assert file.read_text("utf-8") == written(public_broker()), "make asyncapi"


@pytest.mark.parametrize(
    "wrong",
    [
        {"t": "Chunk", "id": "a", "attempt": "0", "run": "1", "seq": 0, "index": 0},
        {"t": "Chunk", "id": "a", "attempt": 0, "run": 1, "seq": 0, "index": 0},
        {"t": "End", "id": "a"},
        {"t": "Poem", "id": "a", "attempt": 0},
    ],
)
def test_internal_records_are_not_in_the_document(
    document: dict[str, Any], wrong: dict[str, Any]
) -> None:
    schema = Draft202012Validator(document["components"]["schemas"]["responses:Message:Payload"])
    assert not schema.is_valid(wrong)
