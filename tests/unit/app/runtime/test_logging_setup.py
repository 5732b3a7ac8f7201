"""Tests of log lines as the settings ask for them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvlane.app.runtime.process import MAX_LINE_KINDS, RepeatFilter, configure_logging
from kvlane.app.settings import Settings


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    names = ("kvlane", "aiokafka")
    before = {n: (logging.getLogger(n).handlers, logging.getLogger(n).level) for n in names}
    yield
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


def test_json_lines_can_be_read_by_programs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_json=True))
    try:
        int("broken")
    except ValueError:
        logging.getLogger("kvlane.app.worker").exception("run %s failed", "a")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"]) == ("ERROR", "kvlane.app.worker")
    assert line["message"] == "run a failed"
    assert "ValueError: invalid literal" in line["traceback"]


def test_messages_below_the_level_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_level="WARNING"))
    logging.getLogger("kvlane.streams.record_publisher").info("quiet")
    logging.getLogger("kvlane.streams.record_publisher").warning("loud")
    err = capsys.readouterr().err
    assert "loud" in err
    assert "quiet" not in err


def test_lines_of_the_kafka_client_have_the_form_of_all_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(Settings(log_json=True))
    logging.getLogger("aiokafka").error("Unable connect to %r", "127.0.0.1:1")
    logging.getLogger("aiokafka.cluster").info("quiet")
    [line] = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "Unable connect to '127.0.0.1:1'"


def lines_of(
    seconds: list[float], level: int = logging.WARNING, text: str = "beat %d"
) -> list[str]:
    """What is written of lines of one kind at these times."""
    repeats, written = RepeatFilter(), []
    for number, second in enumerate(seconds):
        record = logging.LogRecord("kvlane.app.worker", level, "", 0, text, (number,), None)
        record.created = second
        if repeats.filter(record):
            written.append(record.getMessage())
    return written


def test_repeated_warnings_are_merged_into_one_with_their_number() -> None:
    shown = lines_of([float(n) for n in range(30)])
    assert shown == ["beat 0", "beat 1", "beat 2", "beat 12 (and 9 more like this)",
                     "beat 22 (and 9 more like this)"]  # fmt: skip


def test_kind_of_warning_absent_for_a_while_is_logged_again() -> None:
    assert len(lines_of([0, 1, 2, 3, 20, 21, 22])) == 6


def test_lines_of_information_are_never_merged() -> None:
    assert len(lines_of([0.0] * 20, logging.INFO)) == 20


def test_kinds_are_counted_up_to_a_bound() -> None:
    repeats = RepeatFilter()
    for number in range(2 * MAX_LINE_KINDS):
        repeats.filter(logging.LogRecord("app", logging.ERROR, "", 0, f"odd {number}", (), None))
    assert len(repeats._kinds) == MAX_LINE_KINDS
