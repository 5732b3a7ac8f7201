"""What commands show: a console, tables without frames, and a progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

TABLE_WIDTH = 160
"""Of tables in files and pipes, in characters."""


def console() -> Console:
    """For standard output."""
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)


def table(*columns: str, right: str = "") -> Table:
    """A table without frames; `right`: the columns of numbers, by spaces."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right.split() else "left")
    return made


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, gone when it is done."""
    with Progress(
        TextColumn(name), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def said(value: Any) -> str:
    """A value for people."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {said(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "none"
    return str(value)
