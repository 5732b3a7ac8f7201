"""A FastStream service that executes the tool calls of results, until the model answers in text.

    questions ──ask──► prompts ──► kvlane ──► replies ──act──► prompts, or answers

KVLANE_REPLY_TOPIC_PREFIXES=replies KVLANE_ENGINE=echo \\
    KVLANE_ECHO_SCRIPT=examples/agent_script.json kvlane up --port 9092      # in another shell
faststream run examples.faststream_tools:app

The topics are those of `faststream_service.py`, and so are its types. The conversation travels in
the metadata of prompts and results, so any process of the service continues it: the id of the next
prompt follows from the last one, and a call that is executed again gets no second answer. Tools
with effects need an idempotency key: the id of their call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker

from examples.agent_with_tools import TOOLS, described
from examples.faststream_service import (
    ANSWERS,
    PREFIX,
    QUESTIONS,
    REPLIES,
    SERVERS,
    Answer,
    Question,
    Result,
)
from kvlane import Prompt

MAX_TURNS = 8

broker = KafkaBroker(SERVERS, allow_auto_create_topics=False)
app = FastStream(broker)
prompts = broker.publisher(PREFIX + "prompts")
answers = broker.publisher(ANSWERS)


class ToolResult(Result):
    """A result with the conversation so far."""

    metadata: dict[str, Any]


async def ask_model(request_id: str, messages: list[Any], turn: int) -> None:
    """Publish a prompt whose result goes to `replies`."""
    body = {"messages": messages, "tools": [described(name) for name in TOOLS]}
    metadata = {"messages": messages, "turn": turn}
    prompt = Prompt(id=request_id, body=body, metadata=metadata)
    await prompts.publish(prompt, key=prompt.id.encode(), reply_to=REPLIES)


@broker.subscriber(
    QUESTIONS, group_id="ask", auto_offset_reset="earliest", ack_policy=AckPolicy.ACK, no_reply=True
)
async def ask(question: Question) -> None:
    """Begin a conversation."""
    await ask_model(f"{question.id}/0", [{"role": "user", "content": question.text}], 0)


@broker.subscriber(
    REPLIES, group_id="act", auto_offset_reset="earliest", ack_policy=AckPolicy.ACK,
    isolation_level="read_committed", no_reply=True,
)  # fmt: skip
async def act(result: ToolResult) -> None:
    """Execute the calls of a result and ask again, or publish the answer."""
    question_id, turn = result.id.rpartition("/")[0], result.metadata["turn"] + 1
    if result.body is None:
        error = result.error.message if result.error else result.status
        return await publish(Answer(id=question_id, error=error))
    message = result.body["choices"][0]["message"]
    if not message.get("tool_calls"):
        return await publish(Answer(id=question_id, text=message["content"] or ""))
    if turn == MAX_TURNS:
        return await publish(Answer(id=question_id, error=f"no answer after {turn} turns"))
    outcomes = [
        {"role": "tool", "tool_call_id": call["id"], "content": execute(call["function"])}
        for call in message["tool_calls"]
    ]
    messages = [*result.metadata["messages"], message, *outcomes]
    return await ask_model(f"{question_id}/{turn}", messages, turn)


async def publish(answer: Answer) -> None:
    await answers.publish(answer, key=answer.id.encode())


def execute(function: dict[str, str]) -> str:
    """The result of a call; an error is a result too, which the model reads."""
    tool: Callable[..., str] | None = TOOLS.get(function["name"])
    if tool is None:
        return f"error: there is no tool {function['name']}"
    try:
        return tool(**json.loads(function["arguments"]))
    except (TypeError, ValueError) as e:
        return f"error: {e}"
