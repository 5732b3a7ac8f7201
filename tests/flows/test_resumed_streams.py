"""Tests of resumed answers: from every position a reader gets the rest and nothing else.

Pieces are merged while a reader is slow, so the answers are longer than the bound of buffered
pieces. In virtual time.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import pytest

from kvlane.app.commands.model_commands import parse_alias
from kvlane.streams.client import Client
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.errors import BeyondEnd
from kvlane.streams.records import Chunk, End, Fence, LogProb, PassthroughDelta
from kvlane.streams.responses import reply_stream
from kvlane.streams.responses.transcript import Position
from kvlane.streams.topics import REGISTRY, RESPONSES, lane_of
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.reply_harness import Worker, connect, publish, read

SMALL_BOUND = 6
"""Buffered pieces, instead of MAX_PENDING_PIECES, where a test resumes from every position."""


class Part(NamedTuple):
    """A Chunk to come: its tokens, text and data."""

    tokens: int = 0
    text: str = ""
    data: tuple[PassthroughDelta, ...] = ()
    log_probs: bool = False


class Content(NamedTuple):
    """The parts that a reader got: text, arguments of a call, a server's reasoning, the end."""

    text: str = ""
    arguments: str = ""
    reasoning: str = ""
    finish_reason: str | None = None

    def __add__(self, other: Any) -> Content:
        return Content(
            self.text + other.text,
            self.arguments + other.arguments,
            self.reasoning + other.reasoning,
            other.finish_reason or self.finish_reason,
        )


def call(arguments: str, at: int = 0) -> PassthroughDelta:
    function = {"name": "find", "arguments": arguments}
    return PassthroughDelta(at=at, delta={"tool_calls": [{"index": 0, "function": function}]})


def reasoning(text: str, at: int = 0) -> PassthroughDelta:
    return PassthroughDelta(at=at, delta={"reasoning_content": text})


def tokens(number: int, rng: random.Random) -> Part:
    """One to three tokens; some bring no text, others the text of several."""
    count = rng.choice((1, 1, 1, 2, 3))
    return Part(count, rng.choice(("", "x", f"{number} ", f"t{number},")))


def log_probs(number: int, rng: random.Random) -> Part:
    return Part(1, f"{number} ", log_probs=True)


def passthrough(number: int, rng: random.Random) -> Part:
    """Text of a server without token ids, calls and reasoning, before, in and after it."""
    text = rng.choice(("", "", "y", f"{number} and "))
    data = [
        rng.choice((call, reasoning))(f"<{number}.{n}>", rng.randint(0, len(text)))
        for n in range(rng.choice((0, 1, 1, 2)))
    ]
    if text and rng.random() < 0.2:
        data.append(PassthroughDelta(at=0, choice={"logprobs": {"content": [number]}}))
    return Part(0, text, tuple(sorted(data, key=lambda item: item.at)))


def mixed(number: int, rng: random.Random) -> Part:
    """Tokens with and without data, and text that comes without a token."""
    if rng.random() < 0.3:
        return passthrough(number, rng)
    part = tokens(number, rng)
    return part._replace(data=(call(f"({number})"),)) if rng.random() < 0.3 else part


KINDS = [tokens, log_probs, passthrough, mixed]


class AnswerWriter:
    """Writes an answer of this many Chunks; the last one has the text held back until then."""

    def __init__(
        self,
        world: MemoryWorld,
        request_id: str,
        kind: Callable[[int, random.Random], Part],
        chunks: int,
    ) -> None:
        self.request_id = request_id
        self._world = world
        self._rng = random.Random(f"{kind.__name__} {chunks}")
        self._parts = [kind(number, self._rng) for number in range(chunks - 1)]
        self._parts.append(Part(0, "held back"))
        self._attempt, self._run, self._seq, self._index, self._chars = 0, 1, 0, 0, 0
        self._next = 0

    def write(self, count: int | None = None) -> None:
        """Write a number of Chunks, or all that are left."""
        for part in self._parts[self._next :][:count]:
            self._write(part)
            self._next += 1

    def move(self) -> None:
        """Continue as another attempt, as after the death of a worker."""
        self._attempt, self._run, self._seq = self._attempt + 1, self._run + 1, 0
        self._append(Fence(id=self.request_id, attempt=self._attempt))

    def _write(self, part: Part) -> None:
        before, self._chars = self._chars, self._chars + len(part.text)
        token_ids = tuple(range(self._index, self._index + part.tokens))
        chunk = Chunk(
            id=self.request_id, attempt=self._attempt, run=f"{self._run}", seq=self._seq,
            index=self._index, token_ids=token_ids, text=part.text, chars=self._chars,
            log_probs=tuple((LogProb(t, -0.5), LogProb(t + 1, -1.5)) for t in token_ids)
            if part.log_probs else None,
            finish_reason="stop" if self._next == len(self._parts) - 1 else None,
            data=tuple(_moved(item, before) for item in part.data),
            model="" if self._seq else "demo",
        )  # fmt: skip
        self._append(chunk)
        self._seq += 1
        self._index += part.tokens

    def _append(self, record: Chunk | Fence) -> None:
        lane = lane_of(self.request_id, self._world.lanes)
        self._world.append(RESPONSES, lane, record, key=self.request_id)


def _moved(item: PassthroughDelta, by: int) -> PassthroughDelta:
    return PassthroughDelta(at=item.at + by, delta=item.delta, choice=item.choice)


def events_of(content: bytes) -> list[tuple[int | None, Content]]:
    """The events of a response with one choice: their ids and contents."""
    got = []
    for block in content.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if lines.get("data", "[DONE]") != "[DONE]":
            event = json.loads(lines["data"])
            assert "error" not in event, event
            number = int(lines["id"]) if "id" in lines else None
            got += [(number, content_of_choice(choice)) for choice in event["choices"]]
    return got


def content_of_choice(choice: dict[str, Any]) -> Content:
    return content_of(
        choice["delta"].get("content") or "", choice["delta"], choice["finish_reason"]
    )


def content_of(text: str, delta: dict[str, Any], finish_reason: str | None) -> Content:
    calls = "".join(each["function"]["arguments"] for each in delta.get("tool_calls", ()))
    return Content(text, calls, delta.get("reasoning_content", ""), finish_reason)


def whole_of(parts: Sequence[Content]) -> Content:
    return sum(parts[1:], parts[0]) if parts else Content()


async def begin(world: MemoryWorld) -> tuple[GatewayHarness, GatewayHarness, Any, str]:
    """Two gateways, and a streamed answer of the first that has not begun."""
    harness = await GatewayHarness.with_card(world)
    other = await GatewayHarness.open(world, "g2")
    await other.register_and_wait()
    answer = harness.chat("hello", {"x-kvlane-detach": "true"}, stream=True)
    (request,) = await harness.published()
    return harness, other, answer, request.id


async def check_resumed_events(
    other: GatewayHarness, request_id: str, got: list[tuple[int | None, Content]], step: int = 1
) -> None:
    """Resume after every `step`th event that has an id, at another gateway."""
    whole = whole_of([content for _, content in got])
    ids = [number for number, _ in got if number is not None]
    assert ids == sorted(set(ids)), "an id that is not unique does not show what its client has"
    seen = Content()
    for place, (number, content) in enumerate(got):
        seen += content
        if number is None or (place % step and place < len(got) - 2):
            continue
        url, headers = f"/v1/streams/{request_id}", {"Last-Event-ID": str(number)}
        rest = await other.send("GET", url, headers=headers).wait_done()
        resumed = whole_of([content for _, content in events_of(rest.content)])
        assert seen + resumed == whole, f"resumed after {number}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", ["fast", "slow"])
@scenario_test
async def test_event_ids_divide_an_answer_into_what_was_sent_and_the_rest(
    world: MemoryWorld,
    monkeypatch: pytest.MonkeyPatch,
    kind: Callable[[int, random.Random], Part],
    reader: str,
) -> None:
    monkeypatch.setattr(reply_stream, "MAX_PENDING_PIECES", SMALL_BOUND)
    _, other, answer, request_id = await begin(world)
    chunks = 8 * SMALL_BOUND
    writer = AnswerWriter(world, request_id, kind, chunks)
    writer.write(2)
    await world.sleep(0.1)
    if reader == "slow":
        answer.reading.clear()
        writer.write(chunks // 2)
        if kind is tokens:
            writer.move()
        writer.write(chunks // 3)
        await world.sleep(0.1)
        answer.reading.set()
    for _ in range(chunks):
        writer.write(1)
        await world.sleep(0.01)
    await answer.wait_done()
    got = events_of(answer.content)
    if reader == "slow" and kind in (tokens, log_probs):
        assert len(got) < chunks / 2, "its pieces were merged"
    await check_resumed_events(other, request_id, got)


@scenario_test
async def test_long_answer_resumes_at_its_event_ids(world: MemoryWorld) -> None:
    _, other, answer, request_id = await begin(world)
    AnswerWriter(world, request_id, tokens, 3 * reply_stream.MAX_PENDING_PIECES).write()
    await answer.wait_done()
    once = events_of((await other.send("GET", f"/v1/streams/{request_id}").wait_done()).content)
    assert len(once) < reply_stream.MAX_PENDING_PIECES + 2, "its pieces were merged"
    await check_resumed_events(other, request_id, once, step=60)
    slow = {number for number, _ in once if number is not None}
    for at in (1, 100, 255, 256, 257, 400):  # positions of readers that were fast
        rest = await other.send("GET", f"/v1/streams/{request_id}?from={at}").wait_done()
        assert min(n for n, _ in events_of(rest.content) if n is not None) > at
        text = whole_of([content for _, content in events_of(rest.content)]).text
        assert whole_of([content for _, content in once]).text.endswith(text)
    assert max(slow) > 3 * reply_stream.MAX_PENDING_PIECES


@scenario_test
async def test_choices_of_a_stopping_gateway_resume_at_the_positions_that_it_names(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_stream, "MAX_PENDING_PIECES", SMALL_BOUND)
    harness = await GatewayHarness.with_card(world, drain_grace_s=1.0)
    other = await GatewayHarness.open(world, "g2")
    await other.register_and_wait()
    answer = harness.chat("hello", stream=True, n=2)
    requests = await harness.published(2)
    writers = [AnswerWriter(world, r.id, tokens, 40) for r in requests]
    for writer in writers:
        writer.write(25)
    await world.sleep(1)
    await harness.gateway.stop()
    await answer.wait_done()
    error = json.loads(answer.content.decode().split("data: ")[-2])["error"]
    assert error["code"] == "stopping"
    (way,) = re.findall(r"/v1/streams/\S+?from=[\d,]+", error["message"])
    for writer in writers:
        writer.write()
    rest = await other.send("GET", way).wait_done()
    whole = await other.send("GET", way.partition("?")[0]).wait_done()
    for number in range(2):
        sent, got, due = [
            whole_of(
                [
                    content_of_choice(choice)
                    for event in events
                    for choice in event["choices"]
                    if choice["index"] == number
                ]
            )
            for events in (answer.events[:-2], rest.events[:-1], whole.events[:-1])
        ]
        assert sent + got == due


@pytest.mark.parametrize("end", ["with text", "without text", "of a router"])
@scenario_test
async def test_reader_of_all_text_gets_the_finish_reason(world: MemoryWorld, end: str) -> None:
    """Its position does not show whether it has the last event."""
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat("hello", {"x-kvlane-detach": "true"}, stream=True)
    (request,) = await harness.published()
    worker = Worker(world, request.id)
    worker.write("he")
    worker.write("llo", "stop" if end == "with text" else None)
    if end == "without text":
        worker.write("", "stop")
    elif end == "of a router":
        worker.append(End(id=request.id, code="stop"))
    await answer.wait_done()
    client = await connect(world)
    for position in (5, 4, 2):
        url = f"/v1/streams/{request.id}?from={position}"
        rest = await harness.send("GET", url).wait_done()
        (*_, last, done) = rest.events
        assert (rest.status, rest.text, done) == (200, "" if position == 5 else "llo", "[DONE]")
        assert last["choices"][0]["finish_reason"] == "stop"
        *_, piece = await read(client, request.id, position)
        assert piece.code == "stop" if isinstance(piece, End) else piece.finish_reason == "stop"
    beyond = await harness.send("GET", f"/v1/streams/{request.id}?from=6").wait_done()
    assert "ended at position 5" in beyond.error["message"]
    with pytest.raises(BeyondEnd, match="position 5"):
        await read(client, request.id, 6)


def log_probs_of(content: bytes) -> list[tuple[list[int] | None, list[Any]]]:
    """The positions of the events, and the log probabilities of each."""
    got = []
    for block in content.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and line[0] != ":")
        if lines.get("data", "[DONE]") == "[DONE]":
            continue
        ids = [int(n) for n in lines["id"].split(",")] if "id" in lines else None
        for choice in json.loads(lines["data"])["choices"]:
            found = choice["logprobs"] or {}
            rows = found.get("content") or list(zip(*found.values(), strict=True))
            got.append((ids, [(choice["index"], row) for row in rows]))
    return got


@pytest.mark.parametrize("form", ["chat", "completion"])
@scenario_test
async def test_rest_of_an_answer_has_its_log_probabilities(world: MemoryWorld, form: str) -> None:
    harness = await GatewayHarness.with_card(world)
    other = await GatewayHarness.open(world, "g2")
    await other.register_and_wait()
    asked = {"stream": True, "n": 2}
    if form == "chat":
        answer = harness.chat("hello", logprobs=True, top_logprobs=1, **asked)
    else:
        answer = harness.complete("hello", logprobs=1, **asked)
    requests = await harness.published(2)
    for request in requests:
        AnswerWriter(world, request.id, log_probs, 7).write()
    await answer.wait_done()
    got = log_probs_of(answer.content)
    whole = [row for _, rows in got for row in rows]
    assert len(whole) == 12
    url = f"/v1/streams/{','.join(request.id for request in requests)}?form={form}"
    for place, (ids, _) in enumerate(got):
        if ids is None:
            continue
        seen = [row for _, rows in got[: place + 1] for row in rows]
        headers = {"Last-Event-ID": ",".join(map(str, ids))}
        rest = await other.send("GET", url, headers=headers).wait_done()
        rest_rows = [row for _, rows in log_probs_of(rest.content) for row in rows]
        assert sorted(map(str, seen + rest_rows)) == sorted(map(str, whole)), f"after {ids}"


@scenario_test
async def test_log_probabilities_for_an_alias_of_a_model_name_have_token_ids(
    world: MemoryWorld,
) -> None:
    """The log of an answer has the name that was asked for: the model is not known."""
    harness = await GatewayHarness.with_card(world)
    answer = harness.chat("hello", logprobs=True, stream=True)
    (request,) = await harness.published(1)
    AnswerWriter(world, request.id, log_probs, 3).write()
    await answer.wait_done()
    world.append(REGISTRY, 0, parse_alias("demo=demo-2"), key="alias/demo")
    await world.sleep(0.5)
    rest = await harness.send("GET", f"/v1/streams/{request.id}?from=0").wait_done()
    rows = [row for _, rows in log_probs_of(rest.content) for _, row in rows]
    assert [row["token"] for row in rows] == ["token_id:0", "token_id:1"]


# --- clients of Kafka -----------------------------------------------------------------------------


async def pieces_from(
    client: Client, request_id: str, position: int = 0
) -> list[tuple[int, Content, int]]:
    """The pieces from a position on: the position after each, its content, its tokens."""
    got = []
    reading = Position()
    async with aclosing(client.stream(request_id, from_token=position)) as pieces:
        async for piece in pieces:
            assert isinstance(piece, Chunk)
            assert piece.log_probs is None or len(piece.log_probs) == len(piece.token_ids)
            content = whole_of(
                [content_of(piece.text, {}, piece.finish_reason)]
                + [content_of("", item.delta, None) for item in piece.data]
            )
            got.append((reading.pass_over(piece), content, len(pack_tokens(piece.token_ids)) // 4))
    return got


@pytest.mark.parametrize("kind", KINDS)
@scenario_test
async def test_client_gets_the_rest_behind_every_position_of_its_pieces(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch, kind: Callable[[int, random.Random], Part]
) -> None:
    monkeypatch.setattr(reply_stream, "MAX_PENDING_PIECES", 1000)
    client = await connect(world)
    AnswerWriter(world, "job-17", kind, 8 * SMALL_BOUND).write()
    unmerged = await pieces_from(client, "job-17")
    monkeypatch.setattr(reply_stream, "MAX_PENDING_PIECES", SMALL_BOUND)
    merged = await pieces_from(client, "job-17")
    assert len(merged) < len(unmerged) or kind is mixed
    for got in (unmerged, merged):
        whole, count = whole_of([content for _, content, _ in got]), sum(n for *_, n in got)
        seen, seen_tokens = Content(), 0
        for position, content, size in got:
            seen, seen_tokens = seen + content, seen_tokens + size
            rest = await pieces_from(client, "job-17", position)
            assert seen + whole_of([content for _, content, _ in rest]) == whole, position
            assert seen_tokens + sum(n for *_, n in rest) == count, position


@scenario_test
async def test_client_that_subscribed_before_gets_the_rest_only(world: MemoryWorld) -> None:
    """Its pieces were merged while no task took them."""
    client = await connect(world)
    request_id = await publish(client)
    chunks = 3 * reply_stream.MAX_PENDING_PIECES
    AnswerWriter(world, request_id, log_probs, chunks).write()
    await world.sleep(1)
    rest = await pieces_from(client, request_id, 300)
    expected = "".join(f"{n} " for n in range(300, chunks - 1)) + "held back"
    assert whole_of([content for _, content, _ in rest]).text == expected
