"""Traces of requests in Mooncake's form: when each came, how long it was, what they share.

A line of JSON is a request; it holds no text, only an id for each chunk of CHUNK_TOKENS tokens of
its prompt. Equal ids mean equal chunks with equal chunks before them. Reading only; what is made of
a trace is its reader's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

CHUNK_TOKENS = 512
SHIPPED = Path(__file__).resolve().parent / "data" / "conversation_300.jsonl"
"""The slice that comes with kvlane (see `app/data/NOTICE`)."""


class BadTrace(Exception):
    """Not a trace; the message names the file and the line."""


_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Chunk = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TraceRow(msgspec.Struct, frozen=True):
    """A line; names as in the file. `timestamp` in ms, lengths in tokens.

    `hash_ids`: one for each chunk of the prompt, the last one for what is left of it.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Natural
    output_length: _Natural
    hash_ids: list[_Chunk]

    @property
    def whole_chunks(self) -> list[int]:
        """The chunks that are filled, so that a cache can share them."""
        return self.hash_ids[: self.input_length // CHUNK_TOKENS]


def read_trace(file: Path) -> list[TraceRow]:
    """The requests of a file in the order of their arrival. Raises BadTrace."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as e:
        raise BadTrace(f"{file}: {e.strerror}") from e
    rows = [_row(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BadTrace(f"{file}: no requests")
    rows.sort(key=lambda row: row.timestamp)
    return rows


def _row(file: Path, number: int, line: bytes) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except msgspec.DecodeError as e:
        raise BadTrace(f"{file}, line {number}: {e}") from e
    if row.input_length < 1 or len(row.hash_ids) != -(-row.input_length // CHUNK_TOKENS):
        raise BadTrace(
            f"{file}, line {number}: {len(row.hash_ids)} chunks of {CHUNK_TOKENS} tokens, "
            f"but {row.input_length} tokens"
        )
    return row
