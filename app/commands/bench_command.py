"""The command `kvlane bench`: the benchmarks of a checkout; elsewhere, where to get them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import typer

from kvlane.app.operator_error import OperatorError

ROOT = Path(__file__).resolve().parents[2]


class NoCheckout(OperatorError):
    """The benchmarks are not installed with the package."""

    correction = "Clone it, then run `make setup` and `.venv/bin/kvlane bench` there."


def add_bench(app: typer.Typer) -> None:
    """Add the commands of the folder `workbench/` beside this package's sources, if it is there."""
    if (ROOT / "workbench" / "__init__.py").is_file():
        sys.path.append(str(ROOT))
        commands = import_module("workbench.bench.commands.bench_commands")
        app.add_typer(commands.app, name="bench")
    else:
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(context_settings=anything)(bench)


def bench() -> None:
    """Measure and stress kvlane on this machine, in a checkout of its repository."""
    raise NoCheckout("the benchmarks are in the repository of kvlane, not in the package")
