"""Log lines as the settings ask for them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from app.logs import configure
from app.settings import Settings


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    names = ("app", "streams", "indexer")
    before = {n: (logging.getLogger(n).handlers, logging.getLogger(n).level) for n in names}
    yield
    for name, (handlers, level) in before.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, True
        logger.setLevel(level)


def test_json_lines_can_be_read_by_programs(capsys: pytest.CaptureFixture[str]) -> None:
    configure(Settings(log_json=True))
    try:
        int("broken")
    except ValueError:
        logging.getLogger("app.worker").exception("run %s failed", "a")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["logger"]) == ("ERROR", "app.worker")
    assert line["message"] == "run a failed"
    assert "ValueError: invalid literal" in line["traceback"]


def test_what_is_less_severe_than_asked_for_is_not_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(Settings(log_level="WARNING"))
    logging.getLogger("streams.outbox").info("quiet")
    logging.getLogger("streams.outbox").warning("loud")
    err = capsys.readouterr().err
    assert "loud" in err
    assert "quiet" not in err
