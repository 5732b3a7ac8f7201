"""Parsers of an answer's text: its content, its reasoning and its tool calls.

    text ─► ReasoningParser ─► reasoning
                    └─content─► HermesParser ─► tool calls
                                        └─────► content
    text ─► HarmonyParser (gpt-oss) ─► all three

A parser gets the text of one token at a time. Its parts are a function of the text up to there, so
a worker that continues an answer finds the parts that readers have. Names are those of vLLM for the
same forms of text; `auto` reads the form from the chat template.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from kvlane.app.text.answer_parts import (
    AnswerPart,
    ContentParser,
    Emit,
    arguments_part,
    name_part,
    reasoning_part,
)
from kvlane.app.text.harmony_parser import HARMONY_REASONING, HARMONY_TOOLS, HarmonyParser
from kvlane.app.text.json_call import JsonCall, MalformedCall
from kvlane.streams.request import AnswerParsing

log = logging.getLogger(__name__)

ToolParserName = Literal[
    "auto",
    "none",
    "hermes",
    "openai",
    "qwen3_coder",
    "qwen3_xml",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax_m2",
]
VLLM_TOOL_PARSERS = frozenset(get_args(ToolParserName)) - {"auto", "none", "hermes", "openai"}
"""Of vLLM's own (`app/engine/vllm/calls_parser.py`)."""
ReasoningParserName = Literal[
    "auto", "none", "qwen3", "deepseek_r1", "deepseek_v4", "glm45", "glm47",
    "granite_thinking_parser", "holo2", "kimi_k2", "ling3", "mimo", "minicpmv", "minimax_m2",
    "mistral", "nemotron_v3", "openai_gptoss", "seed_oss", "step3p5",
]  # fmt: skip

PARSER_VERSION = 1
"""Of the rules of this module: another version may divide an answer otherwise."""
THINK, END_OF_THINK = "<think>", "</think>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"


class ReasoningTags(NamedTuple):
    """The tags of the reasoning of some models. `call`: the tag of a call, which ends the reasoning
    too. `is_open`: an answer begins within its reasoning, unless its prompt ends with `end`."""

    start: str = THINK
    end: str = END_OF_THINK
    call: str = ""
    is_open: bool = True


REASONING_TAGS = {
    "qwen3": ReasoningTags(is_open=False),
    "mistral": ReasoningTags("[THINK]", "[/THINK]", is_open=False),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>", "<seed:tool_call>"),
    "kimi_k2": ReasoningTags(call="<|tool_calls_section_begin|>"),
    "minimax_m2": ReasoningTags(call="<minimax:tool_call>"),
} | {
    "deepseek_r1": ReasoningTags(), "deepseek_v4": ReasoningTags(), "holo2": ReasoningTags()
} | dict.fromkeys(
    ("glm45", "glm47", "granite_thinking_parser", "ling3", "mimo", "minicpmv", "nemotron_v3",
     "step3p5"), ReasoningTags(call=CALL),
)  # fmt: skip
"""By the name of the parser (tests/vllm/test_vllm_parsers.py compares them with vLLM's)."""
_OTHER_FORMS = ("<function=", "<arg_key>", "<parameter=")
"""Forms of calls within the same tags that are no JSON."""


class AnswerParser:
    """The parser of one answer; `push` returns the parts that the next text completes."""

    def __init__(
        self, parsing: AnswerParsing, request_id: str, engine_calls: CallsFactory | None = None
    ) -> None:
        """`engine_calls`: the parsers of calls that the engine has (`Engine.calls_parser`). Raises
        ValueError for a parser or a version that this worker lacks."""
        if parsing.version != PARSER_VERSION:
            raise ValueError(
                f"the answer is parsed by version {parsing.version} of the rules, and this worker "
                f"has version {PARSER_VERSION}: run one version of workers and gateways"
            )
        self._parts: list[AnswerPart] = []
        emit = self._parts.append
        self._calls: ContentParser
        self._reasoning: ReasoningParser | HarmonyParser
        if is_harmony(parsing):
            self._calls = self._reasoning = HarmonyParser(emit, request_id, parsing)
            return
        self._calls = _calls_parser(parsing, request_id, emit, engine_calls)
        self._reasoning = ReasoningParser(self._calls, emit, parsing)

    @property
    def calls(self) -> int:
        """Number of tool calls that readers see."""
        return self._calls.calls

    @property
    def malformed_calls(self) -> int:
        """Number of calls that stayed content, or ended at a fault."""
        return self._calls.malformed_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._reasoning.is_reasoning

    @property
    def is_complete(self) -> bool:
        """Whether the answer ends here, since it has as many calls as it may have."""
        return self._calls.is_full

    def plain_part(self, text: str) -> AnswerPart | None:
        """As `ContentParser.plain_part`: cheaper than `push`, and the usual case."""
        return self._reasoning.plain_part(text)

    def push(self, text: str) -> list[AnswerPart]:
        self._reasoning.push(text)
        return self._take()

    def end(self) -> list[AnswerPart]:
        """The parts that were kept back, at the end of the answer."""
        self._reasoning.end()
        self._calls.end()
        return self._take()

    def _take(self) -> list[AnswerPart]:
        if not self._parts:
            return self._parts
        parts = self._parts.copy()
        self._parts.clear()
        return parts


CallsFactory = Callable[[AnswerParsing, str, Emit], ContentParser]


class HermesParser(ContentParser):
    """Tool calls as JSON between tags, after Nous Research's Hermes and Qwen.

    A call without a function's name, or whose text is no JSON before the name, stays content.
    Arguments are given out as they arrive: a fault behind the name ends the call there. White space
    between and behind calls is dropped.
    """

    def __init__(self, emit: Emit, request_id: str, max_calls: int) -> None:
        """`max_calls`: 0 for any number."""
        super().__init__(emit)
        self._request_id = request_id
        self._max_calls = max_calls
        self.calls = 0
        self._held = ""
        """Text that may begin a tag, or white space that may precede another call."""
        self._call: JsonCall | None = None
        self._raw = ""
        """Text of the call whose name is not known yet, with its tag."""
        self._is_announced = False
        """Whether readers have the name of the call."""
        self._awaits_end_tag = False

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        return bool(self._max_calls) and self.calls >= self._max_calls and self._call is None

    def plain_part(self, text: str) -> AnswerPart | None:
        call = self._call
        if call is None:
            is_tagged = self.calls or self._held or self._awaits_end_tag or CALL[0] in text
            return None if is_tagged else AnswerPart(text)
        if not self._is_announced or not call.push_within_string(text):
            return None
        return arguments_part(self.calls, text)

    def push(self, text: str) -> None:
        while text and not (self._max_calls and self.is_full):
            text = self._push_content(text) if self._call is None else self._push_call(text)

    def end(self) -> None:
        if self._call is not None:
            if self._call.name is None:
                self._emit(AnswerPart(self._raw))
            self._call = None
        elif self._held and not (self.calls and self._held.isspace()):
            self._emit(AnswerPart(self._held))
        self._held = ""

    def _push_content(self, text: str) -> str:
        """Read content up to the next call; returns the text behind its tag."""
        if (part := self.plain_part(text)) is not None:
            self._emit(part)
            return ""
        text, self._held = self._held + text, ""
        if self._awaits_end_tag:
            stripped = text.lstrip()
            if stripped.startswith(END_OF_CALL):
                self._awaits_end_tag = False
                return stripped.removeprefix(END_OF_CALL)
            if END_OF_CALL.startswith(stripped):
                self._held = text
                return ""
            self._awaits_end_tag = False
        before, rest, is_found = split_at_tag(text, CALL)
        if self.calls and before.isspace():
            before, rest = ("", rest) if is_found else ("", before + rest)
        elif self.calls and not is_found:  # white space may precede another call
            content = before.rstrip()
            before, rest = content, before[len(content) :] + rest
        elif self.calls:
            before = before.rstrip()
        if before:
            self._emit(AnswerPart(before))
        if not is_found:
            self._held = rest
            return ""
        self._call, self._raw, self._is_announced = JsonCall(), CALL, False
        return rest

    def _push_call(self, text: str) -> str:
        """Read a call up to its end; returns the text behind it."""
        call = self._call
        assert call is not None
        if (part := self.plain_part(text)) is not None:
            self._emit(part)
            return ""
        for place, char in enumerate(text):
            try:
                call.push(char)
            except MalformedCall as e:
                return self._end_malformed(call, str(e), text, place)
            if call.is_complete:
                self._emit_call(call)
                self._end_call(call)
                return text[place + 1 :]
            if call.name is None:
                self._raw += char
        self._emit_call(call)
        return ""

    def _emit_call(self, call: JsonCall) -> None:
        if call.name is None:
            return
        if not self._is_announced:
            self._is_announced = True
            self._emit(name_part(self._request_id, self.calls, call.name))
        if arguments := call.take_arguments():
            self._emit(arguments_part(self.calls, arguments))

    def _end_call(self, call: JsonCall) -> None:
        if not call.is_valid:
            self._warn("its arguments are no JSON")
        self.calls += 1
        self._call, self._raw, self._awaits_end_tag = None, "", True

    def _end_malformed(self, call: JsonCall, reason: str, text: str, place: int) -> str:
        """End a call at a fault; returns the text that is content now."""
        self._warn(reason)
        self._call = None
        if call.name is None:
            rest, self._raw = self._raw + text[place:], ""
            self._emit(AnswerPart(rest[: len(CALL)]))  # its tag begins no call again
            return rest[len(CALL) :]
        self._emit_call(call)
        self.calls += 1
        return text[place:]

    def _warn(self, reason: str) -> None:
        self.malformed_calls += 1
        log.warning("%s: a tool call is malformed: %s", self._request_id, reason)


class ReasoningParser:
    """Reasoning between tags at the beginning of an answer; what follows is content. The first tag
    may stand in the prompt; without it there is no reasoning, unless the answer begins within."""

    def __init__(self, content: ContentParser, emit: Emit, parsing: AnswerParsing) -> None:
        """Raises ValueError for a parser that this worker lacks."""
        self._content = content
        self._emit = emit
        self._shows = parsing.shows_reasoning
        self._is_open = parsing.in_reasoning
        self._held = ""
        self._state: Literal["begin", "reasoning", "content"] = "content"
        if parsing.reasoning:
            if parsing.reasoning not in REASONING_TAGS:
                raise ValueError(f"this worker has no reasoning parser {parsing.reasoning!r}")
            self._tags, self._state = REASONING_TAGS[parsing.reasoning], "begin"

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._state == "reasoning" or (self._state == "begin" and self._is_open)

    def plain_part(self, text: str) -> AnswerPart | None:
        """As `ContentParser.plain_part`."""
        if self._state == "content":
            return self._content.plain_part(text)
        if self._state == "begin" or self._held or self._tags.end[0] in text:
            return None
        return reasoning_part(text) if text and self._shows else AnswerPart()

    def push(self, text: str) -> None:
        if self._held:
            text, self._held = self._held + text, ""
        if self._state == "begin":
            text = self._push_beginning(text)
        if self._state == "reasoning":
            text = self._push_reasoning(text)
        if self._state == "content":
            self._content.push(text)

    def end(self) -> None:
        held, self._held = self._held, ""
        if self.is_reasoning:
            self._emit_reasoning(held)
        else:
            self._content.push(held)

    def _push_beginning(self, text: str) -> str:
        stripped, tag = text.lstrip(), self._tags.start
        if tag.startswith(stripped) and stripped != tag:
            self._held = text
            return ""
        is_found = stripped.startswith(tag)
        self._state = "reasoning" if is_found or self._is_open else "content"
        return stripped.removeprefix(tag) if is_found else text

    def _push_reasoning(self, text: str) -> str:
        tags = self._tags
        if tags.end[0] not in text:
            self._emit_reasoning(text)
            return ""
        cut = split_at_tag(text, tags.end)
        if tags.call:
            call = split_at_tag(text, tags.call)
            if (call.is_found, -len(call.before)) > (cut.is_found, -len(cut.before)):
                cut = call._replace(rest=text[len(call.before) :])
        self._emit_reasoning(cut.before)
        if cut.is_found:
            self._state = "content"
            return cut.rest
        self._held = cut.rest
        return ""

    def _emit_reasoning(self, text: str) -> None:
        if text and self._shows:
            self._emit(reasoning_part(text))


class TagSplit(NamedTuple):
    """`before`: text that precedes the tag, or cannot belong to it. `rest`: the text after the tag,
    or without `is_found` the text that may be its beginning."""

    before: str
    rest: str
    is_found: bool


def split_at_tag(text: str, tag: str) -> TagSplit:
    """Split a text at the first occurrence of a tag, or before its possible beginning at the end.

    The caller puts `rest` before the next piece, so the places of tags do not depend on the pieces.
    """
    if tag[0] not in text:
        return TagSplit(text, "", is_found=False)
    before, found, rest = text.partition(tag)
    if found:
        return TagSplit(before, rest, is_found=True)
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return TagSplit(text[:-length], text[-length:], is_found=False)
    return TagSplit(text, "", is_found=False)


def tool_parser_of(template: str) -> str:
    """The parser of the calls that a chat template asks for; "" if its form is not known."""
    if _is_harmony_template(template):
        return HARMONY_TOOLS
    is_hermes = CALL in template and END_OF_CALL in template
    return "hermes" if is_hermes and not any(form in template for form in _OTHER_FORMS) else ""


def reasoning_parser_of(template: str) -> str:
    """The parser of the reasoning in a chat template; "" if it has none."""
    if _is_harmony_template(template):
        return HARMONY_REASONING
    named = ("qwen3", "mistral", "seed_oss")
    return next((name for name in named if REASONING_TAGS[name].end in template), "")


def begins_in_reasoning(parser: str, prompt: str) -> bool:
    tags, prompt = REASONING_TAGS.get(parser), prompt.rstrip()
    if tags is None:
        return False
    return prompt.endswith(tags.start) or (tags.is_open and not prompt.endswith(tags.end))


def is_harmony(parsing: AnswerParsing) -> bool:
    return parsing.tools == HARMONY_TOOLS or parsing.reasoning == HARMONY_REASONING


def _is_harmony_template(template: str) -> bool:
    return "<|channel|>" in template and "<|message|>" in template


def has_special_tags(parsing: AnswerParsing) -> bool:
    """Whether tags may be special tokens, so that the text needs these."""
    names = {parsing.tools, parsing.reasoning}
    return not names <= {"", "hermes", "qwen3", "deepseek_r1"}


def _calls_parser(
    parsing: AnswerParsing, request_id: str, emit: Emit, engine_calls: CallsFactory | None
) -> ContentParser:
    if not parsing.tools:
        return ContentParser(emit)
    if parsing.tools == "hermes":
        return HermesParser(emit, request_id, parsing.max_calls)
    if parsing.tools not in VLLM_TOOL_PARSERS or engine_calls is None:
        raise ValueError(f"this worker has no tool parser {parsing.tools!r}")
    return engine_calls(parsing, request_id, emit)
