"""Tests of guided answers that another engine continues: the form holds over the interruption."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kvlane.app.demo.tiny_model import VOCABULARY_SIZE
from kvlane.app.engine.interface import EngineError, GenerateContext, InvalidRequest
from kvlane.app.engine.vllm import guided_resume
from kvlane.app.engine.vllm.calls_parser import VllmCallsParser
from kvlane.app.http.openai.passthrough_fields import merge_deltas
from kvlane.app.serving.run_executor import resumed_request
from kvlane.app.text.answer_forms import CALL_FORMS, calls_form
from kvlane.app.text.answer_parsers import AnswerParser
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Chunk, PassthroughDelta
from kvlane.streams.request import (
    AnswerParsing,
    GuidedDecoding,
    Request,
    SamplingOptions,
    StopConditions,
)
from tests.vllm.engines import COMPACT, RealEngine, answer, core_of, make_request, started
from tests.vllm.fleet import Fleet
from tests.vllm.test_vllm_parsers import TAGS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["one", "two three", "four"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{3}-[0-9]{4,6}(x|yy){2}"
ANSWERS = 200 if "KVLANE_TEST_LONG" in os.environ else 12
"""Of an engine that is killed."""
CHOICES = ("the first of them", "the other one")


def is_valid(text: str) -> bool:
    found = json.loads(text)
    return (
        found.keys() == {"name", "count", "tags"}
        and found["name"] in ("one", "two three", "four")
        and 0 <= found["count"] <= 9999
        and len(found["tags"]) in (2, 3)
        and {*found["tags"]} <= {"a", "bb"}
    )


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "one", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "two", "parameters": SCHEMA}},
]
CALLS = calls_form(TOOLS, "required", is_single=True)
assert CALLS is not None


def is_a_call(text: str) -> bool:
    parser = AnswerParser(AnswerParsing(tools="hermes"), "a")
    parts = [*parser.push(text), *parser.end()]
    deltas = [PassthroughDelta(delta=dict(part.delta)) for part in parts if part.delta]
    (call,) = merge_deltas(*deltas).delta["tool_calls"]
    function = call["function"]
    return (
        not any(part.content for part in parts)
        and function["name"] in ("one", "two")
        and is_valid(function["arguments"])
    )


FORMS: dict[str, tuple[GuidedDecoding, Callable[[str], Any]]] = {
    "json": (GuidedDecoding(json=json.dumps(SCHEMA).encode()), is_valid),
    "regex": (GuidedDecoding(regex=PATTERN), re.compile(PATTERN).fullmatch),
    "choice": (GuidedDecoding(choice=CHOICES), CHOICES.__contains__),
    "grammar": (GuidedDecoding(grammar='root ::= "a" ("bc" | "cb"){3} "d"'), lambda t: len(t) == 8),
    "calls": (CALLS, is_a_call),
}
THINKING = AnswerParsing(tools="hermes", reasoning="qwen3", in_reasoning=True)


def guided(form: GuidedDecoding, prompt: list[int], seed: int, max_tokens: int) -> Request:
    return make_request(
        prompt, max_tokens, eos_token_ids=(2,), stop=StopConditions(max_tokens=max_tokens),
        sampling=SamplingOptions(temperature=0.8, seed=seed, guided_decoding=form),
    )  # fmt: skip


async def continued(engine: RealEngine, request: Request, taken: list[int]) -> list[int]:
    """The rest of an answer, as a worker asks an engine for it."""
    context = GenerateContext(request.id)
    context.taken_tokens = len(taken)
    rest = resumed_request(request, pack_tokens(taken))
    async with aclosing(engine.generate(rest, context)) as stream:
        return [token async for output in stream for token in output.token_ids]


def test_vllm_has_the_interface_that_the_plugin_replaces() -> None:
    assert guided_resume.interface_fault() == ""


def test_card_says_that_guided_answers_continue(engine: RealEngine) -> None:
    assert engine.config.continues_guided


def test_other_interface_is_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    def moved(self: object, request: object, backend: object) -> None:
        """As a later version may have it."""

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", moved)
    assert "_create_grammar has the parameters" in guided_resume.interface_fault()
    guided_resume.install()
    assert StructuredOutputManager._create_grammar is moved


@pytest.mark.parametrize("name", FORMS)
async def test_form_holds_over_an_interruption_at_any_token(
    engine: RealEngine, model: Path, name: str
) -> None:
    form, is_right = FORMS[name]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = random.Random(11)
    for seed in range(5):
        prompt = [rng.randrange(16, VOCABULARY_SIZE) for _ in range(20)]
        request = guided(form, prompt, seed, 200)
        whole = await answer(engine, request)
        text = tokenizer.decode([token for token in whole if token != 2])
        assert is_right(text), text
        for cut in {1, len(whole) // 2, len(whole) - 1} - {0, len(whole)}:
            taken = whole[:cut]
            rest = await continued(engine, request, taken)
            text = tokenizer.decode([token for token in taken + rest if token != 2])
            assert is_right(text), (cut, text)


@pytest.mark.parametrize("name", CALL_FORMS)
async def test_call_in_the_form_of_each_parser_is_enforced(
    engine: RealEngine, model: Path, name: str
) -> None:
    form = calls_form(TOOLS, "required", is_single=True, parser=name)
    assert form is not None
    parsing = AnswerParsing(tools=name, functions=json.dumps(TOOLS).encode())
    tagged = AutoTokenizer.from_pretrained(str(model))
    tagged.add_tokens(list(TAGS))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    request = guided(form, [20, 21, 22], 1, 400)
    whole = await answer(engine, request)
    taken = whole[: len(whole) // 2]
    whole = taken + await continued(engine, request, taken)
    text = tokenizer.decode([token for token in whole if token != 2])
    parser = AnswerParser(parsing, "a", partial(VllmCallsParser, tokenizer=tagged))
    parts = [*parser.push(text), *parser.end()]
    deltas = [PassthroughDelta(delta=dict(part.delta)) for part in parts if part.delta]
    (call,) = merge_deltas(*deltas).delta["tool_calls"]
    assert call["function"]["name"] in ("one", "two")
    arguments = json.loads(call["function"]["arguments"])
    arguments["name"] = arguments["name"].strip()  # XML keeps white space beside strings
    assert is_valid(json.dumps(arguments)), text
    assert not "".join(part.content for part in parts).strip()


async def test_form_begins_after_the_reasoning_also_of_the_tokens_so_far(
    engine: RealEngine, model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    thought = tokenizer.encode("I call one.</think>", add_special_tokens=False).ids
    request = replace(guided(CALLS, [20, 21, 22], 3, 300), parsing=THINKING)
    for cut in (len(thought), len(thought) + 1, len(thought) + 20):
        taken = thought + (await continued(engine, request, thought))[: cut - len(thought)]
        rest = await continued(engine, request, taken)
        text = tokenizer.decode([token for token in taken + rest if token != 2])
        assert text.startswith("I call one.</think>")
        assert is_a_call(text.partition("</think>")[2])


async def test_schema_that_cannot_be_compiled_is_refused(engine: RealEngine) -> None:
    form = GuidedDecoding(json=b'{"type": "object", "properties": {"a": {"type": "nothing"}}}')
    with pytest.raises(InvalidRequest):
        await answer(engine, guided(form, [20, 21], 1, 50))
    bad = calls_form(
        [{"function": {"name": "f", "parameters": {"type": "nothing"}}}],
        "required", is_single=True,
    )  # fmt: skip
    assert bad is not None
    with pytest.raises(InvalidRequest):
        await answer(engine, guided(bad, [20, 21], 1, 50))
    assert await answer(engine, guided(CALLS, [20, 21], 1, 50))


async def test_tokens_that_do_not_fit_the_form_end_their_request_alone(engine: RealEngine) -> None:
    form, _ = FORMS["regex"]
    request = guided(form, [20, 21, 22], 1, 50)
    with pytest.raises(EngineError, match="cannot continue the answer in the form"):
        await continued(engine, request, [300, 301])
    assert await answer(engine, request)


async def test_guided_answers_continue_when_their_engine_is_killed(
    model: Path, engine: RealEngine, tmp_path: Path
) -> None:
    victim = await started(
        model,
        blocks=80 + 10 * ANSWERS,
        max_num_seqs=20 + ANSWERS,
        structured_outputs_config=COMPACT,
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = random.Random(5)
    forms: list[tuple[str, Any, Callable[[str], Any]]] = [
        ("guided_json", SCHEMA, is_valid), ("guided_regex", PATTERN, re.compile(PATTERN).fullmatch),
    ]  # fmt: skip
    try:
        async with (
            Fleet(model, {"victim": victim}, "doomed", tmp_path, tool_parser="hermes") as fleet,
            openai.AsyncOpenAI(base_url=fleet.url, api_key="none", max_retries=0) as client,
        ):
            asked = asyncio.create_task(
                client.chat.completions.create(
                    model="doomed", messages=[{"role": "user", "content": "Hello"}], seed=1,
                    max_tokens=400, tools=TOOLS, tool_choice="required", temperature=0.8,
                    parallel_tool_calls=False,
                )
            )  # fmt: skip
            ids = [
                await fleet.make_request(
                    [rng.randrange(16, VOCABULARY_SIZE) for _ in range(30)], 300, temperature=0.8,
                    seed=number, ignore_eos=False, **{forms[number % 2][0]: forms[number % 2][1]},
                )
                for number in range(ANSWERS)
            ]  # fmt: skip
            answers: dict[str, list[int]] = {}
            for request_id in ids:
                tokens = answers[request_id] = []
                async for piece in fleet.pieces(request_id):
                    assert isinstance(piece, Chunk), piece
                    if not answers[ids[0]]:
                        await fleet.join("heir", engine)
                        os.kill(core_of(victim), signal.SIGKILL)
                    tokens += piece.token_ids
            (choice,) = (await asked).choices
            moved = [i for i in ids if fleet.decisions.workers_of(i) == ["victim", "heir"]]
        for number, tokens in enumerate(answers.values()):
            text = tokenizer.decode([token for token in tokens if token != 2])
            assert forms[number % 2][2](text), text
        print(f"\n{len(moved)} of {ANSWERS} answers continued")  # noqa: T201
        assert len(moved) >= ANSWERS // 4
        (call,) = choice.message.tool_calls or ()
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert is_valid(call.function.arguments)
        assert choice.finish_reason == "tool_calls"
    finally:
        await victim.cleanup()
