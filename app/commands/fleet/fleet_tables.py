"""Tables of a fleet on a terminal: its workers, models, requests, queues, topics and alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvlane.app.audit.fleet_rows import JobRow, LaneRow, ModelRow, RequestRow, WaitRow, WorkerRow
from kvlane.app.audit.fleet_status import Alarm, FleetStatus, TopicRow
from kvlane.app.audit.time_range import format_time
from kvlane.app.commands.console import escape_control, plain_table

_STYLES = {
    "ready": "green", "starting": "yellow", "draining": "yellow", "unhealthy": "red",
    "silent": "red", "lost": "red",
}  # fmt: skip
_CHECKSUM_CHARS = 12


def workers_table(rows: Iterable[WorkerRow]) -> Table:
    table = plain_table(
        "worker", "model", "role", "state", "epoch", "running", "waiting", "KV", "hits",
        "TTFT-error", "ITL-error", "heartbeat", "reason",
        right="epoch running waiting KV hits TTFT-error ITL-error heartbeat",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            _text(row.id), _text(row.model), _text(row.role),
            Text(", ".join(filter(None, (row.state, row.order))), _STYLES[row.state]),
            str(row.epoch), _number(row.running), _number(row.waiting), _share(row.kv_use),
            _share(row.hit_rate), _share(row.ttft_error), _share(row.itl_error),
            _seconds(row.heartbeat_age_s), _text(row.reason),
        )  # fmt: skip
    return table


def models_table(rows: Iterable[ModelRow]) -> Table:
    table = plain_table(
        "model", "kind", "workers", "ready", "open", "queued", "context", "tokenizer", "card",
        "engines", right="workers ready open queued context",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            _text(row.name), row.kind or "-", str(row.workers), str(row.ready), str(row.open),
            str(row.queued), _number(row.context_length), row.tokenizer[:_CHECKSUM_CHARS] or "-",
            _text(row.checksum[:_CHECKSUM_CHARS] or "-"), _text(", ".join(row.versions)),
        )  # fmt: skip
    return table


def open_table(rows: Iterable[RequestRow]) -> Table:
    table = plain_table(
        "id", "age", "phase", "model", "tenant", "class", "worker", "tokens", "retries",
        right="age tokens retries",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            _text(row.id), _seconds(row.age_s), row.phase, _text(row.model), _text(row.tenant),
            row.service_class or "-", _text(row.worker), str(row.output_tokens), str(row.retries),
        )  # fmt: skip
    return table


def ended_view(rows: Iterable[RequestRow], left_out: int) -> RenderableType:
    """`left_out`: number of ended requests of the window that were not kept."""
    table = ended_table(rows)
    if not left_out:
        return table
    return Group(table, f"{left_out} that ended earlier were not kept: give a shorter --since")


def ended_table(rows: Iterable[RequestRow]) -> Table:
    table = plain_table(
        "id", "total", "wait", "TTFT", "end", "model", "tenant", "class", "worker", "tokens",
        "retries", "reason", right="total wait TTFT tokens retries",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            _text(row.id), _milliseconds(row.total_ms), _milliseconds(row.wait_ms),
            _milliseconds(row.ttft_ms), row.code, _text(row.model), _text(row.tenant),
            row.service_class, _text(row.worker), str(row.output_tokens), str(row.retries),
            _text(row.reason),
        )  # fmt: skip
    return table


def queue_view(
    lanes: Sequence[LaneRow],
    waits: Sequence[WaitRow],
    backlog: Sequence[TopicRow],
    jobs: Sequence[JobRow],
) -> Group:
    names = ("lane", "router", "unread", "interactive", "batch", "unknown", "oldest")
    table = plain_table(*names, right="lane unread interactive batch unknown oldest")
    for row in lanes:
        table.add_row(
            str(row.lane), _text(row.router), _number(row.unread), str(row.queued),
            str(row.queued_batch), str(row.queued_unknown), _seconds(row.oldest_s),
        )  # fmt: skip
    parts: list[RenderableType] = [table]
    if waits:
        reasons = plain_table("requests", "waiting for 10 s, because", right="requests")
        for wait in waits:
            reasons.add_row(str(wait.requests), _text(wait.reason))
        parts += ["", reasons]
    parts += ["", topics_table(backlog)]
    if jobs:
        open_jobs = plain_table(
            "job", "status", "lines", "published", "completed", "failed", "tenant",
            "created (UTC)", right="lines published completed failed",
        )  # fmt: skip
        for job in jobs:
            counts = (job.lines, job.published, job.completed, job.failed)
            created = format_time(job.created_s * 1000)[:19]
            open_jobs.add_row(
                _text(job.id), job.status, *map(str, counts), _text(job.tenant), created
            )
        parts += ["", open_jobs]
    return Group(*parts)


def topics_table(rows: Iterable[TopicRow]) -> Table:
    table = plain_table("topic", "records/s", "lag", "late", right="records/s lag late")
    for row in rows:
        style = "red" if row.late else ""
        cells = (f"{row.rate:.1f}", _number(row.lag), _number(row.late))
        table.add_row(row.name, *cells, style=style)
    return table


def status_view(status: FleetStatus, *details: RenderableType) -> Group:
    """The whole: alarms, then `details`, models, and the topics that are in use."""
    topics = [row for row in status.topics if row.rate or row.lag is not None]
    tables = (*details, models_table(status.models), topics_table(topics))
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


def _text(text: str) -> Text:
    """A text from a topic, without markup and control characters."""
    return Text(escape_control(text) or "-")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _milliseconds(value: int | None) -> str:
    return "-" if value is None else f"{value} ms"
