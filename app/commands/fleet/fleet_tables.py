"""Tables of a fleet on a terminal: its workers, models, requests, queues, topics and alarms.

Ids, states and numbers are never cut; other texts are folded, and columns without a value left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvlane.app.audit.fleet.fleet_status import Alarm, FleetStatus, TopicRow
from kvlane.app.audit.fleet.queue_rows import JobRow, LaneRow, WaitRow
from kvlane.app.audit.fleet.request_rows import RequestRow
from kvlane.app.audit.time_range import format_time
from kvlane.app.commands.console import escape_control

_STYLES = {
    "ready": "green", "starting": "yellow", "draining": "yellow", "unhealthy": "red",
    "silent": "red", "lost": "red",
}  # fmt: skip
_CHECKSUM_CHARS = 12
_FOLDED_CHARS = 6
"""Least width of a text that may be folded."""


def _text(text: str) -> Text:
    """A text from a topic, without markup and control characters."""
    return Text(escape_control(text) or "-")


def _id(text: str) -> Text:
    return _text(text)


def _state(state: str) -> Text:
    return Text(state, _STYLES[state])


def _checksum(text: str) -> Text:
    return _text(text[:_CHECKSUM_CHARS])


def _texts(texts: Sequence[str]) -> Text:
    return _text(", ".join(texts))


def _numbers(form: Callable[[Any], str]) -> Callable[[Any], Text]:
    return lambda value: Text("-" if value is None else form(value), justify="right")


_number = _numbers(str)
_rate = _numbers("{:.1f}".format)
_share = _numbers("{:.0%}".format)
_seconds = _numbers("{:.1f} s".format)
_decimal_ms = _numbers("{:.1f} ms".format)
_milliseconds = _numbers("{} ms".format)
_time = _numbers(lambda second: format_time(second * 1000)[:19])


def _late(records: int | None) -> Text:
    return Text("-" if records is None else str(records), "red" if records else "", justify="right")


FleetColumn = tuple[str, str, Callable[[Any], Text]]
"""Header, field of the row, format."""

_WORKERS: Sequence[FleetColumn] = (
    ("worker", "id", _id), ("state", "state", _state), ("order", "order", _id),
    ("model", "model", _text), ("role", "role", _text), ("epoch", "epoch", _number),
    ("running", "running", _number), ("waiting", "waiting", _number), ("KV", "kv_use", _share),
    ("hits", "hit_rate", _share), ("step", "step_ms", _decimal_ms),
    ("TTFT error", "ttft_error", _share), ("ITL error", "itl_error", _share),
    ("heartbeat", "heartbeat_age_s", _seconds), ("reason", "reason", _text),
)  # fmt: skip
_MODELS: Sequence[FleetColumn] = (
    ("model", "name", _id), ("kind", "kind", _text), ("workers", "workers", _number),
    ("ready", "ready", _number), ("open", "open", _number), ("queued", "queued", _number),
    ("context", "context_length", _number), ("tokenizer", "tokenizer", _checksum),
    ("card", "checksum", _checksum), ("engines", "versions", _texts),
)  # fmt: skip
_ALIASES: Sequence[FleetColumn] = (
    ("alias", "name", _id), ("model", "model", _id), ("weight", "weight", _number),
    ("share now", "share", _share), ("ready", "ready", _number),
)  # fmt: skip
_OWNER: Sequence[FleetColumn] = (
    ("model", "model", _text), ("tenant", "tenant", _text), ("class", "service_class", _text),
    ("worker", "worker", _text), ("tokens", "output_tokens", _number),
    ("retries", "retries", _number), ("reason", "reason", _text),
)  # fmt: skip
_OPEN: Sequence[FleetColumn] = (
    ("id", "id", _id), ("phase", "phase", _id), ("age", "age_s", _seconds),
)  # fmt: skip
_ENDED: Sequence[FleetColumn] = (
    ("id", "id", _id), ("end", "code", _id), ("total", "total_ms", _milliseconds),
    ("wait", "wait_ms", _milliseconds), ("TTFT", "ttft_ms", _milliseconds),
)  # fmt: skip
_LANES: Sequence[FleetColumn] = (
    ("lane", "lane", _number), ("router", "router", _id), ("unread", "unread", _number),
    ("interactive", "queued", _number), ("batch", "queued_batch", _number),
    ("unknown", "queued_unknown", _number), ("oldest", "oldest_s", _seconds),
)  # fmt: skip
_WAITS: Sequence[FleetColumn] = (
    ("requests", "requests", _number), ("waiting for 10 s, because", "reason", _text),
)  # fmt: skip
_TOPICS: Sequence[FleetColumn] = (
    ("topic", "name", _id), ("records/s", "rate", _rate), ("lag", "lag", _number),
    ("late", "late", _late),
)  # fmt: skip
_JOBS: Sequence[FleetColumn] = (
    ("job", "id", _id), ("status", "status", _id), ("lines", "lines", _number),
    ("published", "published", _number), ("completed", "completed", _number),
    ("failed", "failed", _number), ("tenant", "tenant", _text),
    ("created (UTC)", "created_s", _time),
)  # fmt: skip


def _table(columns: Sequence[FleetColumn], rows: Iterable[object]) -> Table:
    made, shown = Table(box=None, pad_edge=False), []
    found = list(rows)
    for header, field, form in columns:
        cells = [form(getattr(row, field)) for row in found]
        if cells and all(cell.plain == "-" for cell in cells):
            continue
        width = max((cell.cell_len for cell in cells), default=0)
        made.add_column(
            header, overflow="fold", no_wrap=form in (_id, _state),
            min_width=min(width, _FOLDED_CHARS) if form in (_text, _texts) else width,
        )  # fmt: skip
        shown.append(cells)
    for row in zip(*shown, strict=True):
        made.add_row(*row)
    return made


workers_table = partial(_table, _WORKERS)
models_table = partial(_table, _MODELS)
open_table = partial(_table, (*_OPEN, *_OWNER))
ended_table = partial(_table, (*_ENDED, *_OWNER))
jobs_table = partial(_table, _JOBS)


def models_view(models: Iterable[object], aliases: Sequence[object]) -> RenderableType:
    table = models_table(models)
    return Group(table, "", _table(_ALIASES, aliases)) if aliases else table


def requests_view(rows: Iterable[RequestRow], left_out: int, *, ended: bool) -> RenderableType:
    """`left_out`: number of requests of the window that were not kept; of open ones at most."""
    table = ended_table(rows) if ended else open_table(rows)
    if not left_out:
        return table
    rest = f"{left_out} more have failed" if ended else f"up to {left_out} older ones are open"
    return Group(table, f"{rest} and are not listed: give a shorter --since")


def queue_view(
    lanes: Sequence[LaneRow],
    waits: Sequence[WaitRow],
    backlog: Sequence[TopicRow],
    jobs: Sequence[JobRow],
) -> Group:
    tables = [_table(_LANES, lanes), _table(_TOPICS, backlog)]
    tables[1:1] = [_table(_WAITS, waits)] if waits else []
    tables += [jobs_table(jobs)] if jobs else []
    return Group(*(part for table in tables for part in (table, "")))


def status_view(status: FleetStatus, *details: RenderableType) -> Group:
    """The whole: alarms, then `details`, models, and the topics that are in use."""
    topics = [row for row in status.topics if row.rate or row.lag is not None]
    tables = (*details, models_table(status.models), _table(_TOPICS, topics))
    return Group(
        f"{format_time(status.now_ms)[:19]} UTC   workers: {_counts(status.workers)}   "
        f"open requests: {_counts(status.requests)}",
        alarms_view(status.alarms), *(part for table in tables for part in ("", table)),
    )  # fmt: skip


def alarms_view(alarms: Sequence[Alarm]) -> RenderableType:
    if not alarms:
        return Text("no alarm", "green")
    lines = [f"{alarm.kind} {alarm.name}: {alarm.message}" for alarm in alarms]
    return Text("\n".join(map(escape_control, lines)), "red")


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(numbers.items())) or "none"
