"""Tests of reports of benchmarks on the terminal."""

from __future__ import annotations

from rich.console import Console

from workbench.bench.report import Report, at_least, at_most


def test_lines_below_the_table_are_printed_whole_on_a_narrow_terminal() -> None:
    line = "seed 17: " + "lost request; " * 30
    console = Console(width=40)
    with console.capture() as got:
        Report("seeds", [{"seeds": 100, "failed": 1}], [], lines=[line]).show(console)
    assert line in got.get()


def test_limits_include_the_limit_itself() -> None:
    assert at_most("a", 2, "ms", 2).passed
    assert not at_most("a", 2.1, "ms", 2).passed
    assert at_least("a", 2, "ms", 2).passed
    assert not at_least("a", 1.9, "ms", 2).passed
