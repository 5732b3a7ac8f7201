"""Log lines of a process: to stderr, as text or as one JSON object a line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from app.settings import Settings

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """Time in UTC, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(settings: Settings) -> None:
    """Let kvlane's own loggers speak as the settings say; what others log is left alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_json else logging.Formatter(_TEXT))
    for name in ("app", "streams", "indexer"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(settings.log_level)
        logger.propagate = False
