"""Tests of the parsers of answers: parts are a function of the tokens, and lose no text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from kvlane.app.engine.echo import EchoEngine
from kvlane.app.http.openai.passthrough_fields import merge_deltas, to_message
from kvlane.app.preprocess.models.byte_model import ByteModel
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.answer_parsing import ModelParsers, parsers_of, parsing_of
from kvlane.app.preprocess.requests.openai_requests import read_openai
from kvlane.app.text.answer_parsers import (
    AnswerParser,
    begins_in_reasoning,
    reasoning_parser_of,
    tool_parser_of,
)
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.app.text.stop_conditions import TextPiece
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import ModelCard, PassthroughDelta
from kvlane.streams.request import AnswerParsing, Request, StopConditions
from kvlane.streams.responses.transcript import data_chars

BOTH = AnswerParsing(tools="hermes", reasoning="qwen3")
TOOLS = AnswerParsing(tools="hermes")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class Answer(NamedTuple):
    """The whole answer, and the parts in their order."""

    content: str
    message: dict[str, Any]
    parts: tuple[tuple[str, Any], ...]
    finish_reason: str | None = None

    @property
    def calls(self) -> list[tuple[str, str]]:
        functions = [call["function"] for call in self.message.get("tool_calls", [])]
        return [(function["name"], function["arguments"]) for function in functions]

    @property
    def reasoning(self) -> str:
        return str(self.message.get("reasoning_content", ""))


def stream(parsing: AnswerParsing, taken: Sequence[int] = (), **stop: Any) -> ParsedStream:
    request = Request(id="r", stop=StopConditions(**stop))
    return ParsedStream(ByteModel().text_stream(request), parsing, "r", taken)


def parsed(
    parsing: AnswerParsing, text: str, steps: Sequence[int] = (), fence: int = 0, **stop: Any
) -> Answer:
    """The answer of these bytes, in steps of these lengths, in two runs with a border at `fence`.

    The second run gets the tokens of the first one, of which readers have all parts.
    """
    tokens = list(text.encode())
    pieces, parts = [], []
    first = stream(parsing, **stop)
    lengths = iter(steps)
    pieces += fed(first, tokens[:fence] if fence else tokens, lengths)
    run = first
    if fence:
        run = stream(parsing, tokens[:fence], **stop)
        deltas = (part.delta or {} for piece in pieces for part in piece.data)
        assert (run.chars, run.data_chars) == (first.chars, data_chars(deltas))
        pieces += fed(run, tokens[fence:], lengths)
    pieces.append(run.end())
    for piece in pieces:
        at = 0
        for item in piece.data:
            parts += [("content", piece.text[at : item.at]), ("delta", item.delta)]
            at = item.at
        parts.append(("content", piece.text[at:]))
    content = "".join(piece.text for piece in pieces)
    assert run.chars == len(content)
    data = [PassthroughDelta(delta=part.delta or {}) for piece in pieces for part in piece.data]
    ended = run.ended.finish_reason if run.ended is not None else run.finish_reason("stop")
    return Answer(content, to_message(merge_deltas(*data).delta), joined(parts), ended)


def fed(run: ParsedStream, tokens: Sequence[int], lengths: Iterator[int]) -> list[TextPiece]:
    """The pieces of these tokens, in steps of these lengths, then of one."""
    pieces, begin = [], 0
    while begin < len(tokens) and run.ended is None:
        end = begin + next(lengths, 1)
        pieces.append(run.feed(tokens[begin:end]))
        begin = end
    return pieces


def joined(parts: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Content, reasoning, names of calls and arguments in their order, each as long as possible."""
    whole: list[tuple[str, Any]] = []
    for kind, value in parts:
        named, text = (kind, value) if kind == "content" else text_of(value)
        if whole and whole[-1][0] == named:
            whole[-1] = (named, whole[-1][1] + text)
        elif text:
            whole.append((named, text))
    return tuple(whole)


def text_of(delta: dict[str, Any]) -> tuple[str, str]:
    """What a delta extends, and its text."""
    if "reasoning" in delta:
        assert delta["reasoning"] == delta["reasoning_content"]
        return "reasoning", delta["reasoning"]
    (call,) = delta["tool_calls"]
    arguments, name = call["function"]["arguments"], call["function"].get("name")
    if name is None:
        assert call == {"index": call["index"], "function": {"arguments": arguments}}
    return f"{call['index']} {name} {call.get('id')}", arguments if name is None else name


# --- tool calls ---


def test_call_is_separated_from_the_content() -> None:
    answer = parsed(TOOLS, f"I look it up.\n{CALL}")
    assert answer.content == "I look it up.\n"
    assert answer.calls == [("weather", '{"city": "Köln"}')]
    assert answer.finish_reason == "tool_calls"


def test_name_comes_before_the_arguments_in_pieces() -> None:
    pieces = fed(stream(TOOLS), list(CALL.encode()), iter(()))
    parts = [part.delta or {} for piece in pieces for part in piece.data]
    deltas = [delta["tool_calls"][0] for delta in parts]
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert (deltas[0]["type"], deltas[0]["index"]) == ("function", 0)
    assert len(deltas) > 5
    assert all(set(delta) == {"index", "function"} for delta in deltas[1:])


def test_parallel_calls_have_their_own_index_and_id() -> None:
    answer = parsed(TOOLS, f"{CALL}\n{CALL}\n")
    assert answer.content == ""
    first, second = answer.message["tool_calls"]
    assert first["function"] == second["function"]
    assert first["id"] != second["id"]


def test_answer_ends_after_the_last_call_that_it_may_have() -> None:
    answer = parsed(_with(TOOLS, max_calls=1), CALL + CALL)
    assert (len(answer.calls), answer.finish_reason) == (1, "tool_calls")


def _with(parsing: AnswerParsing, **changes: Any) -> AnswerParsing:
    from msgspec.structs import replace

    return replace(parsing, **changes)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', "{}"),
        ('{"arguments": {"a": [1, "]"]}, "name": "f"}', '{"a": [1, "]"]}'),
        ('{"name": "f", "parameters": {"a": "}</tool_call>"}}', '{"a": "}</tool_call>"}'),
        ('{"id": "7", "name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name":"f","arguments":{"a":"\\\\\\"{"}}', '{"a":"\\\\\\"{"}'),
        (' { "name" : "f" , "arguments" : { "a" : { } } } ', '{ "a" : { } }'),
    ],
)
def test_arguments_keep_the_spelling_of_the_model(body: str, arguments: str) -> None:
    answer = parsed(TOOLS, f"<tool_call>{body}</tool_call>")
    assert answer.calls == [("f", arguments)]
    assert answer.content == ""


def test_arguments_in_a_string_with_a_wrong_escape_are_its_text() -> None:
    text = r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\x \\\u1\u00e9\"}"}</tool_call>'
    assert parsed(TOOLS, text).calls == [("f", r'{"a": "\x \\u1é"}')]


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "f\\ud83d", "arguments": {}}', ("f\ufffd", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\ude00b\\"}"}', ("f", '{"a": "\ufffdb"}')),
        ('{"name": "\\ud83d\\ude00", "arguments": "{}\\ud83d"}', ("😀", "{}\ufffd")),
    ],
)
def test_half_a_character_in_a_call_becomes_text_that_can_be_written(
    body: str, call: tuple[str, str]
) -> None:
    answer = parsed(TOOLS, f"<tool_call>{body}</tool_call>")
    assert answer.calls == [call]
    assert json.dumps(answer.message, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>weather in Köln</tool_call>",
        '<tool_call>{"city": "Köln"}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name"',
        "<tool_call>",
        "<tool_ca",
        "a < b and <tool> c",
        "<tool_call><tool_call>x",
        "",
    ],
)
def test_text_that_is_no_call_stays_content(text: str) -> None:
    answer = parsed(TOOLS, text)
    assert (answer.content, answer.calls) == (text, [])
    assert answer.finish_reason == "stop"


def test_call_after_a_malformed_one_is_found() -> None:
    answer = parsed(TOOLS, f"<tool_call>?{CALL}")
    assert answer.content == "<tool_call>?"
    assert answer.calls == [("weather", '{"city": "Köln"}')]


def test_fault_behind_the_name_ends_the_call_there() -> None:
    answer = parsed(TOOLS, '<tool_call>{"name": "f", "arguments": {"a": 1}; "b"')
    assert answer.calls == [("f", '{"a": 1}')]
    assert answer.content == '; "b"'


def test_stop_string_within_a_call_ends_it() -> None:
    answer = parsed(TOOLS, CALL, stop=("Kö",))
    assert answer.calls == [("weather", '{"city": "')]
    assert answer.finish_reason == "stop"
    assert parsed(TOOLS, CALL + CALL + "Ende", stop=("En",)).finish_reason == "tool_calls"


def test_token_limit_within_a_call_is_the_finish_reason() -> None:
    answer = parsed(TOOLS, CALL, max_tokens=len(CALL) - 30)
    assert answer.finish_reason == "length"
    assert answer.calls[0][0] == "weather"


def test_text_between_tags_is_one_item_of_a_step() -> None:
    run = stream(BOTH)
    tokens = list(f"<think>some thoughts</think>{CALL}".encode())
    run.feed(tokens[:8])
    assert len(run.feed(tokens[8:16]).data) == 1
    assert run.reasoning_tokens == len(">some thou")
    run.feed(tokens[16 : tokens.index(ord("K"))])
    assert len(run.feed(tokens[tokens.index(ord("K")) :][:3]).data) == 1


def test_answer_with_all_its_calls_drops_the_rest_of_its_step() -> None:
    run = stream(_with(TOOLS, max_calls=1))
    run.token_chars = []
    piece = run.feed(list(f"{CALL}more".encode()))
    assert piece.finish_reason == "tool_calls"
    assert piece.tokens == len(run.token_chars) < len(CALL.encode())
    assert run.feed([1]).tokens == 0


def test_call_ids_are_the_same_in_every_run() -> None:
    whole, continued = parsed(TOOLS, CALL), parsed(TOOLS, CALL, fence=20)
    assert whole.message == continued.message


# --- reasoning ---


def test_reasoning_is_separated_from_content_and_calls() -> None:
    answer = parsed(BOTH, f"<think>\nwhich tool?\n</think>\nNow: {CALL}")
    assert answer.reasoning == "\nwhich tool?\n"
    assert answer.content == "\nNow: "
    assert answer.calls == [("weather", '{"city": "Köln"}')]


def test_reasoning_may_begin_in_the_prompt() -> None:
    answer = parsed(_with(BOTH, in_reasoning=True), "hm</think>yes")
    assert (answer.reasoning, answer.content) == ("hm", "yes")


def test_call_within_the_reasoning_is_none() -> None:
    answer = parsed(_with(BOTH, in_reasoning=True), CALL)
    assert (answer.reasoning, answer.content, answer.calls) == (CALL, "", [])


@pytest.mark.parametrize(
    ("name", "in_reasoning", "text", "reasoning", "content"),
    [
        ("mistral", False, "[THINK]a[/THINK]b", "a", "b"),
        ("mistral", False, "a[/THINK]b", "", "a[/THINK]b"),
        ("seed_oss", True, "<seed:think>a</seed:think>b", "a", "b"),
        ("glm45", True, "a</thi", "a</thi", ""),
        ("kimi_k2", True, "a<|tool_calls_section_begin|>b", "a", "<|tool_calls_section_begin|>b"),
        ("deepseek_r1", True, " <think>a<tool_call>b</think>c", "a<tool_call>b", "c"),
    ],
)
def test_tags_of_the_reasoning_are_those_of_the_model(
    name: str, in_reasoning: bool, text: str, reasoning: str, content: str
) -> None:
    answer = parsed(AnswerParsing(reasoning=name, in_reasoning=in_reasoning), text)
    assert (answer.reasoning, answer.content) == (reasoning, content)


OSS = AnswerParsing(tools="openai", reasoning="openai_gptoss")
OSS_CALL = (
    "<|channel|>analysis<|message|>which?<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
)
OSS_FINAL = "<|start|>assistant<|channel|>final<|message|>a < b<|return|>"


def test_messages_of_gpt_oss_are_reasoning_calls_and_content() -> None:
    answer = parsed(OSS, OSS_CALL + OSS_FINAL)
    assert (answer.reasoning, answer.content) == ("which?", "a < b")
    assert answer.calls == [("weather", '{"city": "Köln"}')]
    run = stream(OSS)
    assert run.feed([*OSS_CALL.removesuffix("<|call|>").encode()]).finish_reason is None
    assert run.reasoning_tokens == len(">which?" + "<|end|>")
    run.end()  # the last tag is a hidden stop token of the model
    assert run.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no header", "no header", 0),
        ("x" * 600, "x" * 600, 0),
        ("<|channel|>commentary to=python<|message|>1+1", "1+1", 0),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", "", 1),
        ('<|channel|>commentary to=functions.f<|message|>{"a', "", 0),
    ],
)
def test_malformed_messages_of_gpt_oss_lose_no_text(text: str, content: str, calls: int) -> None:
    run = stream(OSS)
    pieces = [run.feed([*text.encode()]), run.end()]
    assert "".join(piece.text for piece in pieces) == content
    assert (run.finish_reason("stop") == "tool_calls") == bool(calls)


def test_stop_string_ends_an_answer_of_gpt_oss_before_it() -> None:
    answer = parsed(OSS, OSS_FINAL.removeprefix("<|start|>assistant"), stop=(" b",))
    assert (answer.content, answer.finish_reason) == ("a <", "stop")


def test_answer_that_does_not_begin_with_reasoning_has_none() -> None:
    text = "no <think>tags</think>"
    assert parsed(BOTH, text).content == text


def test_hidden_reasoning_is_counted() -> None:
    text = "<think>abc</think>yes"
    run = stream(_with(BOTH, shows_reasoning=False))
    piece = run.feed(list(text.encode()))
    assert (piece.text, piece.data) == ("yes", ())
    assert run.reasoning_tokens == len(">abc</think>")


def test_text_without_token_ids_is_parsed_too() -> None:
    run = stream(_with(BOTH, max_calls=1))
    pieces = [run.feed_text(text) for text in ("<think>a</thi", "nk>b", CALL + "c")]
    assert [piece.text for piece in pieces] == ["", "b", ""]
    assert [len(piece.data) for piece in pieces] == [1, 0, 2]
    assert pieces[-1].finish_reason == "tool_calls"


def test_parser_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2"):
        AnswerParser(_with(BOTH, version=2), "r")
    with pytest.raises(ValueError, match="'pythonic'"):
        AnswerParser(_with(BOTH, tools="pythonic"), "r")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>{{ name }}</tool_call>", "hermes", ""),
        ("<tool_call><function={{ name }}></tool_call>", "", ""),
        ("<tool_call>{{ name }}<arg_key></tool_call>", "", ""),
        ("{% if content.split('</think>') %}<think>", "", "qwen3"),
        ("[THINK]{{ thought }}[/THINK]", "", "mistral"),
        ("<|channel|>{{ channel }}<|message|>", "openai", "openai_gptoss"),
        ("{{ messages }}", "", ""),
    ],
)
def test_parsers_follow_from_the_form_in_the_template(
    template: str, tools: str, reasoning: str
) -> None:
    assert (tool_parser_of(template), reasoning_parser_of(template)) == (tools, reasoning)


def test_prompt_shows_whether_the_answer_begins_within_its_reasoning() -> None:
    assert begins_in_reasoning("qwen3", "<|assistant|>\n<think>\n")
    assert not begins_in_reasoning("qwen3", "<think>\n\n</think>\n\n")
    assert not begins_in_reasoning("", "<think>")
    assert begins_in_reasoning("deepseek_r1", "hello")
    assert not begins_in_reasoning("deepseek_r1", "hello</think>\n")
    assert begins_in_reasoning("seed_oss", "hello")
    assert not begins_in_reasoning("mistral", "hello")


# --- properties ---

_WORDS = [*'<>{}[]:,"\\', "Köln", "</", "tool_call>", "<tool_call>", "</tool_call>", "<think>"]


def generated(rng: random.Random) -> str:
    """An answer of one of the families: well-formed, cut off, or with faults in it."""
    arguments = {rng.choice("abc"): rng.choice([1, "x", '"', "é\n", [], {"k": "}"}, None])}
    call = {"name": rng.choice("fgh"), "arguments": arguments}
    calls = [f"<tool_call>\n{json.dumps(call, ensure_ascii=rng.random() < 0.5)}\n</tool_call>"]
    parts = [rng.choice(["", "<think>a\nb</think>", "<think></think>\n\n"])]
    parts += [
        rng.choice(["", "Hello. ", "\n"]),
        *(calls * rng.randint(0, 3)),
        rng.choice(["", "x"]),
    ]
    text = rng.choice(["", "\n"]).join(parts)
    match rng.randrange(3):
        case 0:
            return text[: rng.randint(0, len(text))]
        case 1:
            for _ in range(rng.randint(1, 4)):
                at = rng.randint(0, len(text))
                text = text[:at] + rng.choice(_WORDS) + text[at + rng.randint(0, 2) :]
    return text


def generated_messages(rng: random.Random) -> str:
    """An answer of gpt-oss: well-formed, cut off, or with faults in it."""
    parts = [OSS_CALL, OSS_FINAL, "<|start|>assistant", "<|channel|>", "<|message|>", "<|en", "a <"]
    text = "".join(rng.choices(parts, weights=(3, 3, 1, 1, 1, 1, 1), k=rng.randint(1, 4)))
    return text[: rng.choice((len(text), rng.randint(0, len(text))))]


@pytest.mark.parametrize("parsing", [BOTH, TOOLS, _with(BOTH, in_reasoning=True), OSS])
def test_steps_and_fences_do_not_change_the_parts(parsing: AnswerParsing) -> None:
    rng = random.Random(7)
    for _ in range(500):
        text = (generated_messages if parsing is OSS else generated)(rng)
        whole = parsed(parsing, text)
        size = len(text.encode())
        steps = [rng.randint(1, 9) for _ in range(size)]
        fence = rng.randint(0, size)
        again = parsed(parsing, text, steps, fence)
        assert again == whole, (text, steps, fence)


def test_rules_that_divide_an_answer_otherwise_give_other_numbers_of_characters() -> None:
    """So a worker whose rules differ from those of the first one sees it (`UnfitReplay`)."""
    rng = random.Random(9)
    others = (
        TOOLS, _with(BOTH, tools=""), _with(BOTH, in_reasoning=True), _with(BOTH, max_calls=1),
        _with(BOTH, reasoning="seed_oss"), _with(BOTH, reasoning="glm45", in_reasoning=True),
    )  # fmt: skip
    seen = 0
    for _ in range(100):
        tokens = list(generated(rng).encode())
        shown = counted_parts(BOTH, tokens)
        for parsing in others:
            here = counted_parts(parsing, tokens)
            seen += here.parts != shown.parts
            assert (here.parts == shown.parts) == (here[1:] == shown[1:]), (parsing, bytes(tokens))
    assert seen > 100


class CountedParts(NamedTuple):
    """The parts of an answer that goes on, and the numbers that a continuing worker compares."""

    parts: tuple[tuple[str, Any], ...]
    chars: int
    data_chars: int


def counted_parts(parsing: AnswerParsing, tokens: Sequence[int]) -> CountedParts:
    run, found, at = stream(parsing), list[tuple[str, Any]](), 0
    piece = run.feed(tokens)
    for item in piece.data:
        found += [("content", piece.text[at : item.at]), ("delta", item.delta)]
        at = item.at
    found.append(("content", piece.text[at:]))
    return CountedParts(joined(found), run.chars, data_chars(i.delta or {} for i in piece.data))


def test_well_formed_answers_equal_a_plain_reading_of_the_whole_text() -> None:
    rng = random.Random(8)
    seen = 0
    for _ in range(1100):
        text = generated(rng)
        answer, (reasoning, content, calls) = parsed(BOTH, text), plain_reading(text)
        if calls is None:
            continue
        seen += 1
        assert answer.reasoning == reasoning
        assert "".join(answer.content.split()) == "".join(content.split()), text
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls
    assert seen > 500


def plain_reading(text: str) -> tuple[str, str, list[tuple[str, Any]] | None]:
    """Reasoning, content and calls of a whole text; None for calls where one is malformed."""
    reasoning = ""
    if match := re.match(r"\s*<think>(.*?)</think>", text, re.DOTALL):
        reasoning, text = match[1], text[match.end() :]
    calls = []
    blocks = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    for block in blocks:
        try:
            call = json.loads(block)
            calls.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return "", "", None
        if set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
            return "", "", None
        if not isinstance(call["name"], str) or not call["name"]:
            return "", "", None
    content = re.sub(r"<tool_call>.*?</tool_call>", " ", text, flags=re.DOTALL)
    if any(word in content for word in ("<tool", "tool_call>")) or text.lstrip().startswith(
        "<think"
    ):
        return "", "", None
    return reasoning, content, calls


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_of_text_do_not_change_content_and_arguments(pieces: int) -> None:
    rng = random.Random(pieces)
    for _ in range(200):
        text = generated(rng)
        whole, cut = AnswerParser(BOTH, "r"), AnswerParser(BOTH, "r")
        expected = merged(whole.push(text) + whole.end())
        parts = []
        for at in range(0, len(text), pieces):
            parts += cut.push(text[at : at + pieces])
        assert merged(parts + cut.end()) == expected


def merged(parts: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    deltas = [PassthroughDelta(delta=dict(part.delta)) for part in parts if part.delta]
    return "".join(part.content for part in parts), to_message(merge_deltas(*deltas).delta)


# --- what a chat asks for ---

TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("parsers", "more", "parsing"),
    [
        (ModelParsers(), {"tools": [TOOL]}, None),
        (ModelParsers("hermes"), {}, None),
        (ModelParsers("hermes"), {"tools": [TOOL]}, TOOLS),
        (ModelParsers("hermes"), {"tools": [TOOL], "tool_choice": "none"}, None),
        (ModelParsers("hermes", "qwen3"), {"tools": [TOOL]}, BOTH),
        (ModelParsers("", "qwen3"), {}, AnswerParsing(reasoning="qwen3")),
        (
            ModelParsers("hermes"),
            {"tools": [TOOL], "parallel_tool_calls": False},
            AnswerParsing(tools="hermes", max_calls=1),
        ),
        (
            ModelParsers("", "qwen3"),
            {"include_reasoning": False},
            AnswerParsing(reasoning="qwen3", shows_reasoning=False),
        ),
    ],
)
def test_parsing_follows_from_the_chat_and_the_model(
    parsers: ModelParsers, more: dict[str, Any], parsing: AnswerParsing | None
) -> None:
    assert parsing_of(read_openai("chat", CHAT | more), parsers, "prompt") == parsing


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("parallel_tool_calls", {"tools": [TOOL], "parallel_tool_calls": False}),
        ("include_reasoning", {"include_reasoning": False}),
    ],
)
def test_option_of_a_parser_that_the_model_lacks_is_refused(
    field: str, more: dict[str, Any]
) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        parsing_of(read_openai("chat", CHAT | more), ModelParsers(), None)
    assert raised.value.field == field


def test_card_names_the_parsers_before_the_template_does() -> None:
    template = "<think></think><tool_call></tool_call>"
    assert parsers_of(ModelCard(name="m"), template) == ("hermes", "qwen3")
    card = ModelCard(name="m", tool_parser="none", reasoning_parser="deepseek_r1")
    assert parsers_of(card, template) == ("", "deepseek_r1")


def test_parser_of_vllm_has_the_tools_and_cannot_end_an_answer() -> None:
    parsers, fields = ModelParsers("kimi_k2"), CHAT | {"tools": [TOOL]}
    parsing = parsing_of(read_openai("chat", fields), parsers, "prompt")
    assert parsing is not None
    assert json.loads(parsing.functions or b"") == [TOOL]
    with pytest.raises(InvalidPrompt, match="kimi_k2"):
        parsing_of(read_openai("chat", fields | {"parallel_tool_calls": False}), parsers, "prompt")


@pytest.mark.parametrize("name", ["kimi_k2", "unknown"])
def test_worker_without_the_parser_of_an_answer_refuses_it(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AnswerParser(AnswerParsing(tools=name), "a", EchoEngine(SystemClock(), 0.0).calls_parser)
