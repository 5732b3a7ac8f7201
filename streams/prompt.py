"""What a client publishes to `prompts`: JSON, checked by pydantic.

It lives beside `streams/records.py`, not in it, because routing and indexing import the records
and must stay free of pydantic.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streams.codecs import TYPE
from streams.ports import Entry
from streams.records import LONGEST_ID


class Prompt(BaseModel):
    """One request as a client words it; the record key is the same `id`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(
        min_length=1, max_length=LONGEST_ID, description="request id and idempotency key"
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
    """The log entry of a prompt. Other publishers may leave the header out."""
    value = prompt.model_dump_json(exclude_defaults=True)
    return Entry(prompt.id.encode(), value.encode(), ((TYPE, b"Prompt"),))
