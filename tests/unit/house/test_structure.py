"""Tests of the structure of the code: layers without circles, small folders, one meaning a name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("app", "streams", "indexer", "workbench")
MOST_FILES = 15
UNIT_TESTS = ROOT / "tests" / "unit"
MOST_TESTS = 25
NO_MODULES = {"house", "deploy"}
"""Folders of unit tests of something else: the house rules, and files of `deploy/`."""

SHARED_MODULE_NAMES: dict[str, str] = {}
"""Module names that occur twice, each with its reason."""

SHARED_TYPE_NAMES: dict[str, str] = {}
"""Names of classes and of types such as `Headers = tuple[...]` that occur twice, with reasons."""

FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in FILES}


@cache
def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("workbench") else f"kvlane.{name}"


@cache
def modules() -> frozenset[str]:
    return frozenset(map(module_of, FILES))


@cache
def imported(file: Path) -> frozenset[str]:
    """Every module that a file imports, at its top or late; those for type checking count too."""
    found: set[str] = set()
    for node in ast.walk(trees()[file]):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules() else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return frozenset(found)


def types_of(tree: ast.Module) -> Iterator[str]:
    """Classes, and names in CamelCase that a module assigns, with or without an annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if re.fullmatch(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name):
                    yield name


def shared(names: dict[str, list[str]], reasons: dict[str, str]) -> dict[str, list[str]]:
    return {name: files for name, files in names.items() if len(files) > 1 and name not in reasons}


def test_imports_have_no_cycle() -> None:
    graph = {
        module_of(file): imported(file) & modules() for file in FILES if file.name != "__init__.py"
    }
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
    assert len(order) >= len(graph)


FOLDERS = {module_of(file).rpartition(".")[0] for file in FILES}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_no_import_runs_upwards(folder: str) -> None:
    """The files and subfolders of a folder, each as one node, import without a circle."""
    graph: dict[str, set[str]] = defaultdict(set)
    depth = len(folder.split("."))
    for file in FILES:
        if file.name != "__init__.py" and module_of(file).startswith(f"{folder}."):
            for name in imported(file):
                if name.startswith(f"{folder}."):
                    graph[module_of(file).split(".")[depth]].add(name.split(".")[depth])
    for node, used in graph.items():
        used.discard(node)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_folders_hold_few_files() -> None:
    files: dict[str, int] = defaultdict(int)
    for file in FILES:
        files[str(file.parent.relative_to(ROOT))] += file.name != "__init__.py"
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def test_unit_tests_mirror_the_folders_of_the_code() -> None:
    """A test stands in the folder of a module that it names, or in one above it."""
    misplaced, files = [], defaultdict(int)
    for file in UNIT_TESTS.rglob("test_*.py"):
        folder = file.parent.relative_to(UNIT_TESTS)
        files[str(folder)] += 1
        package = ".".join(folder.parts)
        names = (package, f"kvlane.{package}")
        if package not in NO_MODULES and not (
            package
            and (ROOT / folder).is_dir()
            and any(re.search(rf"\b{re.escape(name)}\b", file.read_text()) for name in names)
        ):
            misplaced.append(str(folder / file.name))
    assert misplaced == []
    assert {folder: count for folder, count in files.items() if count > MOST_TESTS} == {}
    assert files.keys() >= NO_MODULES


def test_names_of_unit_tests_are_unique() -> None:
    names = defaultdict(list)
    for file in UNIT_TESTS.rglob("test_*.py"):
        names[file.name].append(str(file.parent))
    assert shared(names, {}) == {}


def test_module_names_are_unique() -> None:
    names = defaultdict(list)
    for file in FILES:
        if file.name not in {"__init__.py", "__main__.py"}:
            names[file.name].append(module_of(file))
    assert shared(names, SHARED_MODULE_NAMES) == {}


def test_type_names_are_unique() -> None:
    """One test for classes and aliases: a reader of a name does not see which of both it is."""
    names = defaultdict(list)
    for file, tree in trees().items():
        for name in types_of(tree):
            names[name].append(module_of(file))
    assert shared(names, SHARED_TYPE_NAMES) == {}


def test_every_exception_to_the_rules_is_in_use() -> None:
    modules, types = defaultdict(int), defaultdict(int)
    for file, tree in trees().items():
        modules[file.name] += 1
        for name in types_of(tree):
            types[name] += 1
    assert [name for name in SHARED_MODULE_NAMES if modules[name] < 2] == []
    assert [name for name in SHARED_TYPE_NAMES if types[name] < 2] == []
