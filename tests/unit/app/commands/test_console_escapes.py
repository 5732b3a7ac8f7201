"""Tests of texts from topics on a terminal: control characters in them reach no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvlane.app.audit.timeline import RequestTimeline, TimelineStep
from kvlane.app.commands.console import escape_control, escape_lines, escape_text
from kvlane.app.commands.explain_view import NothingFound, check_found, show_timeline
from kvlane.streams.ports import Partition
from kvlane.streams.topics import REQUESTS

HOSTILE = "job\x1b]0;owned\x07[bold]\r\n\x9b2J\u202e"


def timeline(*steps: TimelineStep) -> RequestTimeline:
    return RequestTimeline(HOSTILE, 0, list(steps), HOSTILE)


def explained(*steps: TimelineStep) -> str:
    shown = Console(file=io.StringIO(), width=400, color_system=None)
    try:
        check_found(timeline(*steps))
        show_timeline(timeline(*steps), shown)
    except NothingFound as e:
        return str(e)
    return shown.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    "steps", [(), (TimelineStep(0, Partition(REQUESTS, 0), 0, "Request", {"model": HOSTILE}),)]
)
def test_explain_escapes_ids_and_fields(steps: tuple[TimelineStep, ...]) -> None:
    text = explained(*steps)
    assert not set("\x1b\x07\r\x9b\u202e") & set(text)
    assert "job\\x1b]0;owned\\x07[bold]\\r\\n" in text


def test_lines_of_a_text_stay() -> None:
    assert escape_lines("a\tb\n\x1bc\u200d😀") == "a\tb\n\\x1bc\u200d😀"


def test_printable_text_stays_as_it_is() -> None:
    assert escape_control("grüße, 请求 😀") == "grüße, 请求 😀"
    assert escape_text("a[b]") == r"a\[b]"
