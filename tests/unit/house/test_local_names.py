"""Tests of the names of parameters: an object of one type has one name, or two, everywhere."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(f for folder in ("app", "streams", "indexer") for f in (ROOT / folder).rglob("*.py"))
MOST_NAMES = 2
SECOND_OPERAND = "other"


def table() -> dict[str, set[str]]:
    """Names by type, from CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = page.partition("| type | its parameters |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [re.findall(r"`(\w+)`", row) for row in rows.splitlines()]
    return {kind: set(names) for kind, *names in cells}


def names_by_type() -> dict[str, dict[str, str]]:
    """For each class of the product the names of its parameters, each with a file that has it."""
    trees = {file: ast.parse(file.read_text()) for file in FILES}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name for _, node in nodes if isinstance(node, ast.ClassDef)}
    names: dict[str, dict[str, str]] = defaultdict(dict)
    for file, node in nodes:
        if not isinstance(node, ast.arguments):
            continue
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs):
            kind = (
                ast.unparse(argument.annotation or ast.Name("")).strip("'").removesuffix(" | None")
            )
            name = argument.arg.lstrip("_")
            if kind in classes and name not in {"", SECOND_OPERAND}:
                names[kind][name] = str(file.relative_to(ROOT))
    return names


def without_roles(names: set[str]) -> set[str]:
    """The names, without those that put a role before another one: `session_rank` is a `rank`."""
    return {name for name in names if not any(name.endswith(f"_{other}") for other in names)}


def test_parameters_of_a_type_have_at_most_two_names() -> None:
    named = table()
    many = {
        kind: files
        for kind, files in names_by_type().items()
        if kind not in named and len(without_roles(set(files))) > MOST_NAMES
    }
    assert many == {}


def test_parameters_have_the_names_of_the_table() -> None:
    found = names_by_type()
    wrong = {}
    for kind, names in table().items():
        others = without_roles(found[kind].keys() | names) - names
        if others:
            wrong[kind] = {name: found[kind][name] for name in others}
    assert wrong == {}


def test_table_lists_types_that_have_parameters() -> None:
    found = names_by_type()
    assert [kind for kind in table() if not found[kind]] == []
    assert all(len(names) <= MOST_NAMES for names in table().values())
