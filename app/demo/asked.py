"""Requests as their client sees them: what was asked, what came when, and whether it is right.

`Judge` says what an answer must be, before anything is asked and without asking any worker: the
simulated engine speaks by a function of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.engine.choice import speaker_of
from app.engine.continuation import Due, due
from app.preprocess.loaded import of_files
from app.preprocess.modelfolder import DEMO, card_of, read_folder
from app.preprocess.openai import Kind, read
from app.preprocess.pool import Inline
from app.settings import Settings
from streams.clock import Clock
from streams.codecs import token_count
from streams.records import Artifact, Chunk, End

NOT_STORED = Artifact("", 0)


@dataclass
class Asked:
    """One request. Times are of the demo's clock, in seconds."""

    id: str
    due: Due
    prompt_tokens: int
    at: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: list[int] | None = None
    """Token ids, for clients that see them."""
    ended: str = ""

    def receive(self, piece: Chunk | End, now: float) -> None:
        """A visible piece of the answer came from the log."""
        if isinstance(piece, End):
            self.ended = piece.code
            return
        self.tokens = [*(self.tokens or ()), *piece.token_ids]
        self.hear(piece.text, piece.finish_reason, now)

    def hear(self, text: str, finish_reason: str | None, now: float) -> None:
        """Some text came, or the end."""
        if text:
            self.times.append(now)
        self.text += text
        self.ended = finish_reason or self.ended

    @property
    def is_right(self) -> bool:
        """Whether it is exactly the answer that is due, whatever died on the way."""
        return (
            self.text == self.due.text
            and self.ended == self.due.finish_reason
            and self.tokens in (None, list(self.due.token_ids))
        )

    @property
    def ttft_s(self) -> float:
        """From asking to the first text; infinite without any."""
        return self.times[0] - self.at if self.times else float("inf")

    @property
    def longest_silence_s(self) -> float:
        """The longest time without a new piece, waiting for the first one included."""
        moments = [self.at, *self.times]
        return max((b - a for a, b in zip(moments, self.times, strict=False)), default=0.0)


class Judge:
    """Knows what the demo's model answers to anything."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._files = read_folder(DEMO)
        self._speaker = speaker_of(self._files)

    async def open(self) -> None:
        """Load the model's tokenizer and template."""
        card = card_of(
            self._settings.model,
            self._files,
            NOT_STORED,
            NOT_STORED,
            context_length=self._settings.context_length,
        )
        self._model = await of_files(card, self._files, Inline(), self._clock)

    @property
    def vocabulary(self) -> Sequence[int]:
        """Tokens that are ordinary text."""
        special = 16  # the demo's model has its special tokens at the beginning
        return range(special, self._model.tokenizer.vocabulary_size)

    async def asked(self, request_id: str, kind: Kind, body: Mapping[str, Any]) -> Asked:
        """A request that is about to be made, with the answer that is due."""
        prepared = await self._model.prepare(read(kind, body))
        request = prepared.requests[0]
        answer = due(
            request,
            self._speaker,
            self._model.text_stream(request),
            self._settings.context_length,
        )
        return Asked(request_id, answer, token_count(request.token_ids), self._clock.now())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
