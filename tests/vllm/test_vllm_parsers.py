"""Tests of vLLM's own parsers of calls: the parts follow from the tokens alone, with any steps and
any interruption, and are those that vLLM reads from the whole text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoTokenizer

from kvlane.app.engine.vllm.calls_parser import VllmCallsParser, _chat, _parser_class
from kvlane.app.http.openai.passthrough_fields import merge_deltas
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.text.answer_parsers import VLLM_TOOL_PARSERS, ToolParserName
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.records import PassthroughDelta
from kvlane.streams.request import AnswerParsing, StopConditions

OUTPUTS = 100
TAGS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "<minimax:tool_call>", "</minimax:tool_call>",
)  # fmt: skip
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}
TOOLS = json.dumps([
    {"type": "function", "function": {
        "name": name, "parameters": {"type": "object", "properties": PROPERTIES},
    }}
    for name in ("get_weather", "get_time")
]).encode()  # fmt: skip
WORDS = ("Paris", "São Paulo", "a < b", "x\ny", "日本", 'it\'s "q"', "</x>", "{1}", "")
Call = tuple[str, Mapping[str, Any]]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen(name: str, arguments: Mapping[str, Any]) -> str:
    inner = (f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(inner)}</function>\n</tool_call>"


def _glm(name: str, arguments: Mapping[str, Any]) -> str:
    inner = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{''.join(inner)}</tool_call>"


def _kimi(calls: Sequence[Call]) -> str:
    inner = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(inner)}<|tool_calls_section_end|>"


def _minimax(calls: Sequence[Call]) -> str:
    inner = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{_text(v)}</parameter>\n' for k, v in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def _joined(write: Callable[[str, Mapping[str, Any]], str], calls: Sequence[Call]) -> str:
    return "\n".join(write(*call) for call in calls)


FAMILIES: dict[str, Callable[[Sequence[Call]], str]] = {
    "qwen3_coder": partial(_joined, _qwen),
    "qwen3_xml": partial(_joined, _qwen),
    "glm45": partial(_joined, _glm),
    "glm47": partial(_joined, _glm),
    "kimi_k2": _kimi,
    "minimax_m2": _minimax,
}


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    found = AutoTokenizer.from_pretrained(str(model))
    found.add_tokens(list(TAGS))
    return found


@pytest.fixture(scope="module")
def decoder(tokenizer: Any) -> Tokenizer:
    return Tokenizer(tokenizer.backend_tokenizer.to_str().encode(), InlinePool())


def outputs(name: str) -> list[tuple[str, bool]]:
    """Texts, and whether they are as a model writes them: others are cut off or lack a part."""
    rng, found = random.Random(name), []
    for _ in range(OUTPUTS):
        calls = []
        for _ in range(rng.randrange(1, 4)):
            arguments: dict[str, Any] = {}
            if rng.random() < 0.9:
                arguments["city"] = rng.choice(WORDS)
            if rng.random() < 0.6:
                arguments["days"] = rng.randrange(100)
            if rng.random() < 0.4:
                arguments["deep"] = {"k": [1, rng.choice(WORDS)]}
            calls.append((rng.choice(("get_weather", "get_time")), arguments))
        text = rng.choice(("", "Let me look. ")) + FAMILIES[name](calls)
        is_whole = rng.random() < 0.7
        if not is_whole:
            at = rng.randrange(1, len(text))
            text = text[:at] + (text[at + 3 :] if rng.random() < 0.5 else "")
        found.append((text, is_whole))
    return found


def whole_calls(deltas: Sequence[PassthroughDelta]) -> list[tuple[str, str]]:
    calls = merge_deltas(*deltas).delta.get("tool_calls") or []
    return [(c["function"]["name"], _canonical(c["function"]["arguments"])) for c in calls]


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_follow_from_the_tokens_and_are_those_of_the_whole(
    tokenizer: Any, decoder: Tokenizer, name: str
) -> None:
    parsing, rng = AnswerParsing(tools=name, functions=TOOLS), random.Random(1)

    def begin(taken: Sequence[int] = ()) -> ParsedStream:
        text = TextStream(decoder.detokenizer(skip_special=False), StopConditions())
        calls = partial(VllmCallsParser, tokenizer=tokenizer)
        return ParsedStream(text, parsing, "a", taken, calls)

    for text, is_whole in outputs(name):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        single = begin()
        pieces = [single.feed([token]) for token in tokens]
        end = single.end()
        content = "".join(piece.text for piece in [*pieces, end])
        data = [d.delta for piece in [*pieces, end] for d in piece.data]

        cut = rng.randrange(len(tokens) + 1)
        before = begin()
        shown, at = [], 0
        while at < cut:
            step = rng.randrange(1, 9)
            shown.append(before.feed(tokens[at : min(at + step, cut)]))
            at += step
        after = begin(tokens[:cut])
        assert (after.chars, after.items) == (before.chars, before.items)
        shown += [after.feed(tokens[cut:]), after.end()]
        assert "".join(piece.text for piece in shown) == content
        assert [d.delta for piece in shown for d in piece.data] == data

        chat = _chat(TOOLS)
        parser = _parser_class(name)(tokenizer, chat.tools)
        _, said, calls = parser.parse(text, chat, enable_auto_tools=True)
        found = whole_calls([PassthroughDelta(delta=dict(d)) for d in data])
        expected = [(call.name, _canonical(call.arguments)) for call in calls or ()]
        if is_whole:
            assert (found, content.strip()) == (expected, (said or "").strip())


def test_every_parser_that_is_offered_is_tested() -> None:
    assert FAMILIES.keys() == VLLM_TOOL_PARSERS
    assert {*get_args(ToolParserName)} > VLLM_TOOL_PARSERS
