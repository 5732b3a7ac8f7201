"""The view of files and batch jobs: whose they are, and when they are gone."""

from __future__ import annotations

from typing import Any

from app.batches.batch_view import BatchView, file_key
from streams.batch_records import BatchCancel, FileCard
from streams.ports import Partition
from streams.records import LogRecord, Tombstone
from streams.topics import BATCH_JOBS, FILE_RETENTION_MS

SOURCE = Partition(BATCH_JOBS, 0)
OTHER = Partition(BATCH_JOBS, 1)


def card(name: str, tenant: str = "acme", **over: Any) -> FileCard:
    fields: dict[str, Any] = {
        "id": name, "purpose": "batch", "partition": 0, "first": 0, "end": 1, "size": 1,
        "sha256": "00", "created_s": 1, "tenant": tenant,
    }  # fmt: skip
    return FileCard(**(fields | over))


def applied(*records: tuple[int, Any], now_ms: int = 0, view: BatchView | None = None) -> BatchView:
    view = view or BatchView(lambda: now_ms)
    at = view.position(SOURCE) or 0
    facts = [LogRecord(at + n, at_ms, record) for n, (at_ms, record) in enumerate(records)]
    view.apply(SOURCE, facts, at + len(facts))
    return view


def test_file_is_that_of_its_tenant() -> None:
    view = applied((1, card("a")), (2, card("b", "globex")))
    assert view.file("a", "acme") == card("a")
    assert view.file("a", "globex") is view.file("c", "acme") is None
    assert [f.id for f in view.files("globex")] == ["b"]


def test_tombstone_removes_a_file() -> None:
    view = applied((1, card("a")), (2, Tombstone(key=file_key("a"))), (3, Tombstone(key="x")))
    assert list(view.files("acme")) == []


def test_expired_files_are_gone_in_quiet_partitions_too() -> None:
    now_ms = 3
    view = BatchView(lambda: now_ms)
    applied((1, card("a")), (2, card("b")), (3, card("a")), view=view)
    view.apply(OTHER, [LogRecord(0, 3, BatchCancel(id="batch_c", at_s=1))], 1)
    now_ms = FILE_RETENTION_MS + 2
    assert {f.id for f in view.files("acme")} == {"b", "a"}
    now_ms = FILE_RETENTION_MS + 3
    assert [f.id for f in view.files("acme")] == ["a"]
    assert view.cancelled_s("batch_c") == 1
    now_ms = FILE_RETENTION_MS + 4
    assert view.file("a", "acme") is None
    assert view.cancelled_s("batch_c") is None


def test_forgotten_partition_leaves_the_others() -> None:
    view = applied((1, card("a")))
    view.apply(OTHER, [LogRecord(0, 1, card("b"))], 1)
    view.forget(SOURCE)
    assert view.position(SOURCE) is None
    assert view.position(OTHER) == 1
    assert [f.id for f in view.files("acme")] == ["b"]
