"""Reports of rehearsals: on a terminal, and as a page with diagrams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlane.app.audit.time_range import format_time
from kvlane.app.commands import console as screen
from kvlane.app.rehearsal.answer_comparison import PERCENTS, AnswerPair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

MOST_SHOWN = 10
MOST_LISTED = 1000
"""Differences on a terminal, and in a page; JSON has all."""
PAGE_CHARS = 180
_NAMES = {
    "output_tokens": "output tokens", "ttft_ms": "TTFT ms", "itl_ms": "ITL ms",
    "cached_share": "cached share",
}  # fmt: skip
_SIDES = ("original", "rehearsal")
_PARTS = ("mean", *(f"p{percent}" for percent in PERCENTS))
_COLUMNS = ("", "pairs", *(f"{side} {part}" for part in _PARTS for side in _SIDES))
_OF_DIFFERENCES = ("request", "rehearsal", "equal until", "tokens", "finish reason")


def show_report(report: Mapping[str, Any], console: Console, most: int = MOST_SHOWN) -> None:
    """Show a report with `most` differences at most."""
    console.print("\n".join(map(screen.escape_text, _sentences(report))))
    rows = list(_figure_rows(report))
    differing = list(_difference_rows(report, most))
    for columns, cells in ((_COLUMNS, rows), (_OF_DIFFERENCES, differing)):
        table = screen.plain_table(*columns)
        for row in cells:
            table.add_row(*map(screen.escape_text, row))
        if cells:
            console.print(table)
    if len(report["differences"]) > len(differing):
        console.print(f"{len(report['differences']) - len(differing)} more: --json")
    if differing:
        console.print("kvlane follow ID shows an answer, kvlane explain ID its way", style="dim")


def write_page(report: Mapping[str, Any], pairs: Sequence[AnswerPair], file: Path) -> None:
    """Write a self-contained page: the report, and diagrams of its pairs."""
    from matplotlib.figure import Figure
    from rich.console import Console

    figure = Figure(figsize=(10, 6), layout="constrained")
    first, lengths, ttft, itl = figure.subplots(2, 2).flat
    at = [pair.first_difference for pair in pairs if pair.first_difference is not None]
    first.hist(at, bins=30)
    first.set_title("first difference (tokens or characters)", loc="left", fontsize="medium")
    first.set_ylabel("answers that differ")
    whole = [pair for pair in pairs if pair.verdict != "failed"]
    sizes = [(pair.original.output_tokens, pair.rehearsal.output_tokens) for pair in whole]
    lengths.plot([x for x, _ in sizes], [y for _, y in sizes], ".", alpha=0.4)
    lengths.axline((0, 0), slope=1, color="gray", linewidth=0.5)
    lengths.set_title("output tokens", loc="left", fontsize="medium")
    lengths.set_xlabel(_SIDES[0])
    lengths.set_ylabel(_SIDES[1])
    _draw_times(ttft, "ttft_ms", whole)
    _draw_times(itl, "itl_ms", whole)
    console = Console(file=StringIO(), record=True, width=PAGE_CHARS, highlight=False)
    show_report(report, console, MOST_LISTED)
    shown = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    file.write_text(screen.plot_page("kvlane rehearse", figure, after=shown), "utf-8")


def _draw_times(axes: Axes, name: str, pairs: Sequence[AnswerPair]) -> None:
    """The distribution of a time in both answers of each pair."""
    for side in _SIDES:
        values = [getattr(getattr(pair, side), name) for pair in pairs]
        if known := [value for value in values if value is not None]:
            axes.ecdf(known, label=side)
            axes.legend()
    axes.set_title(f"{_NAMES[name]}, share of answers up to it", loc="left", fontsize="medium")


def _sentences(report: Mapping[str, Any]) -> Iterator[str]:
    counts, reasons = report["verdicts"], report["finish_reasons"]
    since, to = (format_time(report[name]) for name in ("from_ms", "to_ms"))
    yield (
        f"{report['pairs']} requests for {report['model'] or 'any model'}, {since} to {to} UTC, "
        f"again at {report['to']}: {counts['equal']} answers are equal, {counts['differs']} differ"
    )
    if counts["sampled"]:
        yield (
            f"{counts['sampled']} draw tokens without a seed, so only their figures and finish "
            "reasons are compared"
        )
    if counts["failed"]:
        codes = ", ".join(sorted({pair.rehearsal.code for pair in report["failures"]}))
        yield f"{counts['failed']} failed at {report['to']}: {codes}"
    shown = (f"{s} {_counts(reasons[s]) or 'none'}" for s in _SIDES)
    changed = report["changed_finish_reasons"]
    yield f"finish reasons: {'; '.join(shown)}; changed in {changed} answers"
    if report["left_out"]:
        yield f"left out: {_counts(report['left_out'])}"
    if report["kept_since_ms"]:
        yield f"of times before {format_time(report['kept_since_ms'])} UTC not everything is kept"
    if report["open"]:
        yield f"{report['open']} are not compared yet: run the same command again"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def _figure_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, found in report["figures"].items():
        if found["pairs"]:
            values = (f"{found[side][part]:.4g}" for part in _PARTS for side in _SIDES)
            yield _NAMES[name], str(found["pairs"]), *values


def _difference_rows(report: Mapping[str, Any], most: int) -> Iterator[tuple[str, ...]]:
    for pair in report["differences"][:most]:
        codes = dict.fromkeys((pair.original.code, pair.rehearsal.code))
        yield (
            pair.id, pair.rehearsal_id, f"{pair.unit} {pair.first_difference}",
            f"{pair.original.output_tokens} / {pair.rehearsal.output_tokens}", " / ".join(codes),
        )  # fmt: skip
