"""Tables of a fleet on a terminal: its workers, models, requests, queues, topics and alarms.

Ids, states and numbers are never cut; other texts are folded, and columns without a value left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvlane.app.audit.fleet_rows import JobRow, LaneRow, RequestRow, WaitRow
from kvlane.app.audit.fleet_status import Alarm, FleetStatus, TopicRow
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
_milliseconds = _numbers("{} ms".format)
_time = _numbers(lambda second: format_time(second * 1000)[:19])


def _late(records: int | None) -> Text:
    return Text("-" if records is None else str(records), "red" if records else "", justify="right")


class _Column(NamedTuple):
    header: str
    field: str
    form: Callable[[Any], Text] = _text


_WORKERS = (
    _Column("worker", "id", _id), _Column("state", "state", _state), _Column("order", "order", _id),
    _Column("model", "model"), _Column("role", "role"), _Column("epoch", "epoch", _number),
    _Column("running", "running", _number), _Column("waiting", "waiting", _number),
    _Column("KV", "kv_use", _share), _Column("hits", "hit_rate", _share),
    _Column("TTFT error", "ttft_error", _share), _Column("ITL error", "itl_error", _share),
    _Column("heartbeat", "heartbeat_age_s", _seconds), _Column("reason", "reason"),
)  # fmt: skip
_MODELS = (
    _Column("model", "name", _id), _Column("kind", "kind"), _Column("workers", "workers", _number),
    _Column("ready", "ready", _number), _Column("open", "open", _number),
    _Column("queued", "queued", _number), _Column("context", "context_length", _number),
    _Column("tokenizer", "tokenizer", _checksum), _Column("card", "checksum", _checksum),
    _Column("engines", "versions", _texts),
)  # fmt: skip
_OWNER = (
    _Column("model", "model"), _Column("tenant", "tenant"), _Column("class", "service_class"),
    _Column("worker", "worker"), _Column("tokens", "output_tokens", _number),
    _Column("retries", "retries", _number), _Column("reason", "reason"),
)  # fmt: skip
_OPEN = (
    _Column("id", "id", _id),
    _Column("phase", "phase", _id),
    _Column("age", "age_s", _seconds),
)
_ENDED = (
    _Column("id", "id", _id), _Column("end", "code", _id),
    _Column("total", "total_ms", _milliseconds), _Column("wait", "wait_ms", _milliseconds),
    _Column("TTFT", "ttft_ms", _milliseconds),
)  # fmt: skip
_LANES = (
    _Column("lane", "lane", _number), _Column("router", "router", _id),
    _Column("unread", "unread", _number), _Column("interactive", "queued", _number),
    _Column("batch", "queued_batch", _number), _Column("unknown", "queued_unknown", _number),
    _Column("oldest", "oldest_s", _seconds),
)  # fmt: skip
_WAITS = (
    _Column("requests", "requests", _number), _Column("waiting for 10 s, because", "reason"),
)  # fmt: skip
_TOPICS = (
    _Column("topic", "name", _id), _Column("records/s", "rate", _rate),
    _Column("lag", "lag", _number), _Column("late", "late", _late),
)  # fmt: skip
_JOBS = (
    _Column("job", "id", _id), _Column("status", "status", _id), _Column("lines", "lines", _number),
    _Column("published", "published", _number), _Column("completed", "completed", _number),
    _Column("failed", "failed", _number), _Column("tenant", "tenant"),
    _Column("created (UTC)", "created_s", _time),
)  # fmt: skip


def _table(columns: Sequence[_Column], rows: Iterable[object]) -> Table:
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


def ended_view(rows: Iterable[RequestRow], left_out: int) -> RenderableType:
    """`left_out`: number of ended requests of the window that were not kept."""
    table = _table((*_ENDED, *_OWNER), rows)
    if not left_out:
        return table
    return Group(table, f"{left_out} that ended earlier were not kept: give a shorter --since")


def queue_view(
    lanes: Sequence[LaneRow],
    waits: Sequence[WaitRow],
    backlog: Sequence[TopicRow],
    jobs: Sequence[JobRow],
) -> Group:
    tables = [_table(_LANES, lanes), _table(_TOPICS, backlog)]
    tables[1:1] = [_table(_WAITS, waits)] if waits else []
    tables += [_table(_JOBS, jobs)] if jobs else []
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
