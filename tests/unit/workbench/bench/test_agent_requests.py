"""Tests of the requests of agents under faults: each wrong part of an answer is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvlane.app.demo.expected_answers import DemoAnswer
from kvlane.app.text.answer_parts import call_id
from kvlane.streams.records import Chunk, PassthroughDelta
from workbench.bench.chaos.agent_requests import agent_request, text_of_chunk, text_of_delta
from workbench.bench.chaos.load_generator import Conversation

ASKED = agent_request("a lane, the 1th time")
REASONING = {"reasoning_content": "These are a lane, the 1th time."}
CONTENT = {"content": "I look at a lane, the 1th time.\n"}


def call(number: int, name: str, request_id: str = "r") -> list[Mapping[str, Any]]:
    """A call in three deltas."""
    given = f'{{"place": "a lane, the 1th time", "number": {number}}}'
    begun = {"index": number, "id": call_id(request_id, number), "function": {"name": name}}
    parts = [{"index": number, "function": {"arguments": part}} for part in (given[:9], given[9:])]
    return [{"tool_calls": [each]} for each in (begun, *parts)]


LOOK, LISTEN = call(0, "look"), call(1, "listen")
WHOLE = [REASONING, CONTENT, *LOOK, *LISTEN]


@pytest.mark.parametrize(
    ("deltas", "verdict"),
    [
        (WHOLE, "right"), (WHOLE[:-1], "lost"), (WHOLE[:2], "lost"), ([*WHOLE, LOOK[2]], "twice"),
        (WHOLE[1:], "wrong"), ([REASONING, CONTENT, *LISTEN, *LOOK], "wrong"),
        ([REASONING, CONTENT, *call(0, "look", "another"), *LISTEN], "twice"),
    ],
)  # fmt: skip
def test_lost_repeated_and_changed_parts_are_found(
    deltas: Sequence[Mapping[str, Any]], verdict: str
) -> None:
    answer = DemoAnswer("r", ASKED.expected, 0, 0.0)
    for delta in deltas:
        answer.add_text(text_of_delta(delta, "r"), None, 1.0)
    answer.finish_reason = "tool_calls"
    assert Conversation(answer, 0, agent_content=ASKED.content).verdict == verdict


def test_parts_of_a_chunk_are_in_their_order() -> None:
    content = CONTENT["content"]
    asides = [PassthroughDelta(at=0, delta=REASONING)]
    asides += [PassthroughDelta(at=len(content), delta=dict(delta)) for delta in (*LOOK, *LISTEN)]
    chunk = Chunk(
        id="r",
        attempt=0,
        run="1",
        seq=0,
        index=0,
        text=content,
        chars=len(content),
        data=tuple(asides),
    )
    assert text_of_chunk(chunk) == ASKED.expected.text
