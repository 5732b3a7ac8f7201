"""Names that comments and docstrings quote exist in the code, so that none outlives a renaming."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("app", "streams", "indexer", "kvlane", "workbench")
OTHERS = ("tests", "examples", "deploy")
QUOTED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`|\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\b")
FOREIGN = frozenset({
    # vLLM, aiokafka and Dynamo
    "SchedulerStats", "RequestOutput", "MessageBatch", "MessageAccumulator", "PositionalIndexer",
    "ConcurrentRadixTreeCompressed",
    # FastStream
    "batch_timeout_ms",
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


def tokens(file: Path) -> Iterator[tokenize.TokenInfo]:
    yield from tokenize.generate_tokens(io.StringIO(file.read_text()).readline)


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
