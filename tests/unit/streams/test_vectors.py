"""Tests of the published test vectors: two implementations pass them, and each rule has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvlane.streams import vectors
from kvlane.streams.codecs import decode, encode
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.records import Chunk, End, Fence
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import partition_of

Line = Chunk | Fence | End
Vector = dict[str, Any]
HERE = Path(vectors.__file__).parent
VECTORS: list[Vector] = [
    vector
    for path in sorted(HERE.glob("*.json"))
    if path.name != "lanes.json"
    for vector in json.loads(path.read_text(encoding="utf-8"))
]
WRITTEN = [vector for vector in VECTORS if not vector["name"].startswith("strays")]
each_vector = pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])


class Shown(NamedTuple):
    text: str
    tokens: tuple[int, ...]
    finish_reason: str | None
    end: str | None


def read(line: dict[str, Any]) -> Line:
    """As a reader in this process gets it: through the shipped codec."""
    value, headers = json.dumps(line).encode(), (("t", line["t"].encode()),)
    record = decode(MemoryRecord("responses", 0, 0, 0, line["id"].encode(), value, headers))
    assert isinstance(record, Chunk | Fence | End)
    return record


@each_vector
def test_reader_passes_a_vector(vector: Vector) -> None:
    seen = Transcript()
    for line in vector["log"]:
        seen.apply(read(line))
    assert seen.text == vector["text"]
    assert seen.tokens == vector["tokens"]
    assert seen.finish_reason == vector["finish_reason"]
    assert (seen.end.code if seen.end else None) == vector["end"]
    assert (seen.attempt, seen.gaps) == (vector["attempt"], vector["holes"])


def test_lane_vectors_hold() -> None:
    for vector in json.loads((HERE / "lanes.json").read_text(encoding="utf-8")):
        for partitions, partition in vector["partitions"].items():
            assert partition_of(vector["key"].encode(), int(partitions)) == partition


@each_vector
def test_records_of_a_vector_are_in_wire_format(vector: Vector) -> None:
    for line in vector["log"]:
        value = encode(read(line), line["id"]).value
        assert value is not None
        assert json.loads(value) == line


# --- a reader that lacks one part of the rule fails a vector that was written by hand -------------

PARTS = (
    "the end is final",
    "End ends",
    "the highest fence",
    "a second fence is nothing",
    "older attempts",
    "newer attempts",
    "one run",
    "retries",
    "holes stay",
    "no finish behind a hole",
    "seq",
    "index",
)


class Careless:
    """The rule once more, with one part left out; with "" nothing is."""

    def __init__(self, lacks: str) -> None:
        self.lacks = lacks
        self.text, self.tokens = "", list[int]()
        self.attempt, self.run, self.next, self.broken = 0, "", 0, False
        self.finish_reason: str | None = None
        self.end: str | None = None

    def read(self, log: list[dict[str, Any]]) -> Shown:
        for line in map(read, log):
            if (self.finish_reason or self.end) and self.lacks != "the end is final":
                break
            if isinstance(line, End):
                self.end = line.code if self.lacks != "End ends" else None
            elif isinstance(line, Fence):
                self._fence(line.attempt)
            elif self._is_of_the_run(line):
                self._chunk(line)
        return Shown(self.text, tuple(self.tokens), self.finish_reason, self.end)

    def _fence(self, attempt: int) -> None:
        higher = attempt > self.attempt
        higher |= attempt < self.attempt and self.lacks == "the highest fence"
        higher |= attempt == self.attempt and self.lacks == "a second fence is nothing"
        if higher:
            self.attempt, self.run, self.next, self.broken = attempt, "", 0, False

    def _is_of_the_run(self, chunk: Chunk) -> bool:
        if chunk.attempt < self.attempt and self.lacks != "older attempts":
            return False
        if chunk.attempt > self.attempt and self.lacks != "newer attempts":
            return False
        self.run = self.run or chunk.run
        return chunk.run == self.run or self.lacks == "one run"

    def _chunk(self, chunk: Chunk) -> None:
        if chunk.seq < self.next and self.lacks != "retries":
            return
        gap = chunk.seq > self.next and self.lacks != "seq"
        gap |= chunk.index != len(self.tokens) and self.lacks != "index"
        if gap or self.broken:
            self.broken = self.lacks != "holes stay"
            if self.lacks == "no finish behind a hole":
                self.finish_reason = chunk.finish_reason
            return
        self.text += chunk.text
        self.tokens += chunk.token_ids
        self.next = chunk.seq + 1
        self.finish_reason = chunk.finish_reason


def expected(vector: Vector) -> Shown:
    return Shown(vector["text"], tuple(vector["tokens"]), vector["finish_reason"], vector["end"])


@pytest.mark.parametrize("part", PARTS)
def test_reader_without_a_part_of_the_rule_fails_a_vector(part: str) -> None:
    assert [v["name"] for v in WRITTEN if Careless(part).read(v["log"]) != expected(v)]


@each_vector
def test_complete_reader_passes(vector: Vector) -> None:
    assert Careless("").read(vector["log"]) == expected(vector)
