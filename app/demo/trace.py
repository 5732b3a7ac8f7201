"""Requests of a production trace: when they came, how long they were, what they had in common.

A trace holds no text, only an id for each block of the prompt; tokens are made up from the ids, the
same ones every time, so that prompts share exactly the prefixes that they shared in production.
The slice that is shipped is `app/data/conversation_300.jsonl` (see `app/data/NOTICE`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import msgspec

BLOCK_TOKENS = 512


class TraceRequest(NamedTuple):
    """One request. `arrival_s` counts from the start of the trace."""

    arrival_s: float
    token_ids: list[int]
    output_tokens: int


class _Row(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def shipped_slice(vocabulary: Sequence[int]) -> list[TraceRequest]:
    """The 300 requests that come with kvlane, in tokens of this vocabulary."""
    text = files("app").joinpath("data/conversation_300.jsonl").read_bytes()
    rows = [msgspec.json.decode(line, type=_Row) for line in text.splitlines()]
    return [
        TraceRequest(
            row.timestamp / 1000,
            tokens_of(row.hash_ids, row.input_length, vocabulary),
            row.output_length,
        )
        for row in rows
    ]


def tokens_of(hash_ids: list[int], length: int, vocabulary: Sequence[int]) -> list[int]:
    """A prompt of `length` tokens from its block ids."""
    tokens: list[int] = []
    for block in hash_ids:
        tokens += random.Random(block).choices(vocabulary, k=BLOCK_TOKENS)
    return tokens[:length]
