"""Tests of the tables of a fleet on a narrow terminal."""

from __future__ import annotations

from io import StringIO

import msgspec
from rich.console import Console, RenderableType

from kvlane.app.audit.fleet.request_rows import RequestRow
from kvlane.app.audit.fleet.worker_rows import WorkerRow
from kvlane.app.commands.fleet.fleet_tables import open_table, requests_view, workers_table

WORKER = WorkerRow(
    "vllm-7c9f5d8b6f-x2x4k", "meta-llama/Llama-3.1-8B-Instruct", "aggregated", "unhealthy",
    1234, "evacuating", "out of memory", None, 0.4, 100, 20, 0.99, 0.5, 0.11, 0.2,
)  # fmt: skip
REQUEST = RequestRow(
    "chatcmpl-0e7a5a3c-1111-2222-3333-444455556666", "meta-llama/Llama-3.1-8B-Instruct", "acme",
    "interactive", "prefill", "vllm-7c9f5d8b6f-x2x4k", "cancelled", "", 12.5, 1234, 900, 7000,
)  # fmt: skip


def shown(view: RenderableType) -> str:
    console = Console(file=StringIO(), width=80)
    console.print(view)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_ids_and_states_are_whole_on_80_columns() -> None:
    workers = shown(workers_table([WORKER]))
    assert all(text in workers for text in (WORKER.id, "unhealthy", "evacuating", "1234"))
    assert all(text in shown(open_table([REQUEST])) for text in (REQUEST.id, "prefill", "12.5 s"))
    ended = shown(requests_view([REQUEST], 0, ended=True))
    assert all(text in ended for text in (REQUEST.id, "cancelled", "7000 ms"))


def test_columns_without_a_value_are_left_out() -> None:
    worker = msgspec.structs.replace(WORKER, order="", hit_rate=None, reason="")
    columns = shown(workers_table([worker])).split()
    assert not {"order", "hits", "reason"} & {*columns}
    assert shown(workers_table([])).strip(), "of no rows the names of the columns"
