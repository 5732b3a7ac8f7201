"""Tests of features that the engines of a model lack: refused by the field that asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.engine.interface import GenerateContext, InvalidRequest
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.request_reader import (
    check_supported,
    lacking_features,
    read_request,
    unsupported_features,
    with_supported_features,
)
from kvlane.app.preprocess.requests.answer_parsing import ModelParsers, with_parsing
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.text.answer_parsers import PARSER_VERSION
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ports import Partition
from kvlane.streams.records import EngineConfig, LogRecord, Tombstone, WorkerCard
from kvlane.streams.request import (
    AnswerParsing,
    GuidedDecoding,
    OutputOptions,
    Request,
    SamplingOptions,
)
from kvlane.streams.topics import REGISTRY

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
STRICT = [{"type": "function", "function": {"name": "f", "strict": True}}]
ALL = dict.fromkeys(("guided_decoding", "logprobs"), "echo")


def refused(unsupported: Mapping[str, str] = ALL, kind: Any = "chat", **fields: Any) -> str:
    """The field that is refused; "" for none."""
    base = CHAT if kind == "chat" else {"model": "m", "prompt": "hi"}
    try:
        check_supported(read_request(kind, base | fields, as_is=False), unsupported)
    except InvalidPrompt as e:
        return e.field
    return ""


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_call_is_enforced_by_engines_with_guided_decoding_alone(choice: Any) -> None:
    assert refused(tools=TOOLS, tool_choice=choice) == "tool_choice"
    assert refused({}, tools=TOOLS, tool_choice=choice) == ""
    assert refused({"answer_parsing": "vllm"}, tools=TOOLS, tool_choice=choice) == "tool_choice"


def test_strict_arguments_have_their_form_with_engines_that_can_enforce_it() -> None:
    asked = read_request("chat", CHAT | {"tools": STRICT}, as_is=False)
    assert isinstance(asked, OpenAIRequest)
    check_supported(asked, ALL)
    for tools, enforces in (("hermes", True), ("glm45", False), ("", False)):
        parsers = ModelParsers(tools, "")
        requests = with_parsing(asked, parsers, [Request(id="a")], [None])
        for unsupported, is_guided in (({}, enforces), (ALL, False)):
            [request] = with_supported_features(requests, unsupported)
            assert (request.sampling.guided_decoding is not None) == is_guided


def test_refusal_names_the_engine() -> None:
    body = CHAT | {"tools": TOOLS, "tool_choice": "required"}
    request = read_request("chat", body, as_is=False)
    with pytest.raises(InvalidPrompt, match="engine echo"):
        check_supported(request, ALL)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_that_need_not_be_called_are_rendered(choice: Any) -> None:
    assert refused(tools=TOOLS, tool_choice=choice) == ""


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": SCHEMA}),
        ("guided_json", {"guided_json": {"type": "object"}}),
        ("guided_choice", {"guided_choice": ["a"]}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a"}}),
    ],
)
def test_form_of_an_answer(field: str, fields: dict[str, Any]) -> None:
    assert refused(**fields) == field
    assert refused({"logprobs": "echo"}, **fields) == ""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("chat", {"logprobs": True}),
        ("chat", {"logprobs": True, "top_logprobs": 3}),
        ("completion", {"logprobs": 0}),
        ("completion", {"prompt_logprobs": 1}),
    ],
)
def test_log_probabilities(kind: str, fields: dict[str, Any]) -> None:
    assert refused(kind=kind, **fields) == next(iter(fields))
    assert refused({"guided_decoding": "echo"}, kind, **fields) == ""


def test_request_without_such_options_is_accepted() -> None:
    fields = {"response_format": {"type": "text"}, "logprobs": False, "n": 2}
    assert refused(**fields) == ""


@pytest.mark.parametrize(
    "over",
    [
        {"sampling": SamplingOptions(guided_decoding=GuidedDecoding(regex="a"))},
        {"output": OutputOptions(logprobs=0)},
        {"output": OutputOptions(prompt_logprobs=1)},
    ],
)
async def test_engine_refuses_unsupported_options(over: dict[str, Any]) -> None:
    request = Request(id="r", token_ids=pack_tokens([1, 2]), **over)
    for engine in (EchoEngine(SystemClock(), 0.0), SimulatedEngine(SystemClock())):
        with pytest.raises(InvalidRequest, match="not supported by the engine"):
            await anext(engine.generate(request, GenerateContext("r")))


def test_bodies_that_are_passed_on_are_for_their_server_to_refuse() -> None:
    fields = CHAT | {"tools": TOOLS, "tool_choice": "required", "logprobs": True}
    check_supported(read_request("chat", fields, as_is=True), ALL)


def test_one_worker_of_the_model_that_lacks_a_feature_is_enough() -> None:
    fleet = Fleet()
    config = EngineConfig(model="m", unsupported=("logprobs",))
    cards = [
        WorkerCard(id=name, slot=0, model="m", config=config, epoch=epoch, parser_version=1)
        for epoch, (name, config) in enumerate([("a", EngineConfig(model="m")), ("b", config)])
    ]
    fleet.apply(Partition(REGISTRY, 0), [LogRecord(n, 0, card) for n, card in enumerate(cards)], 2)
    assert unsupported_features(fleet, "m") == {"logprobs": "of worker b"}
    assert unsupported_features(fleet, "n") == {}
    fleet.apply(Partition(REGISTRY, 0), [LogRecord(2, 0, Tombstone(key="worker/b", epoch=1))], 3)
    assert unsupported_features(fleet, "m") == {}


def test_answer_stays_text_while_a_worker_cannot_parse_it() -> None:
    request = Request(id="r", parsing=AnswerParsing(tools="hermes"))
    cards = [
        WorkerCard(id=f"w{version}", slot=0, model="m", config=EngineConfig(model="m"),
                   parser_version=version)
        for version in (PARSER_VERSION, 0)
    ]  # fmt: skip
    both, new = lacking_features(cards), lacking_features(cards[:1])
    assert with_supported_features([request], both)[0].parsing is None
    assert with_supported_features([request], new) == (request,)
