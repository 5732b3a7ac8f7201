"""Tests of the demo's comparison of answers."""

from __future__ import annotations

import pytest

from kvlane.app.demo.expected_answers import AnswerOracle, DemoAnswer
from kvlane.app.demo.policy_comparison import bundled_prompts, chunk_tokens
from kvlane.app.engine.simulated.text_generator import ExpectedAnswer
from kvlane.app.settings import Settings
from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Chunk, End, FinishReason

BODY = list("né".encode())
DUE = ExpectedAnswer(tuple(BODY), "né", "stop")


def sent(
    *pieces: tuple[list[int], str], reason: FinishReason | None = "stop", due: ExpectedAnswer = DUE
) -> DemoAnswer:
    one = DemoAnswer("a", due, prompt_tokens=4, sent_at=1.0)
    for n, (tokens, text) in enumerate(pieces):
        last = reason if n == len(pieces) - 1 else None
        chunk = Chunk(
            id="a", attempt=0, run="1", seq=n, index=0, token_ids=tuple(tokens), text=text,
            finish_reason=last,
        )  # fmt: skip
        one.add_record(chunk, 2.0 + n)
    return one


def test_engines_answer_is_right() -> None:
    assert sent((BODY[:1], "n"), (BODY[1:], "é")).is_correct


@pytest.mark.parametrize(
    "wrong",
    [
        sent((BODY[:1], "n"), (BODY[1:2], "é")),  # a token is missing
        sent((BODY, "né"), (BODY[:1], "n")),  # one is doubled
        sent((BODY[::-1], "né")),  # out of order
        sent((BODY, "ne")),  # another text
        sent((BODY, "né"), reason=None),  # no end
        sent((BODY, "né"), reason="length"),  # an end for another reason
        sent((BODY, "né"), due=ExpectedAnswer((*BODY, 110), "nén", "stop")),  # shorter than due
    ],
)
def test_anything_else_is_wrong(wrong: DemoAnswer) -> None:
    assert not wrong.is_correct


def test_end_by_a_router_is_wrong() -> None:
    one = sent((BODY, "né"), reason=None)
    one.add_record(End(id="a", code="deadline"), 9.0)
    assert not one.is_correct
    assert one.finish_reason == "deadline"


def test_client_without_tokens_is_checked_by_its_text() -> None:
    one = DemoAnswer("a", DUE, prompt_tokens=4, sent_at=1.0)
    one.add_text("n", None, 2.0)
    assert not one.is_correct
    one.add_text("é", "stop", 3.0)
    assert one.is_correct


def test_times_count_from_the_request() -> None:
    one = sent((BODY[:1], "n"), (BODY[1:], "é"))
    assert (one.ttft_s, one.longest_pause_s) == (1.0, 1.0)
    one.add_text("!", None, 9.0)
    assert one.longest_pause_s == 6.0


async def test_expected_answers_are_computed_and_differ_by_prompt() -> None:
    judge = AnswerOracle(Settings(), SystemClock())
    await judge.load()

    async def due(text: str) -> ExpectedAnswer:
        body = {"messages": [{"role": "user", "content": text}]}
        return (await judge.expect_answer("a", "chat", body)).expected

    assert await due("hello") == await due("hello")
    assert (await due("hello")).text != (await due("hallo")).text


async def test_limits_of_the_body_are_limits_of_the_answer() -> None:
    judge = AnswerOracle(Settings(), SystemClock())
    await judge.load()
    body = {"token_ids": [100, 200, 300], "max_tokens": 3, "ignore_eos": True}
    one = await judge.expect_answer("a", "tokens", body)
    assert (len(one.expected.token_ids), one.expected.finish_reason) == (3, "length")
    assert one.prompt_tokens == 3


def test_trace_keeps_common_parts_of_prompts() -> None:
    trace = bundled_prompts(range(16, 4096))
    assert len(trace) == 300
    assert [r.arrival_s for r in trace] == sorted(r.arrival_s for r in trace)
    first, second = trace[0].token_ids, trace[1].token_ids
    assert first[:CHUNK_TOKENS] == second[:CHUNK_TOKENS]
    assert first[CHUNK_TOKENS : 2 * CHUNK_TOKENS] != second[CHUNK_TOKENS : 2 * CHUNK_TOKENS]


def test_trace_tokens_are_of_the_vocabulary_and_the_requested_length() -> None:
    tokens = chunk_tokens([7, 8], 600, range(16, 4096))
    assert len(tokens) == 600
    assert set(tokens) <= set(range(16, 4096))
