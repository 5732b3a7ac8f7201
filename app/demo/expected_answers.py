"""Expected and received answers: the text, its arrival times, and whether it is correct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlane.app.engine.engine_factory import text_generator_of
from kvlane.app.engine.simulated.text_generator import ExpectedAnswer, expected_answer
from kvlane.app.preprocess.models.model import model_of_files
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, card_of, read_folder
from kvlane.app.preprocess.requests.openai_requests import TokenizedKind, read_openai
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.settings import Settings
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import token_count
from kvlane.streams.records import Artifact, Chunk, End

NO_ARTIFACT = Artifact("", 0)


@dataclass
class DemoAnswer:
    id: str
    expected: ExpectedAnswer
    prompt_tokens: int
    sent_at: float
    text_times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: list[int] | None = None
    finish_reason: str = ""

    def add_record(self, record: Chunk | End, now: float) -> None:
        if isinstance(record, End):
            self.finish_reason = record.code
            return
        self.tokens = [*(self.tokens or ()), *record.token_ids]
        self.add_text(record.text, record.finish_reason, now)

    def add_text(self, text: str, finish_reason: str | None, now: float) -> None:
        if text:
            self.text_times.append(now)
        self.text += text
        self.finish_reason = finish_reason or self.finish_reason

    @property
    def is_correct(self) -> bool:
        return (
            self.text == self.expected.text
            and self.finish_reason == self.expected.finish_reason
            and self.tokens in (None, list(self.expected.token_ids))
        )

    @property
    def ttft_s(self) -> float:
        """Time from the request to the first text; infinite without any."""
        return self.text_times[0] - self.sent_at if self.text_times else float("inf")

    @property
    def longest_pause_s(self) -> float:
        """From the request, or a chunk, to the next chunk."""
        moments = [self.sent_at, *self.text_times]
        return max((b - a for a, b in zip(moments, self.text_times, strict=False)), default=0.0)


class AnswerOracle:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._files = read_folder(DEMO_MODEL_FOLDER)
        self._speaker = text_generator_of(self._files)

    async def load(self) -> None:
        card = card_of(
            self._settings.model,
            self._files,
            NO_ARTIFACT,
            NO_ARTIFACT,
            context_length=self._settings.context_length,
        )
        self._model = await model_of_files(card, self._files, InlinePool(), self._clock)

    @property
    def vocabulary(self) -> Sequence[int]:
        special = 16  # the first ids are special tokens
        return range(special, self._model.tokenizer.vocabulary_size)

    async def expect_answer(
        self, request_id: str, kind: TokenizedKind, body: Mapping[str, Any]
    ) -> DemoAnswer:
        prepared = await self._model.prepare(read_openai(kind, body))
        request = prepared.requests[0]
        answer = expected_answer(
            request, self._speaker, self._model.text_stream(request), self._settings.context_length
        )
        return DemoAnswer(request_id, answer, token_count(request.token_ids), self._clock.now())
