"""Console output of commands: tables without frames, and a progress bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import category

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_WIDTH = 160

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result as JSON to this file, or to stdout (-)."),
]


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)


def escape_control(text: str) -> str:
    """A text from a topic, with control characters escaped, which could control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_text(text: str) -> str:
    """A text from a topic for rich: shown to the letter, without markup or control characters."""
    return escape(escape_control(text))


def escape_lines(text: str) -> str:
    """A text of several lines for a terminal, with all other control characters escaped."""
    return "".join(
        escape_control(c) if category(c) == "Cc" and c not in "\n\t" else c for c in text
    )


def plain_table(*columns: str, right: str = "") -> Table:
    """A table without frames; `right`: right-aligned columns, separated by spaces."""
    made = Table(box=None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right.split() else "left")
    return made


def progress_bar(console: Console, *, transient: bool = False) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=transient)


@contextmanager
def reading_progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, removed at the end."""
    with progress_bar(Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_result(json: Path | None, value: Any, show: Callable[[], object]) -> None:
    """Write a value where option --json says, and `show` it, unless it goes to standard output."""
    if str(json) != "-":
        show()
    write_json(json, value)


def write_json(file: Path | None, value: Any) -> None:
    """Write a value to the file of option --json, where it is given."""
    if file is None:
        return
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    if str(file) == "-":
        sys.stdout.write(text.decode())
    else:
        file.write_bytes(text)


def plot_page(title: str, *figures: Figure, after: str = "") -> str:
    """A self-contained page with plots, and a piece of HTML after them."""
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title>"
    for figure in figures:
        picture = StringIO()
        figure.savefig(picture, format="svg")
        svg = picture.getvalue()
        page += svg[svg.index("<svg") :]
    return page + after


def format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)
