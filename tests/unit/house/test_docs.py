"""Tests of README and docs/: paths, links, settings, metrics and commands that they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvlane.app.cli import app
from kvlane.app.commands.settings_table import settings_markdown
from kvlane.app.settings import Settings, variable_name
from kvlane.streams.topics import TOPICS

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").iterdir()),
]
PAGES = [page for page in PAGES if page.is_file()]
SOURCE = "\n".join(file.read_text() for file in sorted((ROOT / "app").rglob("*.py")))
TESTS = "\n".join(file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py")))
FOLDERS = "app|streams|indexer|kvlane|workbench|tests|deploy|docs|examples"
SUFFIXES = ("_total", "_count", "_sum", "_bucket")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


@each_page
def test_links_have_targets(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s*]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@each_page
def test_paths_that_are_named_exist(page: Path) -> None:
    named = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*\w/?)", page.read_text())
    missing = [path for path in named if "*" not in path and not (ROOT / path).exists()]
    assert missing == []


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    missing = {name for name in named if f"def {name}(" not in TESTS}
    assert missing == set()


@each_page
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {variable_name(name) for name in Settings.model_fields}
    named = re.findall(r"KVLANE_(?!TEST_)[A-Z0-9_]*[A-Z0-9](?!\w|[*…])", page.read_text())
    assert [name for name in named if name not in known] == []


@each_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    """A name stands in the source, or the last part of one that is put together there."""
    missing = []
    for name in re.findall(r"\bkvlane_[a-z0-9_]*[a-z0-9](?![\w*]|_\*)", page.read_text()):
        bare = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
        parts = bare.split("_")
        ends = ("_".join(parts[start:]) for start in range(2, len(parts) - 1))
        if f'"{bare}"' not in SOURCE and not any(
            f'"{end}"' in SOURCE or f'"{end.removesuffix("_seconds")}"' in SOURCE for end in ends
        ):
            missing.append(name)
    assert missing == []


def commands_in(page: Path) -> Iterator[list[str]]:
    """The words after `kvlane`, of commands in backticks and in code blocks."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^(?:\$ |.*[;&|=] ?)?(?:\.venv/bin/)?kvlane (.*)$", blocks, re.MULTILINE)
    for line in [*lines, *re.findall(r"`kvlane ([^`]*)`", text)]:
        words = re.split(r"\s#|\s\||;", line)[0].split()
        if words and re.fullmatch(r"[a-z-]+", words[0]):
            yield words


def unknown_in(words: list[str]) -> list[str]:
    """The commands and options among the words after `kvlane` that do not exist."""
    command: Any = typer.main.get_command(app)
    rest = words
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if not {*rest[0].split("|")} <= command.commands.keys():
            return [" ".join(words)]
        command, rest = command.commands[rest[0].split("|")[0]], rest[1:]
    options = {"--help", *(name for each in command.params for name in each.opts)}
    return [f"{' '.join(words)}: {w}" for w in rest if w.startswith("--") and w not in options]


@each_page
def test_commands_that_are_named_exist(page: Path) -> None:
    assert [wrong for words in commands_in(page) for wrong in unknown_in(words)] == []


def commands(parent: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands of the product, with the words that lead to each."""
    yield path, parent
    for name, command in getattr(parent, "commands", {}).items():
        if name != "bench":
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))
each_command = pytest.mark.parametrize("path", COMMANDS, ids=" ".join)


@each_command
def test_help_of_a_command_has_examples_that_exist(path: tuple[str, ...]) -> None:
    found = re.findall(r"`(?:[A-Z_]+=\S+ )*kvlane ([^`|>]+)", COMMANDS[path].help)
    examples = [words.split() for words in found]
    assert [words for words in examples if tuple(words[: len(path)]) == path]
    assert [wrong for words in examples for wrong in unknown_in(words)] == []


@pytest.mark.parametrize(
    ("change", "folders", "examples"),
    [
        ("a routing policy", ("app",), ("least_loaded",)),
        ("a field of a request", ("app", "streams"), ("min_p", "max_thinking_tokens")),
        ("an end code", ("app", "streams"), ("pinned_gone",)),
        ("an HTTP endpoint", ("app/http",), ("/v1/embeddings", "/v1/files", "/v1/messages")),
    ],
)
def test_row_of_a_change_names_each_file_of_its_examples(
    change: str, folders: tuple[str, ...], examples: tuple[str, ...]
) -> None:
    """A new field or endpoint needs the files that an existing one of its kind stands in."""
    page = ROOT / "docs" / "architecture.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| {change} |"))
    named = {(page.parent / path).resolve() for path in re.findall(r"\]\(([^)#]+)", row)}
    pattern = re.compile(rf"(?<!\w)({'|'.join(examples)})(?!\w)")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    needed = {file for file in files if pattern.search(file.read_text())}
    assert needed
    assert {file for file in needed if named.isdisjoint((file, *file.parents))} == set()


def test_table_of_settings_is_complete() -> None:
    """Renew it with `kvlane settings --markdown`."""
    assert settings_markdown() in (ROOT / "docs" / "configuration.md").read_text()


def test_table_of_topics_is_complete() -> None:
    rows = (ROOT / "docs" / "kafka-protocol.md").read_text().split("## Topics")[1].split("\n\n")[1]
    assert re.findall(r"^\| `([\w-]+)` \|", rows, re.MULTILINE) == [topic.name for topic in TOPICS]


def test_changelog_has_each_heading_once_in_a_version() -> None:
    """Git merges it by union, which repeats entries of a section that has moved."""
    versions = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    for version in versions:
        headings = re.findall(r"^### .+", version, re.MULTILINE)
        assert len(headings) == len(set(headings)), version[:20]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    """Each number stands in the section of its command."""
    sections = re.split(r"^## ", (ROOT / "docs" / "benchmarks.md").read_text(), flags=re.MULTILINE)
    table = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("## ")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \| `(kvlane .*)` \|$", table, re.MULTILINE)
    assert rows
    for what, figure, command in rows:
        numbers = set(re.findall(r"\d+(?:\.\d+)?", figure)) - {"0"}  # in words there
        having = [section for section in sections if " ".join(command.split()[:3]) in section]
        assert any(numbers <= set(re.findall(r"\d+(?:\.\d+)?", s)) for s in having), what
