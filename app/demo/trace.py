"""Requests of a production trace, in tokens: made up from the ids of their chunks.

The same ones every time, so that prompts share exactly the prefixes that they shared in production.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from app.trace import CHUNK_TOKENS, SHIPPED, read_trace


class TraceRequest(NamedTuple):
    """One request. `arrival_s` counts from the start of the trace."""

    arrival_s: float
    token_ids: list[int]
    output_tokens: int


def shipped_slice(vocabulary: Sequence[int]) -> list[TraceRequest]:
    """The 300 requests that come with kvlane, in tokens of this vocabulary."""
    return [
        TraceRequest(
            row.timestamp / 1000,
            tokens_of(row.hash_ids, row.input_length, vocabulary),
            row.output_length,
        )
        for row in read_trace(SHIPPED)
    ]


def tokens_of(
    hash_ids: Sequence[int],
    length: int,
    vocabulary: Sequence[int],
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[int]:
    """A prompt of `length` tokens from its chunk ids."""
    tokens: list[int] = []
    for chunk in hash_ids:
        tokens += random.Random(chunk).choices(vocabulary, k=chunk_tokens)
    return tokens[:length]
