"""A FastStream service that publishes prompts and handles their results, with typed models.

    questions ──ask──► prompts ──► kvlane ──► replies ──handle──► answers

KVLANE_REPLY_TOPIC_PREFIXES=replies kvlane up --port 9092      # in another shell
faststream run examples.faststream_service:app

The topics `questions`, `replies` and `answers` exist (`kafka-topics.sh --create --topic replies
--bootstrap-server 127.0.0.1:9092`, and so on); `replies` is one that the operator allows.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker
from pydantic import BaseModel

from kvlane import Prompt

SERVERS = os.environ.get("KVLANE_BOOTSTRAP_SERVERS", "127.0.0.1:9092")
PREFIX = os.environ.get("KVLANE_TOPIC_PREFIX", "kvlane.")
OWN_PREFIX = os.environ.get("EXAMPLE_TOPIC_PREFIX", "")
QUESTIONS, REPLIES, ANSWERS = (OWN_PREFIX + name for name in ("questions", "replies", "answers"))


class Question(BaseModel):
    """A question. `id`: asked again with the same one, it is answered once."""

    id: str
    text: str


class Usage(BaseModel):
    completion_tokens: int = 0


class ResultError(BaseModel):
    message: str
    code: str | None = None


class Result(BaseModel):
    """The fields of a result that this service reads; the others are ignored."""

    id: str
    status: str
    body: dict[str, Any] | None = None
    usage: Usage | None = None
    error: ResultError | None = None


class Answer(BaseModel):
    """An answer, or the reason why there is none."""

    id: str
    text: str = ""
    tokens: int = 0
    error: str = ""


# Two log lines for each message would take longer than the message: they are at this level.
broker = KafkaBroker(SERVERS, allow_auto_create_topics=False, log_level=logging.DEBUG)
app = FastStream(broker)
prompts = broker.publisher(PREFIX + "prompts")
answers = broker.publisher(ANSWERS)


# By default offsets are committed by time, before or after the handler: a crash would lose
# questions. `no_reply`: else FastStream answers messages that have a header `reply_to` itself.
@broker.subscriber(
    QUESTIONS, group_id="ask", auto_offset_reset="earliest", ack_policy=AckPolicy.ACK, no_reply=True
)
async def ask(question: Question) -> None:
    """Publish a question as a prompt whose result goes to `replies`."""
    messages = [{"role": "user", "content": question.text}]
    prompt = Prompt(id=question.id, body={"messages": messages, "max_tokens": 20})
    await prompts.publish(prompt, key=prompt.id.encode(), reply_to=REPLIES)


# Results are written in transactions: `read_committed` leaves out those that were aborted.
@broker.subscriber(
    REPLIES, group_id="handle", auto_offset_reset="earliest", ack_policy=AckPolicy.ACK,
    isolation_level="read_committed", no_reply=True,
)  # fmt: skip
@answers
async def handle(result: Result) -> Answer:
    """Publish the answer to a question."""
    if result.body is None:
        return Answer(id=result.id, error=result.error.message if result.error else result.status)
    text = result.body["choices"][0]["message"]["content"]
    return Answer(
        id=result.id, text=text, tokens=result.usage.completion_tokens if result.usage else 0
    )
