"""How the demo judges what it sees."""

from __future__ import annotations

import pytest

from app.demo.asked import Asked, percentile
from app.demo.trace import BLOCK_TOKENS, shipped_slice, tokens_of
from app.engine.echo import echo_answer
from app.preprocess.byte_level import decode, render_chat
from streams.prompt import Prompt
from streams.records import Chunk, End, FinishReason

TOKENS = render_chat([("user", "né")])


def asked(
    *pieces: tuple[list[int], str], reason: FinishReason | None = "stop", limit: int | None = None
) -> Asked:
    one = Asked(Prompt(id="a"), TOKENS, limit, at=1.0)
    for n, (tokens, text) in enumerate(pieces):
        last = reason if n == len(pieces) - 1 else None
        chunk = Chunk(
            id="a", attempt=0, run="1", seq=n, index=0, token_ids=tuple(tokens), text=text,
            finish_reason=last,
        )  # fmt: skip
        one.receive(chunk, 2.0 + n)
    return one


BODY = list("né".encode())


def test_the_engines_answer_is_right() -> None:
    assert asked((BODY[:1], "n"), (BODY[1:], "é")).is_right


@pytest.mark.parametrize(
    "wrong",
    [
        asked((BODY[:1], "n"), (BODY[1:2], "é")),  # a token is missing
        asked((BODY, "né"), (BODY[:1], "n")),  # one is doubled
        asked((BODY[::-1], "né")),  # out of order
        asked((BODY, "ne")),  # another text
        asked((BODY, "né"), reason=None),  # no end
        asked((BODY, "né"), reason="length"),  # an end for another reason
        asked((BODY, "né"), limit=4),  # shorter than asked for
    ],
)
def test_anything_else_is_wrong(wrong: Asked) -> None:
    assert not wrong.is_right


def test_a_limit_ends_as_length() -> None:
    answer = echo_answer(TOKENS, 5)
    assert asked((answer, decode(answer)), reason="length", limit=5).is_right


def test_an_end_by_a_router_is_wrong() -> None:
    one = asked((BODY, "né"), reason=None)
    one.receive(End(id="a", code="deadline"), 9.0)
    assert not one.is_right
    assert one.ended == "deadline"


def test_times_count_from_publishing() -> None:
    one = asked((BODY[:1], "n"), (BODY[1:], "é"))
    assert (one.ttft_s, one.longest_silence_s) == (1.0, 1.0)
    one.receive(Chunk(id="a", attempt=0, run="1", seq=2, index=3, token_ids=(1,)), 9.0)
    assert one.longest_silence_s == 6.0


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.01, 1), (0.0, 1)]
)
def test_percentiles_are_values_that_occurred(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


def test_the_trace_keeps_what_prompts_have_in_common() -> None:
    trace = shipped_slice()
    assert len(trace) == 50
    assert [r.arrival_s for r in trace] == sorted(r.arrival_s for r in trace)
    first, second = trace[0].token_ids, trace[1].token_ids
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS]
    assert first[BLOCK_TOKENS : 2 * BLOCK_TOKENS] != second[BLOCK_TOKENS : 2 * BLOCK_TOKENS]


def test_trace_tokens_are_printable_and_of_the_length_asked_for() -> None:
    tokens = tokens_of([7, 8], 600)
    assert len(tokens) == 601  # and the marker that ends the turn
    assert bytes(tokens[:-1]).decode().isprintable()
