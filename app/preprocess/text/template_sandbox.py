"""Jinja sandbox of chat templates: bounds on the rounds, the time and the memory of a rendering.

Each operation that makes a value (filters, methods, operators, slices, texts of blocks and macros,
conversions to text) is checked before it runs and counted after it. The size of a result is
estimated from its operands: by default the product of their sizes, with numbers as factors; the
tables below name the operations with a smaller result. Loops and macros count their rounds.
Templates are compiled under the same bounds, since Jinja computes constants then.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from math import prod
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.streams.clock import Clock

RENDER_TIMEOUT_S = 2.0
MAX_LOOP_ROUNDS = 1_000_000
"""Bound of one rendering; a chat of 1000 messages takes some 10 000."""
MAX_RENDERED_CHARS = 32 * 1024 * 1024
"""Characters that a rendering may make; the prompt of a request is shorter by far."""
MAX_VALUE_SIZE = 64 * 1024 * 1024
"""Estimated characters and items of one value, above a body whose every character is escaped."""
MAX_MADE_BYTES = 256 * 1024 * 1024
"""Bytes of all values that a rendering makes, kept or not."""
MAX_ITEMS = 1_000_000
"""Items in a list, with the lists in it, that is turned into text or otherwise gone through."""
MAX_FORMAT_WIDTH = 9999

_ITEM_BYTES = 64  # of a small object in a list
_ESCAPED = 6

_BY_REFERENCE = frozenset({
    "attr", "count", "d", "default", "endswith", "find", "first", "float", "get", "index", "int",
    "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace",
    "istitle", "isupper", "items", "keys", "last", "length", "map", "random", "reject",
    "rejectattr", "rfind", "rindex", "select", "selectattr", "startswith", "values", "wordcount",
})  # fmt: skip
"""Filters and methods that make no new value, a small one, or an iterator."""
_AS_LONG = frozenset({
    "capitalize", "casefold", "copy", "dict", "dictsort", "groupby", "list", "lower", "lstrip",
    "max", "min", "partition", "removeprefix", "removesuffix", "reverse", "rpartition", "rstrip",
    "safe", "sort", "strip", "swapcase", "title", "trim", "unique", "upper",
})  # fmt: skip
"""Those whose result is about as long as their operands together."""
_TO_LIST = frozenset({"groupby", "list", "sort", "unique"})
"""Those that make a list of the characters of a text."""
_AS_TEXT = frozenset({"e", "encode", "escape", "forceescape", "string", "urlencode"})
_REMOVED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
"""Filters for web pages, which take much more time and memory than their results say."""
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
_WIDE = re.compile(
    r"%[-#0 +]*(?:\*|\d{5})|%[^%a-zA-Z]*\.(?:\*|\d{5})|\{[^{}]*\{|:[^{}]*\d{5}[^{}]*\}"
)
"""A width in a format that is an argument, or above MAX_FORMAT_WIDTH."""


class RenderBudget:
    """The remaining time, rounds and memory of one rendering, or of one compilation.

    The time is that of the thread on a processor: no prompt is invalid because a process was
    stopped or a machine is busy. It is read from `timeout_s` of the clock on: a reading costs 1 µs.
    """

    def __init__(self, clock: Clock, timeout_s: float, cpu_time: Callable[[], float]) -> None:
        self._clock = clock
        self._cpu_time = cpu_time
        self._timeout_s = timeout_s
        self._deadline = clock.now() + timeout_s
        self._cpu_limit = cpu_time() + timeout_s
        self._rounds = 0
        self._made_bytes = 0

    def spend(self) -> None:
        """One round more. Raises InvalidPrompt when it is one too many."""
        self._rounds += 1
        if self._rounds > MAX_LOOP_ROUNDS:
            raise InvalidPrompt(
                "messages", f"the chat template takes over {MAX_LOOP_ROUNDS} rounds"
            )
        self._check_time()

    def count(self, value: Any, *, is_new: bool) -> None:
        """A value was made. `is_new`: with all that is in it. Raises InvalidPrompt when all
        together are too large."""
        self._made_bytes += sys.getsizeof(value)
        if isinstance(value, list | tuple):
            self._made_bytes += _ITEM_BYTES * len(value)
            if is_new:
                self._made_bytes += sum(map(sys.getsizeof, value))
        if self._made_bytes > MAX_MADE_BYTES:
            raise InvalidPrompt(
                "messages", f"the chat template makes more than {MAX_MADE_BYTES} bytes of values"
            )
        self._check_time()

    def _check_time(self) -> None:
        if self._clock.now() > self._deadline and self._cpu_time() > self._cpu_limit:
            raise InvalidPrompt(
                "messages",
                f"the chat template takes more than {self._timeout_s:g} s of processor time",
            )

    def bounded(self, pieces: Iterator[str]) -> Iterator[str]:
        length = 0
        for piece in pieces:
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise InvalidPrompt(
                    "messages", f"they give more than {MAX_RENDERED_CHARS} characters"
                )
            yield piece


_current: ContextVar[RenderBudget] = ContextVar("budget")


@contextmanager
def limited_by(budget: RenderBudget) -> Iterator[None]:
    """Everything that templates do meanwhile counts towards this budget."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Sequence[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            optimized=False,
            finalize=self.as_text,
        )
        del self.globals["lipsum"]
        for name in _REMOVED:
            del self.filters[name]
        for name in self.filters:
            self.add_filter(name, self.filters[name])

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Offer a filter, with its operands and its result checked."""
        has_context = hasattr(work, "jinja_pass_arg")

        @functools.wraps(work)
        def checked(*args: Any, **options: Any) -> Any:
            context, args = args[:has_context], args[has_context:]
            operands, options = _listed(name, args, options)
            return _made(work(*context, *operands, **options))

        self.filters[name] = checked

    def compiled(self, syntax: nodes.Template) -> nodes.Template:
        """The syntax of a template with calls of the checks in this class."""
        checked = _Checks(self).visit(syntax)
        assert isinstance(checked, nodes.Template)
        return checked

    # --- called by templates ---

    def spend(self) -> str:
        _current.get().spend()
        return ""

    def call(self, context: Context, obj: Any, *args: Any, **options: Any) -> Any:
        """A function or method; those of Python's own values are checked."""
        owner = getattr(obj, "__self__", None)
        if owner is self:
            return obj(*args)
        if isinstance(obj, LoopContext):
            args = tuple(map(self.iterated, args))
        if obj is not dict and not isinstance(owner, _PLAIN):
            return super().call(context, obj, *args, **options)
        options = {name: value for name, value in options.items() if name not in _OF_JINJA}
        operands, options = _listed(obj.__name__, (owner, *args), options)
        made = super().call(context, obj, *operands[1:], **options)
        return _made(made, is_new=isinstance(owner, str))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = _size_of_operation(operator, left, right)
        if size > MAX_VALUE_SIZE:
            _check(size, f"operator {operator}")
        return _made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As in Jinja; keeps the text, for `call`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            vars(wrapped)["__self__"] = value.__self__
        return wrapped

    def concat(self, pieces: Iterable[str]) -> Any:
        pieces = list(pieces)
        _check(sum(map(len, pieces)), "block")
        return _made("".join(pieces))

    def joined(self, *values: Any) -> Any:
        return _made(str_join(map(self.as_text, values)))

    def sliced(self, value: Any, *bounds: Any) -> Any:
        return _made(value[slice(*bounds)])

    def iterated(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict) and len(value) > MAX_LOOP_ROUNDS:
            raise SecurityError(f"a loop over {len(value)} items is too long")
        return value

    def nested(self, value: Any) -> Any:
        """A list with others in it, which counts one that it holds many times each time."""
        size_of(value)
        return _made(value)

    def as_text(self, value: Any) -> Any:
        if not isinstance(value, str):
            _check(_ESCAPED * size_of(value), "text of a value")
        return value


_PLAIN = (str, bytes, int, float, list, tuple, dict, set, frozenset, type)
_SMALL = frozenset({str, int, float, bool, type(None), list, tuple, dict})
_OF_JINJA = ("_loop_vars", "_block_vars")
_LISTS = (list, tuple, set, frozenset)
_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))


class _Checks(NodeTransformer):
    """Puts calls of the checks where Jinja's compiler would call Python itself."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - named by Jinja
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = self._call("iterated", node.iter, at=node)
        self._count(node)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        self._count(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        self._count(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("joined", *node.nodes, at=node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        cut = node.arg
        bounds = [nodes.Const(None) if b is None else b for b in (cut.start, cut.stop, cut.step)]
        return self._call("sliced", node.node, *bounds, at=node)

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        is_plain = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_plain else self._call("nested", node, at=node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._call("nested", node, at=node) if node.items else node

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
        node.body.insert(0, self._placed(nodes.Output([self._call("spend", at=node)]), node))

    def _call(self, name: str, *args: nodes.Expr, at: nodes.Node) -> nodes.Call:
        check = nodes.EnvironmentAttribute(name)
        call = self._placed(nodes.Call(check, list(args), [], None, None), at)
        assert isinstance(call, nodes.Call)
        return call

    def _placed(self, node: nodes.Node, at: nodes.Node) -> nodes.Node:
        node.set_lineno(at.lineno)
        return node.set_environment(self._environment)


# --- sizes ----------------------------------------------------------------------------------------


def size_of(value: Any) -> int:
    """Characters and items of a value, with all in it; a part that is held twice counts twice.
    Raises SecurityError for too many items."""
    if isinstance(value, str | bytes):
        return len(value)
    size = items = 0
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 3
        elif isinstance(one, dict):
            items += 2 * len(one)
            if items <= MAX_ITEMS:
                stack += one
                stack += one.values()
        elif isinstance(one, _LISTS):
            items += len(one)
            if items <= MAX_ITEMS:
                stack += one
        if items > MAX_ITEMS:
            raise SecurityError(f"a value with more than {MAX_ITEMS} items is too large")
    return size + 4 * items + 1


def _check(size: int, what: str) -> None:
    if size > MAX_VALUE_SIZE:
        raise SecurityError(f"{what}: its result would be too large")


def _made(value: Any, *, is_new: bool = False) -> Any:
    _current.get().count(value, is_new=is_new)
    return value


def _listed(
    name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The operands of a filter or method, with iterators as lists, of checked sizes."""
    operands = [_as_list(value) for value in args]
    named = {key: _as_list(value) for key, value in options.items()}
    if operands and name not in _BY_REFERENCE:
        _check(_size_of_result(name, operands, named), name)
    return operands, named


def _as_list(value: Any) -> Any:
    """A list of what an iterator or a view gives; other values as they are."""
    if type(value) in _SMALL or not isinstance(value, (Iterator, *_VIEWS)):
        return value
    if isinstance(value, LoopContext):
        return value
    given: Any = value
    items = _made(list(islice(given, MAX_ITEMS + 1)))
    _check(_ITEM_BYTES * len(items), "iterator")
    return items


def _size_of_result(  # noqa: C901 - a table
    name: str, operands: Sequence[Any], named: Mapping[str, Any]
) -> int:
    values = [*operands, *named.values()]
    size = _ESCAPED * _product(values)
    match name, values:
        case "tojson", [value, *_]:
            indent = named.get("indent") or next(iter(operands[2:3]), 0)
            size = _ESCAPED * size_of(value) * _factor(indent)
        case "replace", [str(text), str(old), str(new), *_]:
            size = len(text) + text.count(old) * len(new)
        case "join", [first, *others]:
            is_method = isinstance(first, str)
            items, separators = (others, [first]) if is_method else ([first], others)
            between = sum(map(size_of, separators))
            size = _ESCAPED * sum(map(size_of, items)) + _count(items) * between
        case "indent", [str(text), *options]:
            widths = [_factor(o) if isinstance(o, int) else size_of(o) for o in options]
            size = len(text) + (text.count("\n") + 1) * max(widths, default=4)
        case (("split" | "rsplit"), [str(text), str(separator), *_]):
            size = len(text) + _ITEM_BYTES * text.count(separator)
        case (("split" | "rsplit" | "splitlines"), [str(text), *_]):
            size = len(text) + _ITEM_BYTES * sum(map(text.count, _SPACES))
        case (("format" | "format_map"), [str(text), *arguments]):
            size = _formatted_size(text, arguments)
        case _ if name in _TO_LIST and isinstance(operands[0], str):
            size = _ITEM_BYTES * len(operands[0])
        case _ if name in _AS_LONG:
            size = 2 * sum(map(size_of, values))
        case _ if name in _AS_TEXT:
            size = _ESCAPED * sum(map(size_of, values))
    return size


def _count(items: Sequence[Any]) -> int:
    return sum(len(one) if hasattr(one, "__len__") else 1 for one in items)


def _formatted_size(text: str, arguments: Sequence[Any]) -> int:
    if _WIDE.search(text):
        raise SecurityError(f"a format has no width above {MAX_FORMAT_WIDTH}, and none by argument")
    fields = text.count("{") + text.count("%")
    width = MAX_FORMAT_WIDTH if any(map(str.isdigit, text)) else 0
    return len(text) + fields * (width + _ESCAPED * sum(map(size_of, arguments)))


def _size_of_operation(operator: str, left: Any, right: Any) -> int:
    """The size of an operator's result. Raises SecurityError for powers."""
    if operator == "+" and isinstance(left, str) and isinstance(right, str):  # mostly
        return len(left) + len(right)
    if operator == "**":
        raise SecurityError("the operator ** is not available")
    if operator == "%" and isinstance(left, str | bytes):
        return _formatted_size(left if isinstance(left, str) else left.decode("latin-1"), [right])
    if isinstance(left, _SEQUENCES) or isinstance(right, _SEQUENCES):
        sizes = [len(one) if isinstance(one, _SEQUENCES) else 0 for one in (left, right)]
        if operator == "+":
            return sum(sizes)
        is_list = any(isinstance(one, list | tuple) for one in (left, right))
        size = max(sizes) * max(_factor(left), _factor(right))
        return size * (_ITEM_BYTES if is_list else 1)
    if isinstance(left, int) and isinstance(right, int) and operator == "*":
        return (left.bit_length() + right.bit_length()) ** 2 // 16  # the time, too
    return 1


_SEQUENCES = (str, bytes, list, tuple)


def _product(values: Sequence[Any]) -> int:
    first, *others = values
    factors = [_factor(v) if isinstance(v, int) else size_of(v) + 1 for v in others]
    return prod([size_of(first) + 1, *factors])


def _factor(value: Any) -> int:
    return abs(value) + 1 if isinstance(value, int) else 1
