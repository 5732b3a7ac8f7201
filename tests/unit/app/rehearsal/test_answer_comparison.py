"""Tests of the comparison of answers, of its summary, and of its pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvlane.app.commands.rehearsal.rehearsal_report import show_report, write_page
from kvlane.app.rehearsal.answer_comparison import (
    AnswerPair,
    compare_answers,
    first_difference,
    summarize_pairs,
)
from kvlane.app.rehearsal.recorded_answers import RecordedAnswer


def answer(name: str = "a", tokens: tuple[int, ...] = (1, 2, 3), **over: Any) -> RecordedAnswer:
    made = RecordedAnswer(name, tokens, "abc", "stop", len(tokens) or 3, 10, 5, 20.0, 2.0)
    return made._replace(**over)


def compare(original: RecordedAnswer, again: RecordedAnswer, **over: bool) -> AnswerPair:
    given = {"is_exact": True, "has_same_tokens": True} | over
    return compare_answers(original, again, **given)


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [("", "", None), ("ab", "ab", None), ("ab", "ac", 1), ("ab", "abc", 2), ("abc", "", 0)],
)
def test_first_difference(left: str, right: str, at: int | None) -> None:
    assert first_difference(left, right) == at
    assert first_difference(right, left) == at


def test_tokens_of_one_tokenizer_count_and_their_text_does_not() -> None:
    assert compare(answer(), answer(text="other")).verdict == "equal"
    pair = compare(answer(), answer(tokens=(1, 2, 4)))
    assert (pair.verdict, pair.unit, pair.first_difference) == ("differs", "token", 2)


def test_texts_count_for_other_tokenizers_and_engines_without_tokens() -> None:
    pair = compare(answer(), answer(tokens=(7, 8)), has_same_tokens=False)
    assert (pair.verdict, pair.unit) == ("equal", "character")
    pair = compare(answer(tokens=()), answer(tokens=(), text="aXc"))
    assert (pair.verdict, pair.unit, pair.first_difference) == ("differs", "character", 1)


def test_drawn_answer_says_nothing_and_failed_one_is_no_answer() -> None:
    assert compare(answer(), answer(tokens=(9,)), is_exact=False).verdict == "sampled"
    failed = compare(answer(), answer(tokens=(), code="deadline"), is_exact=False)
    assert (failed.verdict, failed.first_difference) == ("failed", None)


def report_of(pairs: list[AnswerPair], **over: Any) -> dict[str, Any]:
    fields = {
        "from_ms": 0, "to_ms": 1000, "kept_since_ms": 0, "model": "", "to": "b", "share": 0.1,
        "label": "", "left_out": {"embeddings": 2}, "open": 1,
    }  # fmt: skip
    return fields | summarize_pairs(pairs) | over


def pairs_of_each_kind() -> list[AnswerPair]:
    return [
        compare(answer("a"), answer("ra", ttft_ms=40.0)),
        compare(answer("b<i>"), answer("rb", tokens=(1, 9), code="length", output_tokens=2)),
        compare(answer("c"), answer("rc", ttft_ms=None), is_exact=False),
        compare(answer("d"), answer("rd", tokens=(), code="deadline", ttft_ms=None)),
    ]


def test_summary_counts_verdicts_and_pairs_with_both_figures() -> None:
    found = summarize_pairs(pairs_of_each_kind())
    assert found["verdicts"] == {"equal": 1, "differs": 1, "sampled": 1, "failed": 1}
    assert found["changed_finish_reasons"] == 1
    assert found["finish_reasons"]["rehearsal"] == {"stop": 2, "length": 1, "deadline": 1}
    assert found["figures"]["ttft_ms"]["pairs"] == 2
    assert found["figures"]["ttft_ms"]["rehearsal"]["mean"] == 30.0
    assert found["figures"]["output_tokens"]["original"]["p50"] == 3
    assert found["figures"]["cached_share"]["original"]["p99"] == 0.5
    assert [pair.id for pair in found["differences"]] == ["b<i>"]


@pytest.mark.parametrize("pairs", [pairs_of_each_kind(), []])
def test_page_stands_alone_and_quotes_what_clients_wrote(
    tmp_path: Path, pairs: list[AnswerPair]
) -> None:
    write_page(report_of(pairs), pairs, file := tmp_path / "it.html")
    page = file.read_text()
    assert page.startswith("<!doctype html>")
    assert "<svg" in page
    assert "<i>" not in page
    assert ("b&lt;i&gt;" in page) == bool(pairs)


def test_terminal_shows_verdicts_figures_and_differences() -> None:
    console = Console(width=200, record=True)
    show_report(report_of(pairs_of_each_kind()), console)
    shown = console.export_text()
    for part in (
        "1 answers are equal, 1 differ", "1 failed at b: deadline", "left out: 2 embeddings",
        "1 are not compared yet", "TTFT ms", "b<i>", "token 1", "stop / length",
    ):  # fmt: skip
        assert part in shown
