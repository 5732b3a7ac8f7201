"""Tests of vLLM's own parsers of calls: the parts follow from the tokens alone, with any steps and
any interruption, and are those that vLLM reads from the whole text."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer
from vllm.parser import ParserManager

from kvlane.app.engine.vllm.calls_parser import VllmCallsParser, _chat, _parser_class
from kvlane.app.http.openai.passthrough_fields import merge_deltas
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.text.answer_parsers import (
    REASONING_TAGS,
    THINK,
    VLLM_TOOL_PARSERS,
    AnswerParser,
    ReasoningParserName,
    ToolParserName,
    begins_in_reasoning,
)
from kvlane.app.text.answer_parts import AnswerPart
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.records import PassthroughDelta
from kvlane.streams.request import AnswerParsing, StopConditions
from kvlane.streams.responses.transcript import data_chars

OUTPUTS = 500 if "KVLANE_TEST_LONG" in os.environ else 100
REASONED = 500 if "KVLANE_TEST_LONG" in os.environ else 40
TAGS = (
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
    "<minimax:tool_call>", "</minimax:tool_call>", "[THINK]", "[/THINK]", "<seed:think>",
    "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}
TOOLS = json.dumps([
    {"type": "function", "function": {
        "name": name, "parameters": {"type": "object", "properties": PROPERTIES},
    }}
    for name in ("get_weather", "get_time")
]).encode()  # fmt: skip
OSS_HEADERS = (
    "<|channel|>commentary to=functions.get_time <|constrain|>json",
    "<|channel|>commentary to=functions.get_weather json",
    " to=functions.get_time<|channel|>commentary <|constrain|>json",
)
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


def parts_of(
    tokens: Sequence[int], begin: Callable[..., ParsedStream], rng: random.Random
) -> tuple[str, list[dict[str, Any]]]:
    """The content and the data of an answer: the same with any steps and any interruption."""
    single = begin()
    pieces = [*(single.feed([token]) for token in tokens), single.end()]
    content = "".join(piece.text for piece in pieces)
    items = [item for piece in pieces for item in piece.data]

    cut = rng.randrange(len(tokens) + 1)
    before = begin()
    shown, at = [], 0
    while at < cut:
        step = rng.randrange(1, 9)
        shown.append(before.feed(tokens[at : min(at + step, cut)]))
        at += step
    after = begin(tokens[:cut])
    read = (item.delta or {} for piece in shown for item in piece.data)
    assert (after.chars, after.data_chars) == (before.chars, data_chars(read))
    shown += [after.feed(tokens[cut:]), after.end()]
    assert "".join(piece.text for piece in shown) == content
    again = [PassthroughDelta(delta=item.delta or {}) for piece in shown for item in piece.data]
    data = [PassthroughDelta(delta=item.delta or {}) for item in items]
    assert merge_deltas(*again).delta == merge_deltas(*data).delta
    return content, [dict(item.delta) for item in data]


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
        content, data = parts_of(tokenizer.encode(text, add_special_tokens=False), begin, rng)
        chat = _chat(TOOLS)
        parser = _parser_class(name)(tokenizer, chat.tools)
        _, said, calls = parser.parse(text, chat, enable_auto_tools=True)
        found = whole_calls([PassthroughDelta(delta=dict(d)) for d in data])
        expected = [(call.name, _canonical(call.arguments)) for call in calls or ()]
        if is_whole:
            assert (found, content.strip()) == (expected, (said or "").strip())


@pytest.mark.parametrize("name", FAMILIES)
def test_half_a_character_in_a_call_becomes_text_that_can_be_written(
    tokenizer: Any, name: str
) -> None:
    parts: list[AnswerPart] = []
    parsing = AnswerParsing(tools=name, functions=TOOLS)
    parser = VllmCallsParser(parsing, "a", parts.append, tokenizer)
    for char in FAMILIES[name]([("get_weather", {"deep": {"k": "\ud83d"}})]):
        parser.push(char)
    parser.end()
    assert parser.calls == 1
    assert json.dumps([part.delta for part in parts], ensure_ascii=False).encode()


def reasoned(name: str) -> Iterator[tuple[str, str]]:
    """Prompts and answers with reasoning, of which some are cut off, or lack a part of a tag."""
    tags, rng = REASONING_TAGS[name], random.Random(name)
    prompts = ("", "", tags.start, tags.end) if tags.start == THINK else ("",)
    for _ in range(REASONED):
        words = [rng.choice((*WORDS, "I think ", "\n")) for _ in range(rng.randrange(9))]
        end = rng.choice((tags.end, tags.end, tags.end, tags.call, ""))
        text = "".join(words) + end + "".join(rng.choices(WORDS, k=3))
        prompt = rng.choice(prompts)
        if not prompt or (prompt == tags.start and rng.random() < 0.3):
            text = tags.start + text
        if rng.random() < 0.3 and len(text) > len(tags.start):
            at = rng.randrange(len(tags.start), len(text))
            text = text[:at] + rng.choice(("", text[at + 2 :]))
        yield prompt, text


@pytest.mark.parametrize("name", REASONING_TAGS)
def test_reasoning_follows_from_the_tokens_and_is_that_of_vllm(
    tokenizer: Any, decoder: Tokenizer, name: str
) -> None:
    rng = random.Random(1)
    kind = ParserManager.get_parser(reasoning_parser_name=name)
    for prompt, text in reasoned(name):
        parsing = AnswerParsing(
            reasoning=name, in_reasoning=begins_in_reasoning(name, prompt or "a")
        )

        def begin(taken: Sequence[int] = (), parsing: AnswerParsing = parsing) -> ParsedStream:
            decoding = decoder.detokenizer(skip_special=False)
            return ParsedStream(TextStream(decoding, StopConditions()), parsing, "a", taken)

        tokens = tokenizer.encode(text, add_special_tokens=False)
        content, data = parts_of(tokens, begin, rng)
        reasoning = "".join(item["reasoning"] for item in data)
        theirs = joined_by_vllm(kind(tokenizer), tokenizer, prompt, tokens)
        assert (_squeezed(reasoning), _squeezed(content)) == theirs, (prompt, text)


def test_answers_of_gpt_oss_are_parsed_as_by_the_library_of_openai() -> None:
    rng = random.Random(1)
    codec = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    kind = ParserManager.get_parser(
        tool_parser_name="openai", reasoning_parser_name="openai_gptoss", enable_auto_tools=True,
        is_harmony=True,
    )  # fmt: skip
    assert kind is not None
    for _ in range(REASONED):
        tokens = codec.encode(messages(rng), allowed_special="all")
        tokens = tokens[: rng.choice((len(tokens), rng.randint(5, max(5, len(tokens)))))]
        tokenizer: Any = SimpleNamespace(decode=codec.decode_utf8)
        parser, found, calls = kind(tokenizer), ["", ""], list[list[str]]()
        for place, token in enumerate(tokens, 1):
            delta = parser.parse_delta(
                "", [token], _chat(TOOLS), None, finished=place == len(tokens)
            )
            if delta is not None:
                found[0] += delta.reasoning or ""
                found[1] += delta.content or ""
                for call in delta.tool_calls:
                    if call.function.name:
                        calls.append([call.function.name, ""])
                    calls[-1][1] += call.function.arguments or ""
        ours = AnswerParser(AnswerParsing(tools="openai", reasoning="openai_gptoss"), "a")
        text = codec.decode_utf8(tokens)
        parts = [*ours.push(text), *ours.end()]
        deltas = [PassthroughDelta(delta=dict(part.delta)) for part in parts if part.delta]
        merged = merge_deltas(*deltas).delta
        functions = [call["function"] for call in merged.get("tool_calls") or []]
        content = "".join(part.content for part in parts)
        found[1] = found[1].partition("<|")[0]  # a header that is cut off is content there
        assert [merged.get("reasoning", ""), content.partition("<|")[0]] == found, text
        assert [[each["name"], each["arguments"]] for each in functions] == calls, text


def messages(rng: random.Random) -> str:
    """An answer of gpt-oss, without the header that its prompt has begun."""
    found = []
    for _ in range(rng.randrange(3)):
        channel = rng.choice(("analysis", "commentary"))
        words = "".join(rng.choices((*WORDS, "I think "), k=rng.randrange(1, 6)))
        found.append(f"<|channel|>{channel}<|message|>{words} .<|end|>")
    if rng.random() < 0.6:
        header, arguments = rng.choice(OSS_HEADERS), {"city": rng.choice(WORDS)}
        found.append(f"{header}<|message|>{json.dumps(arguments)}<|call|>")
    else:
        found.append(f"<|channel|>final<|message|>{rng.choice(WORDS)} .<|return|>")
    return "<|start|>assistant".join(found)


def joined_by_vllm(
    parser: Any, tokenizer: Any, prompt: str, tokens: Sequence[int]
) -> tuple[str, str]:
    """The reasoning and the content of an answer by vLLM's parser, fed token by token."""
    decoding, found = DecodeStream(skip_special_tokens=False), ["", ""]
    before: list[int] | None = tokenizer.encode(prompt, add_special_tokens=False)
    for place, token in enumerate(tokens, 1):
        text = decoding.step(tokenizer.backend_tokenizer, token) or ""
        is_last = place == len(tokens)
        delta = parser.parse_delta(text, [token], _chat(TOOLS), before, finished=is_last)
        before = None
        if delta is not None:
            found[0] += delta.reasoning or ""
            found[1] += delta.content or ""
    return _squeezed(found[0]), _squeezed(found[1])


def _squeezed(text: str) -> str:
    """A text without white space, which some of vLLM's parsers strip at the borders."""
    return "".join(text.split())


def test_every_parser_that_is_offered_is_tested() -> None:
    assert FAMILIES.keys() == VLLM_TOOL_PARSERS
    assert {*get_args(ToolParserName)} > VLLM_TOOL_PARSERS
    assert {*get_args(ReasoningParserName)} - {"auto", "none", "openai_gptoss"} == (
        REASONING_TAGS.keys()
    )
