"""The JSON record that a client publishes to `prompts`, validated by pydantic.

Separate from `streams/records.py`, because routing and indexing import the records and must not
depend on pydantic.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streams.codecs import TYPE_HEADER
from streams.ports import Entry
from streams.records import MAX_ID_CHARS


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
    tenant: str = Field(default="", max_length=200)
    deadline_s: float = Field(default=600.0, gt=0, le=600.0, description="seconds it may take")


def encode_prompt(prompt: Prompt) -> Entry:
    """The log entry of a prompt. Other publishers may omit the header."""
    value = prompt.model_dump_json(exclude_defaults=True)
    return Entry(prompt.id.encode(), value.encode(), ((TYPE_HEADER, b"Prompt"),))
