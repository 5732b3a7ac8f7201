"""Logging setup of a process: to stderr, as text or as one JSON object a line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

from kvlane.app.settings import Settings

_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


KAFKA_CLIENT_LOGGER = "aiokafka"
REPEAT_INTERVAL_S = 10.0
REPEAT_BURST = 3
MAX_LINE_KINDS = 1000
"""Most kinds of lines to count; beyond them the oldest is dropped."""


class RepeatFilter(logging.Filter):
    """Rate limit of repeated warnings and errors: REPEAT_BURST of a kind, then one every
    REPEAT_INTERVAL_S, with the number of lines left out.

    A kind is a logger and a message before its arguments; it starts anew after REPEAT_INTERVAL_S
    without a line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], _RepeatState] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write this line; may append the number of lines left out."""
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, str(record.msg)), record.created
        kind = self._kinds.pop(key, None)
        if kind is None or not now - REPEAT_INTERVAL_S < kind.seen_at <= now:
            kind = _RepeatState(now)
        self._kinds[key] = kind
        if len(self._kinds) > MAX_LINE_KINDS:
            del self._kinds[next(iter(self._kinds))]
        kind.seen_at = now
        if kind.written >= REPEAT_BURST and now < kind.written_at + REPEAT_INTERVAL_S:
            kind.left_out += 1
            return False
        if kind.left_out:
            record.msg = f"{record.msg} (and {kind.left_out} more like this)"
        kind.written, kind.written_at, kind.left_out = kind.written + 1, now, 0
        return True


class _RepeatState:
    """The state of one kind of line. Times are in seconds since the epoch."""

    __slots__ = ("left_out", "seen_at", "written", "written_at")

    def __init__(self, now: float) -> None:
        self.seen_at = self.written_at = now
        self.written = self.left_out = 0


class JsonFormatter(logging.Formatter):
    """Time in UTC, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(settings: Settings) -> None:
    """Configure kvlane's own loggers by the settings, and warnings of the Kafka client."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_json else logging.Formatter(_TEXT))
    handler.addFilter(RepeatFilter())
    level = logging.getLevelNamesMapping()[settings.log_level]
    for name in ("kvlane", KAFKA_CLIENT_LOGGER):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(max(level, logging.WARNING) if name == KAFKA_CLIENT_LOGGER else level)
        logger.propagate = False
