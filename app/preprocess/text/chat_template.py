"""Chat template of a model: renders the messages of a chat to the text of a prompt.

Jinja in its sandbox, with the conventions of Hugging Face: `messages`, `tools`, `documents`,
`add_generation_prompt`, the special tokens by name, `raise_exception`, `strftime_now` (in UTC, by
the injected clock), `tojson` that leaves HTML alone, `{% break %}` and `{% generation %}`.

The template is the model's and trusted as far as its maker; the messages are not. A rendering that
takes too long is aborted: loops and macros count their rounds. Rendering errors are reported to the
client, since its messages determine the path through the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.preprocess.prompt_errors import BadModel, InvalidPrompt
from streams.clock import Clock

RENDER_TIMEOUT_S = 2.0
MAX_LOOP_ROUNDS = 1_000_000
"""Bounds of one rendering. A chat of 1000 messages takes some 10 000 rounds and 20 ms."""
MAX_RENDERED_CHARS = 32 * 1024 * 1024
"""Characters that a rendering may make; the prompt of a request is shorter by far."""

MAX_ARGUMENTS_CHARS = 1024 * 1024
"""Characters of the arguments of a call; longer ones stay text: parsing would block the loop."""

_BUDGET = "kvlane budget"  # no template can have a variable of this name
_CLOCK_ROUNDS = 64  # looks at the clock once in so many rounds

Message = Mapping[str, Any]


class ChatTemplate:
    """One model's template, compiled. Raises BadModel when it is not Jinja."""

    def __init__(
        self,
        source: str,
        clock: Clock,
        special_tokens: Mapping[str, str] | None = None,
        *,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        """`special_tokens`: by the names that templates use: bos_token, eos_token and so on."""
        self._clock = clock
        self._timeout_s = timeout_s
        environment = _Environment(clock)
        try:
            syntax = environment.parse(source)
            self._takes_parts = _takes_parts(syntax)
            _count_rounds(syntax, environment)
            self._template = environment.from_string(syntax, globals=dict(special_tokens or {}))
        except TemplateError as e:
            raise BadModel(f"chat template: {e}") from e

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt. `variables` are the template's own, and come last.

        Raises InvalidPrompt.
        """
        budget = _Budget(self._clock, self._timeout_s)
        values = dict(variables or {}) | {
            "messages": [_worded(m, takes_parts=self._takes_parts) for m in messages],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET: budget,
        }
        try:
            return "".join(budget.bounded(self._template.generate(values)))
        except InvalidPrompt:
            raise
        except RecursionError:
            raise InvalidPrompt("messages", "the chat template never ends with them") from None
        except MemoryError:
            raise InvalidPrompt("messages", "the chat template makes too much of them") from None
        except Exception as e:  # a template can raise any exception
            raise InvalidPrompt("messages", f"the chat template cannot take them: {e}") from e


class _Budget:
    """The remaining budget of one rendering."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = clock.now() + timeout_s
        self._rounds = 0

    def spend(self) -> None:
        """One round more. Raises InvalidPrompt when it is one too many."""
        self._rounds += 1
        if self._rounds > MAX_LOOP_ROUNDS:
            raise InvalidPrompt(
                "messages", f"the chat template takes over {MAX_LOOP_ROUNDS} rounds"
            )
        if self._rounds % _CLOCK_ROUNDS == 0 and self._clock.now() > self._deadline:
            raise InvalidPrompt(
                "messages", f"the chat template takes longer than {self._timeout_s:g} s"
            )

    def bounded(self, pieces: Iterator[str]) -> Iterator[str]:
        """The pieces of a rendering, as long as they are short enough together."""
        length = 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise InvalidPrompt(
                    "messages", f"they give more than {MAX_RENDERED_CHARS} characters"
                )
            yield piece


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the functions that templates of Hugging Face expect."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: _utc(clock).strftime(form)

    def spend(self, context: Context) -> str:
        """Called by every round of a loop or macro; writes nothing."""
        context.resolve(_BUDGET).spend()
        return ""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse to make endless text or numbers with one operator."""
        if operator == "**" or any(
            isinstance(one, str | list | tuple)
            and isinstance(many, int)
            and many > MAX_RENDERED_CHARS
            for one, many in ((left, right), (right, left))
        ):
            raise SecurityError(f"the operator {operator} is not available for these")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: marks answers for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The text between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _count_rounds(syntax: nodes.Template, environment: _Environment) -> None:
    """Put a call of `spend` at the beginning of every loop and macro."""
    blocks: list[nodes.For | nodes.Macro] = [*syntax.find_all(nodes.For)]
    blocks += syntax.find_all(nodes.Macro)
    for block in blocks:
        call = nodes.Call(
            nodes.EnvironmentAttribute("spend"), [nodes.ContextReference()], [], None, None
        )
        statement = nodes.Output([call])
        statement.set_lineno(block.lineno)
        statement.set_environment(environment)
        block.body.insert(0, statement)


def _takes_parts(syntax: nodes.Template) -> bool:
    """Whether the template goes through the parts of a message's content by itself."""
    return any(_is_content(loop.iter) for loop in syntax.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_content(inner)
    return False


def _worded(message: Message, *, takes_parts: bool) -> dict[str, Any]:
    """A message as templates expect it: content as one text if they have no parts, the arguments
    of tool calls as objects."""
    worded = dict(message)
    content = message.get("content")
    if isinstance(content, list) and not takes_parts:
        worded["content"] = "\n".join(str(part.get("text", "")) for part in content)
    if calls := message.get("tool_calls"):
        worded["tool_calls"] = [_called(call) for call in calls]
    return worded


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str) and len(arguments) <= MAX_ARGUMENTS_CHARS:
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError:  # the model wrote it: the template has to take it as it is
            function["arguments"] = arguments
    return {**call, "function": function}


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


def _utc(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.wall_ms() / 1000, UTC)
