"""The two kinds of records, by their format on the wire, and types that several records share.

`streams/request.py` and `streams/record_types/` define the records themselves.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ModelKind = Literal["tokens", "chat", "completion", "embedding"]
"""Input of a model: tokens, which serve chats and completions, or OpenAI's bodies of one kind."""
ServiceClass = Literal["interactive", "batch"]
"""Class of work of a request: batch requests wait until interactive ones leave capacity."""
Phase = Literal["aggregated", "prefill", "decode"]
EndCode = Literal[
    "refused",
    "deadline",
    "cancelled",
    "no_workers",
    "attempts",
    "lost",
    "invalid",
    "too_large",
    "queue_full",
    "internal",
    "stop",
    "length",
    "model_not_found",
    "none_eligible",
    "all_busy",
    "pinned_gone",
    "pinned_busy",
    "pin_not_allowed",
]
"""Why a router ended a request; stop and length: the answer was complete, its last Chunk lost."""
JsonText = bytes
"""A JSON value of any form, in UTF-8: passed on unchanged, read by its receiver only."""

MAX_ID_CHARS = 200
"""Longest request id in characters: it is a record key, and part of every log line."""


class RunKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The identity of an assignment: a worker starts each run key at most once."""

    id: str
    attempt: int
    phase: Phase


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the usage of a request counts for. `key_id`: of its API key, "" without one;
    `alias`: of the model, if the client named that."""

    tenant: str = ""
    key_id: str = ""
    model: str = ""
    adapter: str = ""
    service_class: ServiceClass = "interactive"
    alias: str = ""


class InternalRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A record that only kvlane's own processes read: a msgpack map."""


class PublicRecord(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False, tag_field="t", tag=True
):
    """A record that clients read: a JSON object with its type in field `t`. Codes and reasons are
    plain strings: clients that lack a new one must still see its record."""


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """A decoded record with its position in the log, the input of views."""

    offset: int
    timestamp_ms: int
    record: InternalRecord | PublicRecord
