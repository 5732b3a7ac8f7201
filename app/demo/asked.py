"""Requests as their client sees them: what was asked, what came when, and whether it is right.

Owns the measured figures of a demo. Where a request ran is read from the ledger, by `Placements`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.engine.echo import echo_answer
from app.preprocess.byte_level import decode as text_of
from streams.codecs import decode
from streams.errors import RecordError
from streams.ports import Log, Partition
from streams.prompt import Prompt
from streams.records import Assigned, Chunk, End
from streams.topics import LEDGER


@dataclass
class Asked:
    """One request. Times are of the demo's clock, in seconds."""

    prompt: Prompt
    token_ids: Sequence[int]
    max_tokens: int | None
    at: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: str = ""

    def receive(self, piece: Chunk | End, now: float) -> None:
        """A visible piece of the answer came."""
        if isinstance(piece, End):
            self.ended = piece.code
            return
        if piece.token_ids:
            self.times.append(now)
        self.tokens += piece.token_ids
        self.text += piece.text
        self.ended = piece.finish_reason or self.ended

    @property
    def id(self) -> str:
        """Its request id."""
        return self.prompt.id

    @property
    def from_trace(self) -> bool:
        """Whether it is one of the trace's."""
        return self.prompt.kind == "tokens"

    @property
    def is_right(self) -> bool:
        """Whether tokens and text are exactly those the engine gives without any failure."""
        answer = echo_answer(self.token_ids, self.max_tokens)
        whole = self.ended == ("stop" if self.max_tokens is None else "length")
        return whole and self.tokens == answer and self.text == text_of(answer)

    @property
    def ttft_s(self) -> float:
        """From publishing to the first token; infinite without one."""
        return self.times[0] - self.at if self.times else float("inf")

    @property
    def longest_silence_s(self) -> float:
        """The longest time without a new piece, waiting for the first one included."""
        moments = [self.at, *self.times]
        return max((b - a for a, b in zip(moments, self.times, strict=False)), default=0.0)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


class Placements:
    """Which workers each request was given to, from the ledger, in the order of its attempts."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._workers: dict[str, list[str]] = {}

    def of(self, request_id: str) -> list[str]:
        """The workers of a request so far."""
        return self._workers.get(request_id, [])

    async def beginning(self) -> dict[Partition, int]:
        """Where to begin: the ends of the ledger now."""
        lanes = range(await self._log.partitions(LEDGER))
        ends = await self._log.end_offsets(LEDGER, lanes)
        return {Partition(LEDGER, lane): end for lane, end in ends.items()}

    async def follow(self, positions: dict[Partition, int]) -> None:
        """Read on until cancelled."""
        reader = self._log.reader()
        reader.assign(positions)
        try:
            while True:
                for records in (await reader.poll(1.0)).values():
                    for record in records:
                        try:
                            told = decode(record)
                        except RecordError:
                            continue
                        if isinstance(told, Assigned):
                            self._workers.setdefault(told.id, []).append(told.worker)
        finally:
            await reader.close()
