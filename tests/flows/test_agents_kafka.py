"""Tests of agents on a real Kafka: each answer arrives once and whole, though its worker or its
gateway is killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import httpx2
import openai
import pytest

from examples.reattaching_client import ReattachingTransport
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.standalone import StandaloneProcess
from kvlane.streams.brokers.broker_factory import Broker
from tests.harness.agent_deployment import LANES, SCRIPT, WEATHER, AgentDeployment, agent_deployment
from tests.harness.kafka_processes import WAIT_S, provisioned
from tests.harness.key_files import auth_headers

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "agent_script.json"
BEGUN_EVENTS = 12
"""Events of a stream after which its worker or gateway may be killed."""
CHOSEN: dict[str, dict[str, Any]] = {
    "chat": {"weather": {"type": "function", "function": {"name": "weather"}}},
    "response": {"weather": {"type": "function", "name": "weather"}},
}
"""The choice of a function by its name."""
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["city", "days"],
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "object"}},
    },
}  # fmt: skip

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """What a client asks for. Choices are OpenAI's, or the name of a function; several answers, and
    a regular expression for them, can be asked for in chats alone."""

    question: str
    choice: str = "auto"
    is_parallel: bool = True
    stream: bool = True
    is_strict: bool = False
    n: int = 1
    model: str = "demo"
    worker: str = ""

    @property
    def nvext(self) -> dict[str, str]:
        return {"backend_instance_id": self.worker} if self.worker else {}

    @property
    def forms(self) -> tuple[str, ...]:
        return ("chat",) if self.n > 1 or self.question == "regex" else tuple(FORMS)


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


class Answer(NamedTuple):
    content: str
    reasoning: str
    calls: tuple[Call, ...]
    reason: str


CASES = (
    Case("one"), Case("two"), Case("two", is_parallel=False), Case("one", "none"),
    Case("two", stream=False), Case("one", "weather"), Case("two", "required"),
    Case("two", is_strict=True), Case("json"), Case("json", stream=False), Case("regex"),
    Case("two", n=2), Case("json", n=2),
)  # fmt: skip
_KOELN, _NOW = Call("", "weather", '{"city": "Köln"}'), Call("", "now", "{}")
EXPECTED = {
    CASES[0]: Answer("I look at the weather first.\n", "The weather decides.", (_KOELN,), "calls"),
    CASES[1]: Answer("", "Both of them.", (_KOELN, _NOW), "calls"),
    CASES[2]: Answer("", "Both of them.", (_KOELN,), "calls"),
    CASES[3]: Answer(SCRIPT["one"], "", (), "stop"),
    CASES[4]: Answer("", "Both of them.", (_KOELN, _NOW), "calls"),
    CASES[5]: Answer("I look at the weather first.\n", "The weather decides.", (_KOELN,), "calls"),
    **dict.fromkeys(CASES[6:8], Answer("", "Both of them.", (_KOELN, _NOW), "calls")),
    **dict.fromkeys(CASES[8:10], Answer(WEATHER, "The week has days.", (), "stop")),
    CASES[10]: Answer("rain, " * 20, "It has some words.", (), "stop"),
    CASES[11]: Answer("", "Both of them.", (_KOELN, _NOW), "calls"),
    CASES[12]: Answer(WEATHER, "The week has days.", (), "stop"),
}


class Clients(NamedTuple):
    """The clients of a deployment, which reach its gateways in the same way."""

    ai: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic

    def with_key(self, key: str) -> Clients:
        """Clients with another key, which do not ask again."""
        each = {"api_key": key, "max_retries": 0}
        return Clients(self.ai.with_options(**each), self.claude.with_options(**each))


class Progress:
    """Counts the events of streams; `begun` once each stream is in the middle."""

    def __init__(self, streams: int) -> None:
        self._left = streams
        self.begun = asyncio.Event()

    def counter(self) -> Callable[[], None]:
        """To be called with each event of a stream."""
        events = 0

        def count() -> None:
            nonlocal events
            events += 1
            if events == BEGUN_EVENTS:
                self._left -= 1
                if not self._left:
                    self.begun.set()

        return count


Asked = tuple[str, list[Answer]]
"""The ids of the streams of a response, and its answers."""
Form = Callable[[Clients, Case, Callable[[], None]], Coroutine[Any, Any, Asked]]


async def chat(clients: Clients, case: Case, count: Callable[[], None]) -> Asked:
    tools = [
        {"type": "function", "function": {"name": name, "strict": case.is_strict}}
        for name in ("weather", "now")
    ]
    body: Any = {
        "model": case.model, "messages": [{"role": "user", "content": case.question}],
        "tools": tools, "extra_body": {"nvext": case.nvext},
        "tool_choice": CHOSEN["chat"].get(case.choice, case.choice), "stream": case.stream,
        "parallel_tool_calls": case.is_parallel, "n": case.n,
    }  # fmt: skip
    if case.question == "json":
        form = {"name": "weather", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if case.question == "regex":
        body["extra_body"]["guided_regex"] = "(rain, )+"
    found = await clients.ai.chat.completions.create(**body)
    if not case.stream:
        return found.id, answers_of_chat(found)
    names, ids = ("content", "reasoning_content", "reason"), set[str]()
    answers = [dict.fromkeys(names, "") for _ in range(case.n)]
    called: list[list[dict[str, str]]] = [[] for _ in answers]
    async for event in found:
        count()
        ids.add(event.id)
        for choice in event.choices:
            fields, calls = answers[choice.index], called[choice.index]
            for name, part in choice.delta.to_dict().items():
                if name in names:
                    fields[name] += str(part or "")
            fields["reason"] += choice.finish_reason or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    assert call.index == len(calls), "a call begins once"
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    assert len(ids) == 1
    return found.response.headers["x-kvlane-id"], [
        Answer(
            fields["content"], fields["reasoning_content"], tuple(Call(**call) for call in calls),
            fields["reason"].removeprefix("tool_"),
        )
        for fields, calls in zip(answers, called, strict=True)
    ]  # fmt: skip


def answers_of_chat(completion: Any) -> list[Answer]:
    return [
        Answer(
            choice.message.content or "", getattr(choice.message, "reasoning_content", None) or "",
            tuple(
                Call(call.id, call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            ),
            choice.finish_reason.removeprefix("tool_"),
        )
        for choice in completion.choices
    ]  # fmt: skip


async def message(clients: Clients, case: Case, count: Callable[[], None]) -> Asked:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "now")]
    kinds = {"required": "any", "weather": "tool"}
    choice: dict[str, Any] = {"type": kinds.get(case.choice, case.choice)}
    choice |= {"name": case.choice} if case.choice == "weather" else {}
    if case.choice == "auto":
        choice["disable_parallel_tool_use"] = not case.is_parallel
    body: Any = {
        "model": case.model, "max_tokens": 500, "tools": tools, "tool_choice": choice,
        "messages": [{"role": "user", "content": case.question}],
        "extra_body": {"nvext": case.nvext},
    }  # fmt: skip
    if case.question == "json":
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    if not case.stream:
        whole = await clients.claude.messages.create(**body)
        return whole.id, answers_of_message(whole)
    places = list[int]()
    async with clients.claude.messages.stream(**body) as stream:
        async for event in stream:
            count()
            if event.type == "content_block_start":
                places.append(event.index)
        whole = await stream.get_final_message()
    assert places == [*range(len(whole.content))], "a block begins once"
    return whole.id, answers_of_message(whole)


def answers_of_message(whole: Any) -> list[Answer]:
    blocks = whole.content
    answer = Answer(
        "".join(block.text for block in blocks if block.type == "text"),
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        tuple(
            Call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            for block in blocks if block.type == "tool_use"
        ),
        {"tool_use": "calls", "end_turn": "stop"}[whole.stop_reason],
    )  # fmt: skip
    return [answer]


async def response(clients: Clients, case: Case, count: Callable[[], None]) -> Asked:
    tools = [
        {"type": "function", "name": name, "parameters": None, "strict": case.is_strict}
        for name in ("weather", "now")
    ]
    body: Any = {
        "model": case.model, "input": case.question, "tools": tools, "stream": case.stream,
        "extra_body": {"nvext": case.nvext},
        "tool_choice": CHOSEN["response"].get(case.choice, case.choice),
        "parallel_tool_calls": case.is_parallel,
    }  # fmt: skip
    if case.question == "json":
        form = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
        body["text"] = {"format": form}
    found = await clients.ai.responses.create(**body)
    if not case.stream:
        return found.id, answers_of_response(found)
    numbers = list[int]()
    async for event in found:
        count()
        numbers.append(event.sequence_number)
    assert numbers == sorted(set(numbers)), "an event comes once"
    return event.response.id, answers_of_response(event.response)


def answers_of_response(whole: Any) -> list[Answer]:
    assert whole.status == "completed"
    items = whole.output
    calls = tuple(
        Call(item.call_id, item.name, item.arguments)
        for item in items if item.type == "function_call"
    )  # fmt: skip
    reasoning = "".join(item.content[0].text for item in items if item.type == "reasoning")
    return [Answer(whole.output_text, reasoning, calls, "calls" if calls else "stop")]


FORMS: dict[str, tuple[Form, Callable[[Any], list[Answer]], Any]] = {
    "chat": (chat, answers_of_chat, openai.types.chat.ChatCompletion),
    "message": (message, answers_of_message, anthropic.types.Message),
    "response": (response, answers_of_response, openai.types.responses.Response),
}


async def check_errors(clients: Clients, parts: AgentDeployment) -> None:
    """Each error has its class in each package. Calls are enforced by the script alone."""
    wrong, limited = clients.with_key("none"), clients.with_key(parts.limited_key)
    ours = clients.with_key(parts.key)

    async def fail(name: str, asking: Clients, case: Case, kind: type[Exception], why: str) -> None:
        with pytest.raises(kind, match=why):
            await FORMS[name][0](asking, case, int)

    packages = (("chat", openai), ("message", anthropic), ("response", openai))
    failures = (
        failure
        for name, package in packages
        for failure in (
            fail(name, wrong, Case("one"), package.AuthenticationError, "key"),
            fail(name, limited, Case("one"), package.RateLimitError, "may have 0 requests"),
            fail(name, ours, Case("one", model="other"), package.NotFoundError, "other"),
            fail(name, ours, Case("three", "required"), package.BadRequestError, "no answer"),
            fail(name, ours, Case("one", worker="gone"), package.InternalServerError, "pinned"),
        )
    )
    await asyncio.gather(*failures)


@asynccontextmanager
async def clients_of(urls: list[str], key: str) -> AsyncIterator[Clients]:
    """The clients of some gateways, of which they use the first that lives."""
    async with httpx2.AsyncClient(transport=ReattachingTransport(urls)) as http:
        yield Clients(
            openai.AsyncOpenAI(
                base_url=f"{urls[0]}/v1", api_key=key, http_client=http, timeout=WAIT_S
            ),
            anthropic.AsyncAnthropic(
                base_url=urls[0], api_key=key, http_client=http, timeout=WAIT_S
            ),
        )


async def test_killed_worker_and_killed_gateway_repeat_and_lose_nothing(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    async with (
        agent_deployment(kafka, topic_prefix, tmp_path) as parts,
        clients_of([parts.url], parts.key) as safe,
        clients_of([parts.killed_url, parts.url], parts.key) as moving,
    ):
        progress = Progress(2 * sum(len(case.forms) for case in CASES if case.stream))
        answers = {
            (name, case, place): asyncio.create_task(
                FORMS[name][0](clients, case, progress.counter())
            )
            for case in CASES
            for name in case.forms
            for place, clients in enumerate((safe, moving))
        }
        background = await moving.ai.responses.create(model="demo", input="one", background=True)
        async with asyncio.timeout(WAIT_S):
            await progress.begun.wait()
        assert not {key: task.exception() for key, task in answers.items() if task.done()}
        await parts.kill()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*answers.values())
            await check_errors(safe, parts)
            events = await moving.ai.responses.retrieve(
                background.id, stream=True, starting_after=1
            )
            rest = [event async for event in events]
        assert (rest[0].sequence_number, rest[-1].response.output_text) == (2, SCRIPT["one"])
        assert await parts.has_continued()
        async with httpx.AsyncClient(base_url=parts.url, headers=auth_headers(parts.key)) as http:
            for (name, case, _), task in answers.items():
                ids, answers = task.result()
                for answer in answers:
                    calls = tuple(call._replace(id="") for call in answer.calls)
                    assert answer._replace(calls=calls) == EXPECTED[case], (name, case)
                call_ids = [call.id for answer in answers for call in answer.calls]
                assert len({*call_ids}) == len(call_ids)
                query = {"form": name, "stream": "false"}
                again = await http.get(f"/v1/streams/{ids}", params=query)
                _, whole, kind = FORMS[name]
                assert whole(kind.model_validate_json(again.text)) == answers, (name, case)


async def test_agents_of_the_examples_call_both_tools(
    kafka: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    settings = Settings(
        bootstrap_servers=kafka.bootstrap_servers, topic_prefix=topic_prefix, lanes=LANES,
        worker_id="w", router_id="r", cache_dir=tmp_path, http_port=0, indexer_port=0,
        engine="echo", echo_script=EXAMPLE, echo_itl_ms=1,
    )  # fmt: skip
    ctx = ProcessContext("standalone")
    async with provisioned(settings) as log:
        everything = StandaloneProcess(log, settings, ctx)
        await everything.start()
        shown = []
        for name in ("tools", "responses", "messages"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, f"examples/agent_with_{name}.py", everything.gateway.url, cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            shown.append((await asyncio.wait_for(process.communicate(), WAIT_S))[0].decode())
        await everything.stop()
        await ctx.cancel_tasks()
    for text in shown:
        assert text.splitlines() == [
            "weather: rain in Köln",
            "trains: the train to Köln leaves at 9:41",
            "Yes: it rains in Köln, and the train leaves at 9:41.",
        ]
