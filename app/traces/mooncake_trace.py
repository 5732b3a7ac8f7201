"""Request traces in the Mooncake format: arrival times, lengths and shared prefixes.

A line of JSON is a request, with an id for each chunk of CHUNK_TOKENS tokens of its prompt. Equal
ids mean equal chunks after equal chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvlane.app.operator_error import OperatorError

CHUNK_TOKENS = 512
BUNDLED_TRACE = Path(__file__).resolve().parents[1] / "data" / "conversation_300.jsonl"
"""The slice of a trace that ships with kvlane (see `app/data/NOTICE`)."""


class InvalidTrace(OperatorError):
    """A file that is no valid trace; the message names the file and the line."""


_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Chunk = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TraceRow(msgspec.Struct, frozen=True):
    """A line, with the field names of the file. `timestamp` in ms, lengths in tokens. `hash_ids`:
    one for each chunk of the prompt; the last chunk may be partial."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Natural
    output_length: _Natural
    hash_ids: list[_Chunk]

    @property
    def full_chunks(self) -> list[int]:
        return self.hash_ids[: self.input_length // CHUNK_TOKENS]


def read_trace(file: Path) -> list[TraceRow]:
    """Read the requests of a file, in order of arrival. Raises InvalidTrace."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as e:
        raise InvalidTrace(f"{file}: {e.strerror}") from e
    rows = [_row(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InvalidTrace(f"{file}: the trace has no requests")
    rows.sort(key=lambda row: row.timestamp)
    return rows


def _row(file: Path, number: int, line: bytes) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except msgspec.DecodeError as e:
        raise InvalidTrace(f"{file}, line {number}: {e}") from e
    if row.input_length < 1 or len(row.hash_ids) != -(-row.input_length // CHUNK_TOKENS):
        raise InvalidTrace(
            f"{file}, line {number}: {len(row.hash_ids)} chunks of {CHUNK_TOKENS} tokens, "
            f"but {row.input_length} tokens"
        )
    return row
