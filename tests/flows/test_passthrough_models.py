"""Tests of passthrough models: bodies from OpenAI's client to a server, and answers back
unchanged.

Everything is real but the servers, which say what the test says, and the log, which is in memory;
one test has a real Kafka. Time is real, since sockets know no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from kvlane.app.audit.timeline import explain_request
from kvlane.app.engine.attached.passthrough_engine import BodyKind, PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.worker import Worker
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import AnyRecord, decode
from kvlane.streams.kafka import provision
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Log
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Chunk, Fence, Finished, Heartbeat
from kvlane.streams.request import Request
from kvlane.streams.topics import KV_EVENTS, LEDGER, REQUESTS, RESPONSES
from tests.harness.http_harness import WAIT_S, Connect, HttpHarness, connect_to, until
from tests.harness.model_servers import (
    CloseConnection,
    ScriptedServer,
    ServerExchange,
    chat_event,
    usage_event,
)
from tests.harness.topic_cleanup import delete_topics

LANES = 2
NOWHERE = "/dev/null/cache"
SENDS_JSON = {"content-type": "application/json"}
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LOOK = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
THOUGHTFUL = [
    chat_event({"role": "assistant", "content": ""}),
    chat_event({"reasoning_content": "Let me "}),
    chat_event({"reasoning_content": "see."}),
    chat_event({"content": "One "}),
    chat_event({"content": "moment."}),
    chat_event({"tool_calls": [{"index": 0, "id": "call-1", "type": "function",
                          "function": {"name": "look", "arguments": ""}}]}),
    chat_event({"tool_calls": [{"index": 0, "function": {"arguments": '{"at"'}}]}),
    chat_event({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
    chat_event({}, finish_reason="tool_calls") | {"system_fingerprint": "fp"},
    usage_event(9, 7, completion_tokens_details={"reasoning_tokens": 2}),
]  # fmt: skip
"""An answer with everything in it."""
PLAIN = [
    chat_event({"content": "Good "}),
    chat_event({"content": "day."}),
    chat_event({}, finish_reason="stop"),
]


async def hangs_up(_: ServerExchange) -> None:
    await asyncio.sleep(0.05)
    raise CloseConnection


class PassthroughDeployment(HttpHarness):
    """With a preprocessor, and workers beside servers; clients of both ways."""

    memory: MemoryBroker | None = None

    def __init__(self, connect: Connect, **over: Any) -> None:
        super().__init__(
            connect, worker_id="-", router_id="r", lanes=LANES, cache_dir=NOWHERE,
            heartbeat_interval_s=0.2, worker_timeout_s=20, **over,
        )  # fmt: skip
        self.workers: list[Worker] = []

    async def open(self) -> None:
        self._preprocessor = Preprocessor(
            *await self.process_arguments("preprocessor"), InlinePool()
        )
        await self._preprocessor.start()
        await super().open()
        self.http = httpx.AsyncClient(base_url=self.gateway.url, timeout=WAIT_S)
        self.log = await self._connect("test")
        self.client = Client(self.log, SystemClock())
        await self.client.start()

    async def hire(self, server: ScriptedServer, kind: BodyKind = "chat", model: str = "m") -> None:
        where = ServerAddress(server.url, read_timeout_s=2.0, start_timeout_s=5.0)

        def make(ctx: ProcessContext) -> ValidatingEngine:
            return ValidatingEngine(PassthroughEngine(ctx.clock, where, kind, served_name=model))

        self.workers.append(await self.start_worker(f"w{len(self.workers)}", make))
        served = self.gateway.parts.served_models
        await until(lambda: served.aliases.kind(model) == kind)

    async def close(self) -> None:
        await self.client.close()
        await self.http.aclose()
        await self._preprocessor.stop()
        await super().close()

    async def records(self, topic: str, kind: type[AnyRecord]) -> list[Any]:
        found = []
        for lane in range(await self.log.partitions(topic)):
            assert isinstance(self.memory, MemoryBroker)
            found += [decode(r) for r in self.memory.records(topic, lane)]
        return [r for r in found if isinstance(r, kind)]

    async def finished(self, count: int) -> list[Finished]:
        """The reports of so many runs, which come after the last Chunk of each."""
        while len(found := await self.records(LEDGER, Finished)) < count:  # noqa: ASYNC110 - a log has no bell
            await asyncio.sleep(0.01)
        return found


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        server.events = list(THOUGHTFUL)
        yield server


@pytest.fixture
async def empty() -> AsyncIterator[PassthroughDeployment]:
    """Nobody works there yet."""
    broker = MemoryBroker(SystemClock(), lanes=LANES)
    cluster = PassthroughDeployment(connect_to(broker))
    cluster.memory = broker
    await cluster.open()
    yield cluster
    await cluster.close()


@pytest.fixture
async def cluster(empty: PassthroughDeployment, server: ScriptedServer) -> PassthroughDeployment:
    await empty.hire(server)
    return empty


def together(chunks: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream."""
    seen: dict[str, Any] = {"reasoning": "", "text": "", "arguments": "", "calls": []}
    for chunk in chunks:
        seen["usage"] = chunk.usage or seen.get("usage")
        for choice in chunk.choices:
            seen["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            seen["text"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                seen["calls"] += [(call.id, call.function.name)] if call.id else []
                seen["arguments"] += call.function.arguments or ""
            seen["finish"] = choice.finish_reason or seen.get("finish")
    return seen


# --- there ----------------------------------------------------------------------------------------


async def test_server_receives_the_body_unchanged(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, picture]}],
        "tools": [TOOL], "tool_choice": "required", "temperature": 3.5, "seed": 7,
        "max_completion_tokens": 40, "reasoning_effort": "low", "of_theirs": {"deep": [1, None]},
    }  # fmt: skip
    ours = {"model": "m", "nvext": {"agent_hints": {"osl": 5}}, "stream": False, "n": 1}
    assert (await cluster.http.post("/v1/chat/completions", json=body | ours)).status_code == 200
    (sent,) = server.bodies
    theirs = {"model": "theirs", "stream": True, "stream_options": {"include_usage": True}}
    assert sent == body | theirs
    (request,) = await cluster.records(REQUESTS, Request)
    assert request.hints.expected_output_tokens == 5
    assert request.stop.max_tokens == 40


async def test_several_answers_are_several_requests_with_seeds_of_their_own(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    server.events = [*PLAIN, usage_event(9, 2, completion_tokens_details={"reasoning_tokens": 2})]
    answer = await cluster.openai.chat.completions.create(model="m", n=3, seed=7, **HELLO)
    assert [choice.message.content for choice in answer.choices] == ["Good day."] * 3
    assert sorted(body["seed"] for body in server.bodies) == [7, 8, 9]
    assert not any("n" in body for body in server.bodies)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 6)


async def test_each_prompt_of_a_completion_is_a_request(empty: PassthroughDeployment) -> None:
    async with ScriptedServer("completion") as server:
        server.events = [
            chat_event(text="so "),
            chat_event(text="be it"),
            chat_event(text="", finish_reason="stop"),
        ]
        await empty.hire(server, "completion")
        answer = await empty.openai.completions.create(model="m", prompt=["a", "b"], max_tokens=9)
        assert [choice.text for choice in answer.choices] == ["so be it"] * 2
        assert sorted(body["prompt"] for body in server.bodies) == ["a", "b"]
        await empty.openai.completions.create(model="m", prompt=[[1, 2]], max_tokens=9)
        assert server.bodies[-1]["prompt"] == [[1, 2]]


async def test_model_serves_its_endpoint_only(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    with pytest.raises(openai.BadRequestError, match="is for chat requests") as refused:
        await cluster.openai.completions.create(model="m", prompt="a")
    assert refused.value.code == "model_not_supported"
    with pytest.raises(openai.NotFoundError):
        await cluster.openai.chat.completions.create(model="another", **HELLO)
    for kind, body in (("completion", {"prompt": "a"}), ("tokens", {"token_ids": [1]})):
        name = await cluster.client.publish(Prompt(id=f"k-{kind}", kind=kind, body=body))
        answer = await cluster.client.result(name, WAIT_S)
        assert (answer.code, "is for chat requests" in answer.message) == ("invalid", True)
    assert not server.bodies


async def test_passthrough_model_keeps_its_api_while_its_workers_are_away(
    cluster: PassthroughDeployment,
) -> None:
    await cluster.workers[0].stop()
    served = cluster.gateway.parts.served_models
    await until(lambda: not served.models())
    body = {"model": "m", "of_theirs": 1, "top_k": "many"} | HELLO
    answer = await cluster.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")


async def test_deeply_nested_body_is_refused(cluster: PassthroughDeployment) -> None:
    codes = set()
    for depth in range(800, 1000, 4):
        body = json.dumps({"model": "m"} | HELLO)[:-1] + ',"deep":' + "[" * depth + "]" * depth
        answer = await cluster.http.post(
            "/v1/chat/completions", content=body + "}", headers=SENDS_JSON
        )
        codes.add(answer.status_code)
    assert codes <= {200, 400}
    assert 400 in codes


async def test_refusal_by_the_server_keeps_its_message(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    async def refuses(x: ServerExchange) -> None:
        await x.answer({"error": {"message": "messages: too many of them"}}, 400)

    server.handlers[server.path] = refuses
    with pytest.raises(openai.BadRequestError, match="messages: too many of them"):
        await cluster.openai.chat.completions.create(model="m", **HELLO)


async def test_refusal_in_a_stream_keeps_status_and_message_and_is_asked_for_once(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    error = {"message": "prompt is too long", "type": "invalid_request_error", "code": "422"}
    for before in ([], PLAIN[:2]):
        server.events = [*before, {"error": error}]
        answer = await cluster.http.post("/v1/chat/completions", json={"model": "m"} | HELLO)
        assert answer.status_code == 422
        assert answer.json()["error"]["message"] == "prompt is too long"
    assert len(server.bodies) == 2


@pytest.mark.parametrize("before", [[], PLAIN[:2]], ids=["at_once", "in_the_middle"])
async def test_failure_of_a_server_is_named_in_the_final_error(
    empty: PassthroughDeployment, server: ScriptedServer, before: list[Any]
) -> None:
    for _ in range(2):
        await empty.hire(server)
    server.events = [*before, {"error": {"message": "core died", "code": "internal_error"}}]
    answer = await empty.http.post("/v1/chat/completions", json={"model": "m"} | HELLO)
    assert answer.status_code == 500
    assert "the server answered 500: core died" in answer.json()["error"]["message"]
    assert (len(server.bodies) == 1) == bool(before)


async def test_counts_that_no_server_reports_are_in_no_response_stream_or_result(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    server.events = list(PLAIN)
    body = {"model": "m"} | HELLO
    assert "usage" not in (await cluster.http.post("/v1/chat/completions", json=body)).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    events = (await cluster.http.post("/v1/chat/completions", json=streamed)).text
    assert "prompt_tokens" not in events
    assert events.rstrip().endswith("data: [DONE]")
    server.events = [*PLAIN, {"choices": [], "usage": {"completion_tokens": 2}}]
    usage = (await cluster.http.post("/v1/chat/completions", json=body)).json()["usage"]
    assert usage == {"completion_tokens": 2}
    await cluster.finished(3)
    page = cluster.workers[0]._metrics.page
    while b'kvlane_worker_runs_total{code="stop",model="m"} 3.0' not in await page():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert b'kvlane_worker_output_tokens_total{model="m"} 2.0' in await page()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 0}, "n"), ({"stream": 3}, "stream"), ({"seed": "x"}, "seed"), ({"n": 500}, "n"),
        ({"stream_options": {}}, "stream_options"), ({"nvext": {"dp_rank": "a"}}, "nvext.dp_rank"),
        ({"nvext": {"token_data": [1]}}, "nvext.token_data"),
    ],
)  # fmt: skip
async def test_fields_of_kvlane_are_validated_before_the_server_gets_the_body(
    cluster: PassthroughDeployment, server: ScriptedServer, body: dict[str, Any], field: str
) -> None:
    answer = await cluster.http.post("/v1/chat/completions", json={"model": "m"} | HELLO | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not server.bodies


# --- and back -------------------------------------------------------------------------------------


async def test_stream_has_all_fields_of_the_server(cluster: PassthroughDeployment) -> None:
    stream = await cluster.openai.chat.completions.create(
        model="m", stream=True, stream_options={"include_usage": True}, tools=[TOOL], **HELLO
    )
    chunks = [chunk async for chunk in stream]
    seen = together(chunks)
    assert (seen["reasoning"], seen["text"]) == ("Let me see.", "One moment.")
    assert (seen["calls"], seen["arguments"]) == ([("call-1", "look")], '{"at":1}')
    assert seen["finish"] == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.model for chunk in chunks} == {"m"}
    assert "fp" in {chunk.system_fingerprint for chunk in chunks}
    assert (seen["usage"].prompt_tokens, seen["usage"].completion_tokens) == (9, 7)
    assert seen["usage"].completion_tokens_details.reasoning_tokens == 2


async def test_complete_response_has_all_fields_of_the_server(
    cluster: PassthroughDeployment,
) -> None:
    answer = await cluster.openai.chat.completions.create(model="m", tools=[TOOL], **HELLO)
    (choice,) = answer.choices
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == "Let me see."
    assert [call.model_dump(exclude_none=True) for call in choice.message.tool_calls] == [LOOK]
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.total_tokens == 16
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
    assert answer.system_fingerprint == "fp"


async def test_call_without_text_has_no_content(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    server.events = [e for e in THOUGHTFUL if "content" not in json.dumps(e)]
    answer = await cluster.openai.chat.completions.create(model="m", **HELLO)
    assert answer.choices[0].message.content is None
    assert len(answer.choices[0].message.tool_calls) == 1


async def test_log_probabilities_are_the_servers(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    def likely(token: str) -> dict[str, Any]:
        at = {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}
        return {"content": [at], "refusal": None}

    server.events = [
        chat_event({"content": "a"}, logprobs=likely("a")),
        chat_event({"content": "b"}, logprobs=likely("b")),
        chat_event({}, finish_reason="stop"),
    ]
    answer = await cluster.openai.chat.completions.create(model="m", logprobs=True, **HELLO)
    assert [at.token for at in answer.choices[0].logprobs.content] == ["a", "b"]
    assert server.bodies[0]["logprobs"] is True


async def test_prompt_on_kafka_is_answered_in_text_and_other_fields(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    body = {"model": "m", "stop": "x" * 2000} | HELLO
    prompt = Prompt(id=cluster.client.new_request_id(), body=body)
    await cluster.client.publish(prompt)
    answer = await cluster.client.result(prompt.id, WAIT_S)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("One moment.", (), "tool_calls")
    reasoning = [
        a.delta["reasoning_content"] for a in answer.data if "reasoning_content" in a.delta
    ]
    assert "".join(reasoning) == "Let me see."
    assert [a.at for a in answer.data] == sorted(a.at for a in answer.data)
    assert server.bodies[0]["stop"] == "x" * 2000
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 9
    await cluster.client.publish(prompt, subscribe=False)
    other = Prompt(id=cluster.client.new_request_id(), body=body)
    await cluster.client.publish(other)
    await cluster.client.result(other.id, WAIT_S)
    assert len(server.bodies) == 2, "an id is asked once"


async def test_stream_resumes_after_the_received_position(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    headers = {"x-kvlane-detach": "true"}
    body = {"model": "m", "stream": True} | HELLO
    whole = await cluster.http.post("/v1/chat/completions", json=body, headers=headers)
    events = [e for e in whole.text.split("\n\n") if e.startswith("id: ")]
    positions = [int(e.split("\n")[0][4:]) for e in events]
    assert positions == sorted(positions)
    assert len(set(positions)) >= len(positions) - 1, "only the end may bring nothing"
    url = f"/v1/streams/{whole.headers['x-kvlane-id']}"
    for number, position in enumerate(positions[:-1]):
        rest = await cluster.http.get(url, headers={"last-event-id": str(position)})
        got = [e.split("\n")[1] for e in rest.text.split("\n\n") if e.startswith("id: ")]
        wanted = [e.split("\n")[1] for e in events[number + 1 :]]
        assert [deltas(e) for e in got] == [deltas(e) for e in wanted]
    assert len(server.bodies) == 1


def deltas(event: str) -> Any:
    return json.loads(event.removeprefix("data: "))["choices"][0]["delta"]


# --- embeddings -----------------------------------------------------------------------------------


def embedded(*vectors: Any) -> Callable[[ServerExchange], Awaitable[None]]:
    async def answer(x: ServerExchange) -> None:
        data = [
            {"object": "embedding", "index": n, "embedding": each} for n, each in enumerate(vectors)
        ]
        counts = {"prompt_tokens": 7, "total_tokens": 7}
        await x.answer({"object": "list", "model": "theirs", "data": data, "usage": counts})

    return answer


@pytest.fixture
async def embedder(empty: PassthroughDeployment) -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer("embedding") as server:
        server.handlers[server.path] = embedded([0.5, -1.25], [2.0, 0.1])
        await empty.hire(server, "embedding")
        yield server


async def test_embeddings_come_back_as_they_are(
    empty: PassthroughDeployment, embedder: ScriptedServer
) -> None:
    answer = await empty.openai.embeddings.create(
        model="m", input=["one", "two"], encoding_format="float", dimensions=2
    )
    assert [each.embedding for each in answer.data] == [[0.5, -1.25], [2.0, 0.1]]
    assert answer.usage.model_dump() == {"prompt_tokens": 7, "total_tokens": 7}
    assert (answer.model, answer.usage.prompt_tokens) == ("m", 7)
    sent = {"input": ["one", "two"], "encoding_format": "float", "dimensions": 2}
    assert embedder.received_bodies(embedder.path)[-1] == sent | {"model": "theirs"}
    prompt = Prompt(id="e", kind="embedding", body={"model": "m", "input": "one"})
    await empty.client.publish(prompt)
    got = await empty.client.result("e", WAIT_S)
    (aside,) = got.data
    assert [each["embedding"] for each in aside.event["data"]] == [[0.5, -1.25], [2.0, 0.1]]
    assert (got.text, got.finish_reason) == ("", "stop")
    assert {f.output_tokens for f in await empty.finished(2)} == {0}


async def test_embeddings_larger_than_a_batch_come_whole_and_larger_than_a_record_not_at_all(
    empty: PassthroughDeployment, embedder: ScriptedServer
) -> None:
    large = [0.123456789] * 200_000
    embedder.handlers[embedder.path] = embedded(large)
    answer = await empty.openai.embeddings.create(model="m", input="a", encoding_format="float")
    assert answer.data[0].embedding == large
    embedder.handlers[embedder.path] = embedded(large, large, large)
    with pytest.raises(openai.BadRequestError, match="fewer texts per request"):
        await empty.openai.embeddings.create(model="m", input="a", encoding_format="float")


async def test_embeddings_are_served_by_embedding_models_only(
    cluster: PassthroughDeployment,
) -> None:
    async with ScriptedServer("embedding") as embedder:
        embedder.handlers[embedder.path] = embedded([0.5])
        await cluster.hire(embedder, "embedding", "e")
    with pytest.raises(openai.BadRequestError, match="is for chat requests"):
        await cluster.openai.embeddings.create(model="m", input="a")
    with pytest.raises(openai.BadRequestError, match="is for embedding requests"):
        await cluster.openai.chat.completions.create(model="e", **HELLO)
    with pytest.raises(openai.NotFoundError):
        await cluster.openai.embeddings.create(model="another", input="a")
    for wrong in ({"stream": True}, {"n": 2}):
        answer = await cluster.http.post(
            "/v1/embeddings", json={"model": "e", "input": "a"} | wrong
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))


async def talks_nonsense(x: ServerExchange) -> None:
    await x.answer({"data": "none"})


async def test_failure_of_embeddings_is_named_and_missing_counts_are_absent(
    empty: PassthroughDeployment, embedder: ScriptedServer
) -> None:
    async def proxied(x: ServerExchange) -> None:
        await x.answer(b"upstream connect error")

    async def uncounted(x: ServerExchange) -> None:
        await x.answer({"object": "list", "data": [{"index": 0, "embedding": [1.0]}]})

    body = {"model": "m", "input": "a"}
    embedder.handlers[embedder.path] = proxied
    failed = await empty.http.post("/v1/embeddings", json=body)
    assert failed.status_code == 500
    assert "upstream connect error" in failed.json()["error"]["message"]
    embedder.handlers[embedder.path] = uncounted
    assert "usage" not in (await empty.http.post("/v1/embeddings", json=body)).json()


@pytest.mark.parametrize("handler", [hangs_up, talks_nonsense])
async def test_embeddings_that_fail_end_with_an_error(
    empty: PassthroughDeployment,
    embedder: ScriptedServer,
    handler: Callable[[ServerExchange], Awaitable[None]],
) -> None:
    embedder.handlers[embedder.path] = handler
    with pytest.raises(openai.InternalServerError):
        await empty.openai.embeddings.create(model="m", input="a")


# --- what can go wrong ----------------------------------------------------------------------------


async def test_answer_that_breaks_after_its_start_ends_with_an_error(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    async with ScriptedServer() as other:
        await cluster.hire(other)
        for begun in (
            chat_event({"content": "One "}),
            chat_event({"reasoning_content": "Let me "}),
        ):
            server.events = other.events = [begun, hangs_up]
            stream = await cluster.openai.chat.completions.create(model="m", stream=True, **HELLO)
            with pytest.raises(openai.APIError, match="no token ids to continue from") as failed:
                async for _ in stream:
                    pass
            assert failed.value.code == "lost"
        assert len(server.bodies) + len(other.bodies) == 2


async def test_answer_that_fails_before_its_first_text_is_retried_elsewhere(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    async with ScriptedServer() as other:
        await cluster.hire(other)
        role = chat_event({"role": "assistant", "content": ""}) | {"system_fingerprint": "fp"}
        server.events, other.events = [role, hangs_up], PLAIN
        for _ in range(6):  # until the first one was tried, too
            answer = await cluster.openai.chat.completions.create(model="m", **HELLO)
            assert answer.choices[0].message.content == "Good day."
            if server.bodies:
                break
        assert server.bodies
        fences = await cluster.records(RESPONSES, Fence)
        assert fences


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_busy_server_gets_the_request_again_until_it_accepts(
    cluster: PassthroughDeployment, server: ScriptedServer, status: int
) -> None:
    sent, answer = 0, server.handlers[server.path]

    async def is_full(x: ServerExchange) -> None:
        nonlocal sent
        sent += 1
        await (answer(x) if sent > 4 else x.answer({"error": {"message": "busy"}}, status))

    server.handlers[server.path], server.events = is_full, PLAIN
    got = await cluster.openai.chat.completions.create(model="m", **HELLO)
    assert got.choices[0].message.content == "Good day."
    codes = [finished.code for finished in await cluster.records(LEDGER, Finished)]
    assert codes[:4] == ["worker_full"] * 4


async def test_worker_that_dies_before_the_first_text_is_replaced(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    async def waits(x: ServerExchange) -> None:
        await x.wait_closed()

    server.events = [waits]
    sending = asyncio.create_task(cluster.openai.chat.completions.create(model="m", **HELLO))
    await until(lambda: bool(server.bodies))
    async with ScriptedServer() as other:
        other.events = PLAIN
        await cluster.hire(other)
        await cluster.workers[0].stop()
        assert (await sending).choices[0].message.content == "Good day."


async def test_client_that_disconnects_ends_the_answer_at_the_server(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    left = asyncio.Event()

    async def waits(x: ServerExchange) -> None:
        await x.wait_closed()
        left.set()
        raise CloseConnection

    server.events = [chat_event({"content": "One "}), waits]
    stream = await cluster.openai.chat.completions.create(model="m", stream=True, **HELLO)
    await anext(aiter(stream))
    await stream.close()
    async with asyncio.timeout(WAIT_S):
        await left.wait()


async def test_request_past_its_deadline_ends(
    cluster: PassthroughDeployment, server: ScriptedServer
) -> None:
    async def waits(x: ServerExchange) -> None:
        await x.wait_closed()

    server.events = [chat_event({"content": "One "}), waits]
    prompt = Prompt(id="late", body={"model": "m"} | HELLO, deadline_s=0.5)
    await cluster.client.publish(prompt)
    answer = await cluster.client.result(prompt.id, WAIT_S)
    assert answer.code == "deadline"


# --- what is known of it --------------------------------------------------------------------------


async def test_timeline_contains_no_text(cluster: PassthroughDeployment) -> None:
    answer = await cluster.openai.chat.completions.create(model="m", tools=[TOOL], **HELLO)
    timeline = await explain_request(cluster.log, SystemClock(), answer.id)
    steps = {step.name: step.fields for step in timeline.steps}
    assert steps["Request"]["kind"] == "chat"
    assert steps["Request"]["prompt_tokens"] == steps["Assigned"]["prompt_tokens"] > 0
    assert steps["Shown"]["chars"] == len("One moment.")
    assert steps["Finished"]["output_tokens"] > 0
    assert timeline.ending == "tool_calls"
    got = repr(timeline)
    assert "hello" not in got
    assert "Let me" not in got


async def test_passthrough_times_and_tokens_are_in_the_metrics(
    cluster: PassthroughDeployment,
) -> None:
    await cluster.openai.chat.completions.create(model="m", tools=[TOOL], **HELLO)
    page = (await cluster.http.get("/metrics")).text.splitlines()
    assert "kvlane_gateway_time_to_first_token_seconds_count 1.0" in page
    assert "kvlane_gateway_output_tokens_sum 7.0" in page


async def test_passthrough_load_is_counted_by_the_size_of_its_body(
    cluster: PassthroughDeployment,
) -> None:
    for words in (10, 1000):
        await cluster.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "word " * words}]
        )
    small, large = sorted(r.prompt_tokens for r in await cluster.records(REQUESTS, Request))
    assert small < 40
    assert 1250 <= large < 1300
    finished = await cluster.finished(2)
    assert [f.code for f in finished] == ["stop", "stop"]
    chunks = await cluster.records(RESPONSES, Chunk)
    assert not any(chunk.token_ids for chunk in chunks)
    assert await cluster.records(KV_EVENTS, Heartbeat)


async def test_model_is_listed_with_its_context(cluster: PassthroughDeployment) -> None:
    (model,) = (await cluster.openai.models.list()).data
    assert (model.id, model.max_model_len) == ("m", 4096)


# --- on a real Kafka ------------------------------------------------------------------------------


@pytest.mark.slow
async def test_both_response_forms_have_all_fields_on_a_real_kafka(
    kafka: Broker, topic_prefix: str, server: ScriptedServer
) -> None:
    where = {
        "bootstrap_servers": kafka.bootstrap_servers,
        "topic_prefix": topic_prefix,
        "hash_secret": "tests",  # the broker may be remote
    }
    settings = Settings(worker_id="-", router_id="-", **where)
    async with contextlib.AsyncExitStack() as stack:

        async def connect(name: str) -> Log:
            log = KafkaLog(settings.kafka_connection(name), prefix=topic_prefix)
            await log.start()
            stack.push_async_callback(log.close)
            return log

        setup = await connect("setup")
        assert isinstance(setup, KafkaLog)
        await provision.create_topics(setup, lanes=LANES, replication=1, min_insync=1)
        cluster = PassthroughDeployment(connect, **where)
        await cluster.open()
        await cluster.hire(server)
        answer = await cluster.openai.chat.completions.create(model="m", tools=[TOOL], **HELLO)
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == ("One moment.", "Let me see.")
        assert message.tool_calls[0].function.arguments == '{"at":1}'
        prompt = Prompt(id=cluster.client.new_request_id(), body={"model": "m"} | HELLO)
        await cluster.client.publish(prompt)
        got = await cluster.client.result(prompt.id, WAIT_S)
        assert (got.text, got.finish_reason) == ("One moment.", "tool_calls")
        assert any("tool_calls" in aside.delta for aside in got.data)
        await cluster.close()
    await delete_topics(kafka.bootstrap_servers, topic_prefix)
