"""Tests of the OpenAPI document: whole in itself, and no stricter than what reads the bodies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvlane.app.http.anthropic.message_requests import chat_of
from kvlane.app.http.responses.response_requests import read_response
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.openai_requests import read_openai
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, run_scenario, scenario_test

JSON = "application/json"


def _document() -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    async def scenario(world: MemoryWorld) -> None:
        harness = await GatewayHarness.open(world)
        found.append((await harness.send("GET", "/openapi.json").wait_done()).json)

    run_scenario(scenario)
    return found[0]


DOCUMENT = _document()
OPERATIONS = [
    (path, method, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """A validator of a schema that refers to the document's components."""
    return Draft202012Validator(schema | {"components": DOCUMENT["components"]})


def body_of(path: str) -> Draft202012Validator:
    return validator(DOCUMENT["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"])


CHAT = body_of("/v1/chat/completions")
COMPLETION = body_of("/v1/completions")
EMBEDDING = body_of("/v1/embeddings")
MESSAGE = body_of("/v1/messages")
RESPONSE = body_of("/v1/responses")


def schemas(node: Any) -> Iterator[dict[str, Any]]:
    """Every schema of a part of the document that is not a component."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "schema":
                yield value
            else:
                yield from schemas(value)
    elif isinstance(node, list):
        for item in node:
            yield from schemas(item)


def test_every_schema_is_valid() -> None:
    for schema in [*DOCUMENT["components"]["schemas"].values(), *schemas(DOCUMENT["paths"])]:
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS)
def test_every_operation_declares_its_parameters_and_its_answers(
    path: str, method: str, operation: dict[str, Any]
) -> None:
    parameters = {(p["in"], p["name"]): p for p in operation.get("parameters", ())}
    for name in re.findall(r"{(\w+)}", path):
        assert parameters["path", name]["required"] is True
    assert ("requestBody" in operation) is (method == "post" and not path.endswith("/cancel"))
    codes = set(operation["responses"])
    assert codes & {"200", "202"}
    assert "422" not in codes
    assert codes >= {"default", "401", "403"}
    for code, response in operation["responses"].items():
        assert response["description"]
        assert "x-request-id" in response["headers"]
        if code[0] == "4":
            reference = response["content"][JSON]["schema"]["$ref"]
            error = "MessageError" if path.startswith("/v1/messages") else "Error"
            assert reference == f"#/components/schemas/{error}"


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(names) == len(set(names))


def test_parameters_read_by_handlers_are_declared() -> None:
    attach = DOCUMENT["paths"]["/v1/streams/{request_id}"]["get"]
    names = {p["name"] for p in attach["parameters"]}
    assert names == {"request_id", "Last-Event-ID", "from", "form", "stream", "include_usage"}
    assert "202" in DOCUMENT["paths"]["/v1/streams/{request_id}"]["delete"]["responses"]
    assert set(DOCUMENT["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {
        "text/plain"
    }


@scenario_test
async def test_documented_limits_of_pages_are_those_in_force(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(world)
    for path in ("/v1/files", "/v1/batches"):
        parameters = DOCUMENT["paths"][path]["get"]["parameters"]
        (limit,) = (p["schema"] for p in parameters if p["name"] == "limit")
        least, most = limit["minimum"], limit["maximum"]
        for count, status in ((least - 1, 400), (least, 200), (most, 200), (most + 1, 400)):
            answer = await harness.send("GET", f"{path}?limit={count}").wait_done()
            assert answer.status == status, (path, count)


@scenario_test
async def test_another_method_is_answered_with_those_that_are_documented(
    world: MemoryWorld,
) -> None:
    harness = await GatewayHarness.open(world)
    for path, operations in DOCUMENT["paths"].items():
        answer = await harness.send("PATCH", re.sub("{.*}", "x", path)).wait_done()
        assert answer.status == 405
        methods = {*operations, "head"} if "get" in operations else set(operations)
        assert set(answer.headers["allow"].lower().split(", ")) == methods


@pytest.mark.parametrize(
    ("bodies", "wrong"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
        (CHAT, {"model": "m", "messages": []}),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": 7}]}),
        (CHAT, {"model": "m", "messages": [{"role": "user"}], "tool_choice": "maybe"}),
        (COMPLETION, {"model": "m"}),
        (COMPLETION, {"model": "m", "prompt": [None]}),
        (COMPLETION, {"model": "m", "prompt": []}),
        (COMPLETION, {"model": "m", "prompt": [[]]}),
        (COMPLETION, {"model": "m", "prompt": "a", "stop": 5}),
        (COMPLETION, {"model": "m", "prompt": "a", "guided_json": 5}),
        (MESSAGE, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        (MESSAGE, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": 7}]}),
        (EMBEDDING, {"model": "m", "input": []}),
        (EMBEDDING, {"model": "m", "input": [""]}),
    ],
)
def test_wrong_bodies_are_wrong_by_the_document(bodies: Draft202012Validator, wrong: Any) -> None:
    assert not bodies.is_valid(wrong)


@pytest.mark.parametrize(
    ("bodies", "right"),
    [
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "hi"}], "unknown": 1}),
        (
            CHAT,
            {
                "model": "m",
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {"role": "assistant", "content": None},
                ],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "stop": "x",
                "nvext": {"backend_instance_id": 7},
            },
        ),
        (COMPLETION, {"model": "m", "prompt": "a"}),
        (COMPLETION, {"model": "m", "prompt": [1, 2]}),
        (COMPLETION, {"model": "m", "prompt": ["a", [1]], "stop": ["a", "b"]}),
        (
            MESSAGE,
            {
                "model": "m",
                "max_tokens": 9,
                "system": "brief",
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {"role": "user", "content": "again"},
                ],
            },
        ),
        (EMBEDDING, {"model": "m", "input": [[1], "a"]}),
    ],
)
def test_right_bodies_are_right_by_the_document(bodies: Draft202012Validator, right: Any) -> None:
    assert list(bodies.iter_errors(right)) == []


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("read", "bodies", "name", "base"),
    [
        (partial(read_openai, "chat"), CHAT, "ChatBody", {"messages": HELLO}),
        (partial(read_openai, "completion"), COMPLETION, "CompletionBody", {"prompt": "a"}),
        (chat_of, MESSAGE, "MessagesBody", {"messages": HELLO, "max_tokens": 9}),
        (read_response, RESPONSE, "ResponsesBody", {"input": "hi"}),
    ],
    ids=["chat", "completion", "message", "response"],
)
@given(data=st.data())
def test_accepted_requests_are_valid_by_the_document(
    read: Any, bodies: Any, name: str, base: Any, data: st.DataObject
) -> None:
    """A field of any value: what the document refuses, the reader refuses as well."""
    fields = sorted(DOCUMENT["components"]["schemas"][name]["properties"])
    body = {"model": "m"} | base | {data.draw(st.sampled_from(fields)): data.draw(values)}
    try:
        read(body)
    except InvalidPrompt:
        return
    assert not body["model"] or list(bodies.iter_errors(body)) == []


def answer_of(path: str, method: str, code: str, kind: str = JSON) -> Draft202012Validator:
    responses = DOCUMENT["paths"][path][method]["responses"]
    return validator(responses[code]["content"][kind]["schema"])


@scenario_test
async def test_responses_match_the_document(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_backend(world)
    chat = await harness.chat().wait_done()
    got = [
        ("/v1/chat/completions", "post", chat),
        ("/v1/chat/completions", "post", await harness.chat(messages=[]).wait_done()),
        ("/v1/completions", "post", await harness.complete().wait_done()),
        ("/v1/models", "get", await harness.send("GET", "/v1/models").wait_done()),
        ("/v1/models/{name}", "get", await harness.send("GET", "/v1/models/demo").wait_done()),
        ("/v1/models/{name}", "get", await harness.send("GET", "/v1/models/none").wait_done()),
        ("/livez", "get", await harness.send("GET", "/livez").wait_done()),
        ("/readyz", "get", await harness.send("GET", "/readyz").wait_done()),
    ]
    url = f"/v1/streams/{chat.headers['x-kvlane-id']}"
    got += [
        (
            "/v1/streams/{request_id}",
            "get",
            await harness.send("GET", f"{url}?stream=false").wait_done(),
        ),
        ("/v1/streams/{request_id}", "delete", await harness.send("DELETE", url).wait_done()),
    ]
    assert {answer.status for _, _, answer in got} >= {200, 202, 400, 404}
    for path, method, answer in got:
        wrong = answer_of(path, method, str(answer.status)).iter_errors(answer.json)
        assert list(wrong) == [], (path, method, answer.content)
