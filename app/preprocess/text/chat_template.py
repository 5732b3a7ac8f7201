"""Chat template of a model: renders the messages of a chat to the text of a prompt.

Jinja in its sandbox (`template_sandbox.py`), with the conventions of Hugging Face: `messages`,
`tools`, `documents`, `add_generation_prompt`, the special tokens by name, `raise_exception`,
`strftime_now` (in UTC, by the injected clock), `tojson` that leaves HTML alone, `{% break %}` and
`{% generation %}`. Messages are normalised first, as in vLLM (`_worded`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from time import thread_time
from typing import Any, Literal, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt
from kvlane.app.preprocess.text.template_sandbox import (
    RENDER_TIMEOUT_S,
    RenderBudget,
    TemplateSandbox,
    limited_by,
)
from kvlane.streams.clock import Clock

MAX_SOURCE_CHARS = 1024 * 1024
"""Characters of a template. The longest published ones have 20 000."""
MAX_DATE_FORMAT_CHARS = 200
MAX_ARGUMENTS_CHARS = 1024 * 1024
"""Characters of the arguments of a call; longer ones stay text: parsing would block the loop."""

ChatMessage = Mapping[str, Any]


class ChatTemplate:
    """One model's template, compiled. Raises BadModel when it is not Jinja."""

    def __init__(
        self,
        source: str,
        clock: Clock,
        special_tokens: Mapping[str, str] | None = None,
        *,
        timeout_s: float = RENDER_TIMEOUT_S,
        cpu_time: Callable[[], float] = thread_time,
    ) -> None:
        self.source = source
        self._clock = clock
        self._timeout_s = timeout_s
        self._cpu_time = cpu_time
        environment = _environment(clock)
        try:
            if len(source) > MAX_SOURCE_CHARS:
                raise BadModel(f"chat template: it has more than {MAX_SOURCE_CHARS} characters")
            with limited_by(RenderBudget(clock, timeout_s, cpu_time)):
                syntax = environment.parse(source)
                self._shape = _shape_of(syntax, source)
                self._variables = {node.name for node in syntax.find_all(nodes.Name)}
                self._template = environment.from_string(
                    environment.compiled(syntax), globals=dict(special_tokens or {})
                )
        except (TemplateError, SyntaxError, RecursionError, MemoryError, InvalidPrompt) as e:
            raise BadModel(f"chat template: {e}") from e

    def has_variable(self, name: str) -> bool:
        return name in self._variables

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt. `variables` are the template's own, and come last. Raises
        InvalidPrompt."""
        budget = RenderBudget(self._clock, self._timeout_s, self._cpu_time)
        try:
            values = dict(variables or {}) | {
                "messages": _worded(messages, self._shape),
                "tools": None if tools is None else list(map(_described, tools)),
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
            with limited_by(budget):
                return "".join(budget.bounded(self._template.generate(values)))
        except InvalidPrompt:
            raise
        except RecursionError:
            raise InvalidPrompt("messages", "the chat template never ends with them") from None
        except MemoryError:
            raise InvalidPrompt("messages", "the chat template makes too much of them") from None
        except Exception as e:  # a template can raise any exception
            raise InvalidPrompt("messages", f"the chat template cannot take them: {e}") from e


def _environment(clock: Clock) -> TemplateSandbox:
    environment = TemplateSandbox([_GenerationTag, loopcontrols])
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception

    def strftime_now(form: str) -> str:
        if len(form) > MAX_DATE_FORMAT_CHARS or any(map(str.isdigit, form)):
            raise ValueError(
                f"strftime_now takes {MAX_DATE_FORMAT_CHARS} characters, and no widths"
            )
        return datetime.fromtimestamp(clock.wall_ms() / 1000, UTC).strftime(form)

    environment.globals["strftime_now"] = strftime_now
    return environment


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: marks answers for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Shape(NamedTuple):
    """The input that a template takes, by its syntax: it loops over the `parts` of a content, takes
    content that is a text, has a role developer, reads reasoning as `thinking`, writes arguments as
    text, and calls only of messages whose content is null. `id_form`: of the ids of calls."""

    parts: bool
    texts: bool
    developer: bool
    thinking: bool
    text_arguments: bool
    null_content: bool
    id_form: Literal["any", "named", "short"]


def _shape_of(syntax: nodes.Template, source: str) -> _Shape:
    names = _content_names(syntax)
    parts = any(_is_field(loop.iter, "content", names) for loop in syntax.find_all(nodes.For))
    tests = (test for test in syntax.find_all(nodes.Test) if _is_field(test.node, "content", names))
    short: Literal["short", "any"] = "short" if _SHORT_ID.search(source) else "any"
    return _Shape(
        parts=parts,
        texts=not parts or any(test.name in _TESTS_OF_TEXT for test in tests),
        developer=any(const.value == "developer" for const in syntax.find_all(nodes.Const)),
        thinking=any(map(_is_thinking, syntax.find_all((nodes.Getattr, nodes.Getitem)))),
        text_arguments=_takes_text_arguments(syntax),
        null_content=any(map(_is_null_branch, syntax.find_all(nodes.If))),
        id_form="named" if _NAMED_CALL in source else short,
    )


_NAMED_CALL = "<|tool_call_argument_begin|>"
"""Of Kimi, whose calls name their function in their id alone: such as `functions.search:0`."""
_SHORT_ID = re.compile(r"\|\s*length\s*!=\s*9\b")
"""Of Mistral, whose templates refuse other ids."""


def _is_thinking(node: nodes.Node) -> bool:
    return _is_field(node, "thinking")


def _takes_text_arguments(syntax: nodes.Template) -> bool:
    """Whether the arguments of calls are joined to texts, and never written as JSON."""
    filters = syntax.find_all(nodes.Filter)
    if any(each.name == "tojson" and _is_field(each.node, "arguments") for each in filters):
        return False
    joins = syntax.find_all((nodes.Add, nodes.Concat, nodes.Output))
    operands = (operand for join in joins for operand in join.iter_child_nodes())
    return any(_is_field(operand, "arguments") for operand in operands)


def _is_null_branch(branch: nodes.If) -> bool:
    """Whether calls are written where a content is null."""
    loops = nodes.Template(branch.body).find_all(nodes.For)
    return any(_is_field(loop.iter, "tool_calls") for loop in loops) and any(
        isinstance(term, nodes.Test) and term.name == "none" and _is_field(term.node, "content")
        for term in _terms(branch.test)
    )


def _terms(condition: nodes.Node) -> Iterator[nodes.Node]:
    """The conditions that must all hold."""
    if isinstance(condition, nodes.And):
        yield from _terms(condition.left)
        yield from _terms(condition.right)
    else:
        yield condition


_TESTS_OF_TEXT = ("string", "iterable", "sequence", "mapping")


def _content_names(syntax: nodes.Template) -> set[str]:
    """The variables that are set to the content of a message."""
    names = set[str]()
    for assigned in syntax.find_all(nodes.Assign):
        is_plain = not isinstance(assigned.node, nodes.Filter)  # which may make a list of a text
        if isinstance(assigned.target, nodes.Name) and is_plain:
            names |= {assigned.target.name} if _is_field(assigned.node, "content", names) else set()
    return names


def _is_field(node: nodes.Node | None, field: str, names: Collection[str] = ()) -> bool:
    """Whether an expression is this field, or a variable of its name or of `names`, with any
    filters, or something in its absence."""
    match node:
        case nodes.Name(name=name):
            return name == field or name in names
        case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return bool(name == field)
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=name), *_]):
            return bool(name == field)
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Or(left=inner):
            return _is_field(inner, field, names)
        case nodes.CondExpr(expr1=inner):
            return _is_field(inner, field, names)
    return False


def _worded(messages: Sequence[ChatMessage], shape: _Shape) -> list[dict[str, Any]]:
    """Messages in the form that templates expect.

    - Content is always there: a text where the template takes texts, otherwise parts. Instructions
      and results are one part, since templates take the first one, or write parts as they are. That
      of an answer that is a refusal is its text.
    - Fields that are null or empty are left out.
    - The arguments of tool calls are objects, or text where the template joins them to texts.
    - The ids of calls have the form that the template needs.
    - The older calls of functions are tool calls; their results are those of tools.
    - The role developer is system, for templates without it.
    """
    worded = [_message(message, number, shape) for number, message in enumerate(messages)]
    if shape.id_form != "any":
        _rename_calls(worded, shape.id_form)
    return list(_split_calls(worded)) if shape.null_content else worded


def _message(message: ChatMessage, number: int, shape: _Shape) -> dict[str, Any]:
    worded = {
        name: value
        for name, value in message.items()
        if name in ("role", "content") or not (value is None or value in ([], {}))
    }
    content, refusal = message.get("content"), message.get("refusal")
    if content is None and isinstance(refusal, str):
        content = refusal
    worded["content"] = content = _content(content, worded["role"], shape)
    match worded["role"]:
        case "developer" if not shape.developer:
            worded["role"] = "system"
        case "function":
            worded["role"] = "tool"
            worded.setdefault("tool_call_id", _call_id(number - 1))
    if isinstance(call := worded.pop("function_call", None), Mapping):
        called = {"id": _call_id(number), "type": "function", "function": call}
        worded.setdefault("tool_calls", [called])
    if isinstance(calls := worded.get("tool_calls"), list):
        worded["tool_calls"] = [_called(call, shape) for call in calls]
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if name in worded:  # both names are in use
            worded.setdefault(other, worded[name])
    if shape.thinking and "reasoning" in worded and not ("tool_calls" in worded and content):
        worded.setdefault("thinking", worded["reasoning"])  # gpt-oss takes one of both with calls
    return worded


def _rename_calls(messages: Sequence[dict[str, Any]], form: Literal["named", "short"]) -> None:
    """Give calls, and their results, ids in a form, unless they have it."""
    pattern, number, names = _ID_FORMS[form], 0, dict[Any, str]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            known, name = str(call.get("id", "")), call["function"].get("name")
            if not pattern.fullmatch(known):
                call["id"] = f"functions.{name}:{number}" if form == "named" else f"tool{number:05}"
            names[known] = call["id"]
            number += 1
        known = str(message.get("tool_call_id", ""))
        if message["role"] == "tool" and known in names:
            message["tool_call_id"] = names[known]


_ID_FORMS = {
    "named": re.compile(r"functions\.[^:]+:\d+"), "short": re.compile(r"[0-9A-Za-z]{9}")
}  # fmt: skip


def _split_calls(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages with calls behind a message of their own for their text."""
    for message in messages:
        calls = message.get("tool_calls")
        if calls and message["content"]:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
        yield message | {"content": None} if calls else message


_ONE_PART = ("system", "developer", "tool", "function")
"""Roles whose content is one text, whatever its parts."""


def _content(content: Any, role: str, shape: _Shape) -> Any:
    if isinstance(content, list) and shape.parts and role not in _ONE_PART:
        return [_text_part(part) for part in content]
    if isinstance(content, list):
        content = "\n".join(_text_part(part)["text"] for part in content)
    if shape.texts:
        return "" if content is None else content
    return [] if content is None else [{"type": "text", "text": content}]


def _text_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part in the form that all templates know; a refusal is the text of an answer. Templates
    take any other key for a part of another kind (`'image_url' in part`), also with null."""
    return {"type": "text", "text": part.get("text", part.get("refusal", ""))}


def _call_id(number: int) -> str:
    """Id of a call that came without one. Some models demand nine letters and digits."""
    return f"call{number:05d}"


def _called(call: Mapping[str, Any], shape: _Shape) -> dict[str, Any]:
    call = {name: value for name, value in call.items() if value is not None}
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        function["arguments"] = {}
    elif isinstance(arguments, str) and len(arguments) <= MAX_ARGUMENTS_CHARS:
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:  # the model wrote it: the template has to take it as it is
            function["arguments"] = arguments
    if shape.text_arguments and not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": function}


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose function has parameters, which OpenAI's API lets clients leave out."""
    function = {k: value for k, value in (tool.get("function") or {}).items() if value is not None}
    parameters = dict(function.get("parameters") or {"type": "object"})
    if parameters.get("type") == "object":
        parameters.setdefault("properties", {})
    return {k: value for k, value in tool.items() if value is not None} | {
        "function": function | {"parameters": parameters}
    }


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - same
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise InvalidPrompt("messages", str(message))
