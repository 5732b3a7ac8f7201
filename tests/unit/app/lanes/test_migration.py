"""Tests of answers that broke off: whole ones, and ones that cannot be continued."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.lanes.failover import finish_reason_of, migration_blocker
from kvlane.streams.records import Chunk
from kvlane.streams.request import Request, SamplingOptions, StopConditions
from kvlane.streams.responses.transcript import Transcript


def sent(eos: tuple[int, ...] = (), **stop: Any) -> Request:
    return Request(id="a", eos_token_ids=eos, stop=StopConditions(**stop))


@pytest.mark.parametrize(
    ("request_", "taken", "code"),
    [
        (sent(), [1, 2], None),
        (sent(max_tokens=2), [], None),
        (sent(max_tokens=2), [1], None),
        (sent(max_tokens=2), [1, 2], "length"),
        (sent(eos=(9,)), [1, 9], "stop"),
        (sent(eos=(9,)), [9, 1], None),
        (sent(eos=(9,), ignore_eos=True), [1, 9], None),
        (sent(eos=(9,), ignore_eos=True, max_tokens=2), [1, 9], "length"),
        (sent(eos=(9,), max_tokens=2), [1, 9], "stop"),
        (sent(eos=(9,), min_tokens=2), [9], None),
        (sent(eos=(9,), min_tokens=2), [1, 9], "stop"),
        (sent(stop_token_ids=(8,)), [1, 8], "stop"),
        (sent(stop_token_ids=(8,), ignore_eos=True), [1, 8], "stop"),
        (sent(stop_token_ids=(8,), min_tokens=3), [1, 8], None),
        (sent(stop_token_ids_hidden=(7,)), [7], "stop"),
        (sent(stop_token_ids_hidden=(7,), ignore_eos=True), [7], None),
    ],
)
def test_answer_is_complete_when_its_engine_would_have_stopped(
    request_: Request, taken: list[int], code: str | None
) -> None:
    assert finish_reason_of(request_, taken) == code


def shown(*tokens: int, text: str = "") -> Transcript:
    transcript = Transcript()
    transcript.apply(Chunk(id="a", attempt=0, run="1", seq=0, index=0, token_ids=tokens, text=text))
    return transcript


def test_most_answers_can_be_continued() -> None:
    assert migration_blocker(sent(), shown(1, 2, text="ab")) == ""
    assert migration_blocker(sent(), Transcript()) == ""


def test_text_without_tokens_cannot_be_continued() -> None:
    assert "token ids" in migration_blocker(sent(), shown(text="ab"))


def test_words_that_may_have_begun_block_only_an_answer_with_tokens() -> None:
    words = Request(id="a", sampling=SamplingOptions(bad_words_token_ids=((7, 8),)))
    assert migration_blocker(words, Transcript()) == ""
    assert "bad words" in migration_blocker(words, shown(1))
