"""The two kinds of records, by their format on the wire, and types that several records share.

`streams/request.py` and `streams/records.py` define the records themselves.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ModelKind = Literal["tokens", "chat", "completion", "embedding"]
"""Input of a model: tokens, which serve chats and completions, or OpenAI's bodies of one kind."""
ServiceClass = Literal["interactive", "batch"]
"""Class of work of a request: batch requests wait until interactive ones leave capacity."""
Json = bytes
"""A JSON value of any form, in UTF-8: passed on unchanged, read by its receiver only."""


class InternalRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A record that only kvlane's own processes read: a msgpack map."""


class PublicRecord(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False, tag_field="t", tag=True
):
    """A record that clients read: a JSON object with its type in field `t`.

    Codes and reasons in them are plain strings: clients are not upgraded before the writers, and
    one without a new code must still see the end that it comes with.
    """
