"""Prompts of a production trace: tokens generated from the ids of their chunks.

Equal ids give equal tokens, so prompts share exactly the prefixes that they shared in production.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvlane.app.traces.mooncake_trace import BUNDLED_TRACE, CHUNK_TOKENS, read_trace


class TracePrompt(NamedTuple):
    """One request. `arrival_s` is relative to the start of the trace."""

    arrival_s: float
    token_ids: list[int]
    output_tokens: int


def bundled_prompts(vocabulary: Sequence[int]) -> list[TracePrompt]:
    """The 300 requests that ship with kvlane, in tokens of this vocabulary."""
    return [
        TracePrompt(
            row.timestamp / 1000,
            chunk_tokens(row.hash_ids, row.input_length, vocabulary),
            row.output_length,
        )
        for row in read_trace(BUNDLED_TRACE)
    ]


def chunk_tokens(
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
