"""Tests of forms of answers that an attached server compiles: time limit, and places of a tenant.

The server is a socket, and compiles a form for as long as the test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from kvlane.app.engine.attached import new_forms
from kvlane.app.engine.attached.passthrough_engine import PassthroughEngine
from kvlane.app.engine.attached.server_engine import ServerAddress
from kvlane.app.engine.attached.server_errors import ServerSilent
from kvlane.app.engine.interface import EngineOutput, GenerateContext, InvalidRequest
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.request_reader import read_request
from kvlane.streams.clock import SystemClock
from kvlane.streams.request import OpenAiBody, Request
from tests.harness.http_harness import until
from tests.harness.model_servers import ScriptedServer, ServerExchange, chat_event

MESSAGES = [{"role": "user", "content": "a"}]
SLOW, QUICK = "slow", "quick"


class Compiler(ScriptedServer):
    """A server that compiles slow forms until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.events = [chat_event({"content": "b"}), chat_event(finish_reason="stop")]

    async def answer(self, exchange: ServerExchange) -> None:
        if str(exchange.body.get("guided_regex")).startswith(SLOW):
            await self.go.wait()
        await super().answer(exchange)

    @property
    def forms(self) -> list[Any]:
        return [body.get("guided_regex") for body in self.bodies]


@pytest.fixture
async def server() -> AsyncIterator[Compiler]:
    async with Compiler() as made:
        yield made
        made.go.set()


@pytest.fixture
async def engine(server: Compiler, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(new_forms, "COMPILE_TIMEOUT_S", 0.6)
    made = PassthroughEngine(SystemClock(), ServerAddress(server.url, read_timeout_s=1.5), "chat")
    await made.start("worker")
    yield made
    await made.cleanup()


async def ask(
    engine: PassthroughEngine, tenant: str, context: GenerateContext | None = None, **fields: Any
) -> EngineOutput:
    """The last output of a chat."""
    body = msgspec.json.encode({"messages": MESSAGES, **fields})
    request = Request(id="r", tenant=tenant, body=OpenAiBody(kind="chat", json=body))
    outputs = engine.generate(request, context or GenerateContext("r"))
    async with aclosing(outputs):  # type: ignore[type-var]
        return [output async for output in outputs][-1]


async def test_form_that_is_not_compiled_in_time_ends_its_request_as_invalid(
    server: Compiler, engine: PassthroughEngine
) -> None:
    with pytest.raises(InvalidRequest, match="not compiled within"):
        await ask(engine, "evil", guided_regex=SLOW)
    server.events = [lambda exchange: exchange.wait_closed()]
    with pytest.raises(ServerSilent) as raised:  # without a form it is a stall
        await ask(engine, "acme")
    assert raised.value.is_stall


async def test_new_forms_of_a_tenant_wait_for_those_that_are_compiled(
    server: Compiler, engine: PassthroughEngine
) -> None:
    await ask(engine, "evil", guided_regex=QUICK)
    names = [f"{SLOW}{n}" for n in range(new_forms.PLACES + 3)]
    waiting = [asyncio.create_task(ask(engine, "evil", guided_regex=name)) for name in names]
    await until(lambda: len(server.forms) == 1 + new_forms.PLACES)
    await ask(engine, "acme", guided_regex="another's")
    await ask(engine, "evil", guided_regex=QUICK)  # a known form
    await ask(engine, "evil")
    assert [name for name in names if name in server.forms] == names[: new_forms.PLACES]
    server.go.set()
    assert {output.finish_reason for output in await asyncio.gather(*waiting)} == {"stop"}


async def test_cancelled_request_for_a_new_form_ends_while_it_waits(
    server: Compiler, engine: PassthroughEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_forms, "COMPILE_TIMEOUT_S", 30.0)
    names = [f"{SLOW}{n}" for n in range(new_forms.PLACES)]
    compiling = [asyncio.create_task(ask(engine, "evil", guided_regex=name)) for name in names]
    await until(lambda: len(server.forms) == new_forms.PLACES)
    context = GenerateContext("r")
    waiting = asyncio.create_task(ask(engine, "evil", context, guided_regex="new"))
    await asyncio.sleep(0.05)
    context.cancel()
    await engine.abort(context)
    assert (await asyncio.wait_for(waiting, 5)).finish_reason == "cancelled"
    server.go.set()
    await asyncio.wait(compiling)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_form_without_an_output_keeps_its_place(
    server: Compiler, engine: PassthroughEngine, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    monkeypatch.setattr(new_forms, "UNFINISHED_S", 1.5)
    contexts = [GenerateContext(f"r{n}") for n in range(new_forms.PLACES)]
    asked = [
        asyncio.create_task(ask(engine, "evil", context, guided_regex=f"{SLOW}{n}"))
        for n, context in enumerate(contexts)
    ]
    await until(lambda: len(server.forms) == new_forms.PLACES)
    for context in contexts if is_cancelled else ():
        context.cancel()
        await engine.abort(context)
    await asyncio.wait(asked)
    with pytest.raises(InvalidRequest, match="few new ones at a time"):
        await ask(engine, "evil", guided_regex="new")
    assert "new" not in server.forms
    await asyncio.sleep(1.0)
    await ask(engine, "evil", guided_regex="new")


def key_of(**fields: Any) -> object:
    return new_forms.form_key(Request(id="r", tenant="acme"), fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}}, {"guided_json": {}, "guided_choice": ["a"]},
        {"structured_outputs": {"regex": "a"}}, {"ebnf": "root ::= a"}, {"grammar": "root ::= a"},
        {"tools": [{"a": 1}], "tool_choice": "required"}, {"regex": "a"},
    ],
)  # fmt: skip
def test_form_is_found_in_every_field(fields: dict[str, Any]) -> None:
    assert key_of(**fields, messages=MESSAGES) == key_of(**fields, messages=[])
    assert key_of(**fields) is not None


def test_body_without_a_form_has_no_key() -> None:
    plain = {"response_format": {"type": "text"}, "tools": [{"a": 1}], "tool_choice": "auto"}
    assert key_of(messages=MESSAGES, **plain) is None
    assert key_of(regex="a") != key_of(regex="b")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "((a{0,2000}){0,2000})"},
        {"structured_outputs": {"regex": "(a{0,9999}b){999}"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {
            "items": {"items": {"type": "array"}, "maxItems": 9999}, "maxItems": 9999}}}},
        {"guided_choice": ["x" * 1000] * 1000}, {"ebnf": "root ::= (a{0,9999}){0,9999}"},
        {"guided_json": '{"minItems": 99999999}'},
    ],
)  # fmt: skip
def test_form_that_costs_too_much_is_refused_before_its_server(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidPrompt, match="too complex to enforce") as raised:
        read_request("chat", {"model": "m", "messages": MESSAGES, **fields}, as_is=True)
    assert raised.value.field == next(iter(fields))
