"""Tests of names in comments and docstrings: each exists, so that none outlives a renaming."""

import ast
import builtins
import importlib
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvlane

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("app", "streams", "indexer", "kvlane", "workbench")
OTHERS = ("tests", "examples", "deploy")
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`|\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\b")
FOREIGN = frozenset({
    # vLLM, aiokafka and Dynamo
    "SchedulerStats", "RequestOutput", "MessageBatch", "MessageAccumulator", "PositionalIndexer",
    "ConcurrentRadixTreeCompressed",
    # FastStream
    # Kafka, numba, sockets and HTTP
    "FETCH_SESSION_ID_NOT_FOUND", "INVALID_FETCH_SESSION_EPOCH", "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES", "SHUT_WR", "Origin", "Host",
    "hf_token", "README",
    # patterns of texts
    "kvl_ID_SECRET", "FROM", "TO",
    # tables of other tools
    "METRICS_PORT",
})  # fmt: skip
"""Names that are not of this code."""
SETTING = "KVLANE_"
CONSTANT = re.compile(r"(?<![\w+.-])([A-Z][A-Z0-9]+(?:_[A-Z0-9]+)*)\b(?!-)")
WORDS = frozenset({
    # formats, protocols and terms of the field
    "JSON", "JSONL", "HTML", "YAML", "HTTP", "ASGI", "CORS", "SASL", "ASCII", "HMAC", "SIMD",
    "LLVM", "H100",
    "AVX2", "SSE2", "XXH3", "EBNF", "TTFT", "NVIDIA", "NIXL", "EAGLE", "POST", "ROUTER", "NOTICE",
    # arguments of commands and patterns of names
    "FILE", "MODULE", "ARGUMENTS", "PORT", "TOKENS", "STEP", "TOTAL", "STEPS_PER_S", "SIDE",
    "BLOCKS", "WORKERS", "PAIRS", "PYTHON", "GROUP", "FOLDER", "ENGINE", "NAME", "KIND", "SEED",
})  # fmt: skip
"""Words in capital letters that are no constants."""
EXAMPLES = {
    "app.engine.interface": {}, "streams.client": {}, "streams.prompt": {}, "kvlane.serving": {},
    "kvlane.testing": {},
    "streams.kafka.connection_options": {"password": "secret"}, "indexer.block_hashes": {},
    "indexer.index": {"tokens": range(40)},
}  # fmt: skip
"""Modules with an example in a docstring, and the names that their readers supply."""


@cache
def tokens(file: Path) -> tuple[tokenize.TokenInfo, ...]:
    return tuple(tokenize.generate_tokens(io.StringIO(file.read_text()).readline))


def is_prose(token: tokenize.TokenInfo) -> bool:
    if token.type == tokenize.COMMENT:
        return True
    return token.type == tokenize.STRING and token.string.startswith('"""')


def files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def known() -> frozenset[str]:
    """All names in code, and all words in strings of the packages, such as names of metrics."""
    found: set[str] = set()
    for file in files(*PACKAGES, *OTHERS):
        has_words = file.relative_to(ROOT).parts[0] in PACKAGES
        for token in tokens(file):
            if token.type == tokenize.NAME:
                found.add(token.string)
            elif has_words and token.type == tokenize.STRING and not is_prose(token):
                found.update(re.findall(r"\w+", token.string))
    return frozenset(found)


def quoted(text: str) -> Iterator[str]:
    """The names in a text: in backquotes with an underscore or a capital letter, or constants."""
    for match in QUOTED.finditer(text):
        for name in (match[1] or match[2]).split("."):
            if ("_" in name or name != name.lower()) and not name.startswith(SETTING):
                yield name


def test_stale_name_is_found() -> None:
    assert list(quoted("see `gone_away`, `Index.match` and GONE_S, but `this`")) == [
        "gone_away", "Index", "GONE_S",
    ]  # fmt: skip
    assert "gone_away" not in known()


@pytest.mark.parametrize("package", PACKAGES)
def test_quoted_names_exist(package: str) -> None:
    stale = [
        f"{file.relative_to(ROOT)}:{token.start[0]}: {name}"
        for file in files(package)
        for token in tokens(file)
        if is_prose(token)
        for name in quoted(token.string)
        if name not in known() and name not in FOREIGN
    ]
    assert not stale, "\n".join(stale)


def test_every_foreign_name_is_in_use() -> None:
    used = {
        name
        for file in files(*PACKAGES)
        for token in tokens(file)
        if is_prose(token)
        for name in quoted(token.string)
    }
    assert used >= FOREIGN


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text())))


@cache
def docstrings(file: Path) -> tuple[ast.Constant, ...]:
    """The strings that stand alone: docstrings, and those below a constant or a field."""
    found = []
    for node in nodes(file):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                found.append(text)
    return tuple(found)


@cache
def names_of(file: Path) -> frozenset[str]:
    """The names in the code of a module, and the words in its strings."""
    prose = {id(node) for node in docstrings(file)}
    code = (node for node in nodes(file) if id(node) not in prose)
    return frozenset(name for node in code for name in _names(node))


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            yield name
        case ast.Constant(value=str(text)):
            yield from re.findall(r"\w+", text)


def imported_files(file: Path) -> Iterator[Path]:
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
                if path.is_file():
                    yield path


def stale_constants(file: Path) -> list[str]:
    """Constants in docstrings that neither the module nor one that it imports has; the text may
    name the file of another one."""
    reached = names_of(file).union(FOREIGN, WORDS, *map(names_of, imported_files(file)))
    return [
        f"{file.relative_to(ROOT)}:{node.lineno}: {name}"
        for node in docstrings(file)
        for name in CONSTANT.findall(node.value)
        if len(name) > 3 and not name.startswith((SETTING, "SIG"))
        if name not in reached
        if not any(name in names_of(other) for other in files_named(node.value))
    ]


def files_named(text: str) -> Iterator[Path]:
    for name in re.findall(r"[\w/]+\.py", text):
        if (ROOT / name).is_file():
            yield ROOT / name


@pytest.mark.parametrize("package", PACKAGES)
def test_constants_in_docstrings_are_in_reach_of_their_module(package: str) -> None:
    stale = [line for file in files(package) for line in stale_constants(file)]
    assert not stale, "\n".join(stale)


def examples(module: str) -> Iterator[ast.Module]:
    for node in docstrings(ROOT.joinpath(*module.split(".")).with_suffix(".py")):
        _, _, text = node.value.partition("Example:\n")
        if text:
            yield ast.parse(textwrap.dedent(text.rstrip()))


def test_every_example_is_checked() -> None:
    found = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files(*PACKAGES)
        for node in docstrings(file)
        if "Example:\n" in node.value
    }
    assert found == EXAMPLES.keys()


@pytest.mark.parametrize("module", EXAMPLES)
def test_names_in_examples_exist_and_pure_examples_run(module: str) -> None:
    name = module if module.startswith("kvlane.") else f"kvlane.{module}"
    scope = {**vars(builtins), **vars(importlib.import_module(name)), **EXAMPLES[module]}
    scope |= {name: getattr(kvlane, name) for name in kvlane.__all__}
    for example in examples(module):
        nodes = list(ast.walk(example))
        own = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.arg for n in nodes if isinstance(n, ast.arg)} | {"MyEngine"}
        loaded = {n.id for n in nodes if isinstance(n, ast.Name)}
        assert loaded - own - scope.keys() == set()
        if module not in ("streams.client", "kvlane.serving", "kvlane.testing"):  # they wait
            exec(compile(example, module, "exec"), dict(scope))
