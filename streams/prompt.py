"""The JSON record that a client publishes to `prompts` or `batch`, validated by pydantic.

Separate from `streams/records.py`, which routing and indexing import without pydantic.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticSerializationError

from kvlane.streams.codecs import TYPE_HEADER
from kvlane.streams.errors import RecordError
from kvlane.streams.ids import TENANT_PATTERN
from kvlane.streams.ports import Entry, Headers, Record
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import MAX_ID_CHARS
from kvlane.streams.topics import BATCH, TOPICS_BY_NAME

MAX_METADATA_BYTES = 16 * 1024
"""Largest metadata of a prompt, as JSON: they travel with the request and with its result."""
MAX_CUSTOM_ID_CHARS = 512
APPENDED_HEADER = "kvlane-appended-ms"
"""Header of a prompt that is appended again long after its first append: the time of that or a time
before, in ms of broker time, in decimals. It is the time by which a copy is recognised."""
_TIME_DIGITS = 18
MAX_DEADLINE_S = (TOPICS_BY_NAME[BATCH].retention_ms or 0) / 1000
"""Longest time limit: a prompt is kept no longer. Each class has its own bound, by setting."""


def without_nulls(fields: Any) -> Any:
    """The fields of an object that are given. Null is "not given", as in the bodies of OpenAI: many
    serializers write it."""
    if not isinstance(fields, dict):
        return fields
    return {name: value for name, value in fields.items() if value is not None}


class Prompt(BaseModel):
    """A request as a client publishes it; the record key is the same `id`.

    Raises pydantic's ValidationError for values out of range.

    Example:
        Prompt(id="job-17", kind="completion", body={"prompt": "Once", "max_tokens": 20})
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(
        min_length=1, max_length=MAX_ID_CHARS, description="request id and idempotency key"
    )
    kind: Literal["chat", "completion", "tokens", "cancel", "embedding"] = Field(
        default="chat", description="how to read `body`"
    )
    body: dict[str, Any] = Field(
        default_factory=dict,
        description="the OpenAI request of that kind, or {token_ids, model, …}; nothing for cancel",
    )
    tenant: str = Field(
        default="",
        description="name of its tenant, for queues and figures: letters, digits and . _ : @ -, at "
        "most 100; it separates no caches",
    )
    key_id: str = Field(
        default="",
        description="id of the API key that its usage names, of the same form as `tenant`; a batch "
        "job gives the key that created it",
    )
    deadline_s: float = Field(
        default=600.0, gt=0, le=MAX_DEADLINE_S, description="seconds it may take, from its append"
    )
    service_class: ServiceClass = Field(
        default="interactive",
        description="batch: it uses the capacity that interactive requests leave, and gives way to "
        "them. A prompt in topic `batch` is of that class in any case",
    )
    result: bool = Field(
        default=False, description="whether the whole answer becomes a record on `results`"
    )
    metadata: dict[str, Any] = Field(
        default_factory=dict, description="any JSON object of at most 16 KiB, copied to the result"
    )
    batch_id: str = Field(
        default="",
        max_length=MAX_ID_CHARS,
        description="the batch job it belongs to; implies a result",
    )
    custom_id: str = Field(
        default="",
        max_length=MAX_CUSTOM_ID_CHARS,
        description="the client's name for it, copied to the result",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return without_nulls(fields)

    @field_validator("tenant", "key_id")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name and re.fullmatch(TENANT_PATTERN, name) is None:
            raise ValueError("may have letters, digits and . _ : @ -, at most 100 of them")
        return name

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, metadata: dict[str, Any]) -> dict[str, Any]:
        if metadata and (size := len(msgspec.json.encode(metadata))) > MAX_METADATA_BYTES:
            raise ValueError(f"has {size} bytes as JSON, above {MAX_METADATA_BYTES}")
        return metadata


def appended_ms(record: Record) -> int:
    """The append time of a prompt in the topic where it was published first."""
    for name, value in record.headers:
        if name == APPENDED_HEADER and value is not None and value.isdigit():
            return min(record.timestamp, int(value[:_TIME_DIGITS]))
    return record.timestamp


def with_append_time(headers: Headers, at_ms: int) -> Headers:
    """The headers of a prompt that is appended again, and was appended first at this time."""
    kept = (header for header in headers if header[0] != APPENDED_HEADER)
    return (*kept, (APPENDED_HEADER, str(at_ms).encode()))


def encode_prompt(prompt: Prompt) -> Entry:
    """The log entry of a prompt. Other publishers may omit the header. Raises RecordError."""
    try:
        value = prompt.model_dump_json(exclude_defaults=True)
    except PydanticSerializationError as e:
        raise RecordError(f"the prompt is no JSON, or nested too deep: {e}") from None
    return Entry(prompt.id.encode(), value.encode(), ((TYPE_HEADER, b"Prompt"),))
