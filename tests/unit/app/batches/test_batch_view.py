"""Tests of the view of files and batch jobs: their tenants, and their end."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.batches.batch_log import BatchView, batch_key, file_key
from kvlane.streams.ports import Partition
from kvlane.streams.record_types.batch_records import (
    BatchCancel,
    BatchJob,
    FileCard,
    ResponseDeletion,
)
from kvlane.streams.records import LogRecord, Tombstone
from kvlane.streams.topics import BATCH_JOBS, FILE_RETENTION_MS

SOURCE = Partition(BATCH_JOBS, 0)
OTHER = Partition(BATCH_JOBS, 1)


def card(name: str, tenant: str = "acme", **over: Any) -> FileCard:
    fields: dict[str, Any] = {
        "id": name, "purpose": "batch", "partition": 0, "first": 0, "end": 1, "size": 1,
        "sha256": "00", "created_s": 1, "tenant": tenant,
    }  # fmt: skip
    return FileCard(**(fields | over))


def job(**over: Any) -> BatchJob:
    fields: dict[str, Any] = {
        "id": "batch_a", "endpoint": "/v1/embeddings", "input_file_id": "f", "created_s": 0,
        "window_s": 60, "tenant": "acme",
    }  # fmt: skip
    return BatchJob(**(fields | over))


def compacted(*records: tuple[int, Any]) -> list[tuple[int, Any]]:
    """The records of files and jobs after compaction: the last of each key."""
    last: dict[str, tuple[int, Any]] = {}
    for at_ms, record in records:
        key = record.key if isinstance(record, Tombstone) else record.id
        last[key.rpartition("/")[2]] = at_ms, record
    return list(last.values())


def applied(*records: tuple[int, Any], now_ms: int = 0, view: BatchView | None = None) -> BatchView:
    view = view or BatchView(lambda: now_ms)
    at = view.position(SOURCE) or 0
    log_records = [LogRecord(at + n, at_ms, record) for n, (at_ms, record) in enumerate(records)]
    view.apply(SOURCE, log_records, at + len(log_records))
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


def deletion(response_id: str) -> ResponseDeletion:
    return ResponseDeletion(id=response_id, tenant="acme")


def test_response_stays_deleted_for_as_long_as_it_may_be_kept() -> None:
    now_ms = 1
    view = applied((1, deletion("r")), (3, deletion("s")), view=BatchView(lambda: now_ms, 100))
    applied((1, deletion("r")), view=view)
    assert [view.is_deleted(name) for name in "rst"] == [True, True, False]
    assert (view.deletions("acme"), view.deletions("globex")) == (2, 0)
    now_ms = 101
    assert view.is_deleted("r")
    now_ms = 102
    assert (view.is_deleted("r"), view.deletions("acme")) == (False, 1)
    view.forget(SOURCE)
    assert (view.is_deleted("s"), view.deletions("acme")) == (False, 0)


def test_process_without_responses_keeps_no_deletions() -> None:
    view = applied((1, deletion("r")))
    assert (view.is_deleted("r"), view.deletions("acme")) == (False, 0)


def test_forgotten_partition_leaves_the_others() -> None:
    view = applied((1, card("a")))
    view.apply(OTHER, [LogRecord(0, 1, card("b"))], 1)
    view.forget(SOURCE)
    assert view.position(SOURCE) is None
    assert view.position(OTHER) == 1
    assert [f.id for f in view.files("acme")] == ["b"]


# --- records that do not count --------------------------------------------------------------------

OWNED = job(fence=50, writes=7, status="completed")
LATE = {
    "former owner": job(fence=10, writes=9, status="in_progress", completed=3),
    "repeated earlier record": job(fence=50, writes=6, status="finalizing"),
    "repeated creation": job(),
}


@pytest.mark.parametrize("late", LATE)
def test_late_record_of_a_job_counts_neither_now_nor_after_compaction(late: str) -> None:
    log = [(1, job()), (2, job(fence=50, writes=6)), (3, OWNED), (4, LATE[late])]
    view = applied(*log)
    assert view.job("batch_a", "acme") == OWNED
    assert view.open_jobs() == []
    assert view.overwritten() == {batch_key("batch_a"): (0, OWNED)}
    log.append((5, OWNED))  # as the owner of the partition writes it
    applied(log[-1], view=view)
    assert view.overwritten() == {}
    for kept in (log, compacted(*log)):
        assert applied(*kept).job("batch_a", "acme") == OWNED


def test_late_card_of_a_deleted_file_brings_nothing_back() -> None:
    key = file_key("a")
    log = [(1, card("a")), (2, Tombstone(key=key)), (3, card("a"))]
    view = applied(*log)
    assert view.file("a", "acme") is None
    assert view.overwritten() == {key: (0, Tombstone(key=key))}
    log.append((4, Tombstone(key=key)))
    applied(log[-1], view=view)
    assert view.overwritten() == {}
    for kept in (log, compacted(*log)):
        assert applied(*kept).file("a", "acme") is None


def test_of_two_cancels_the_last_one_counts_before_and_after_compaction() -> None:
    log = [(1, BatchCancel(id="batch_a", at_s=5)), (2, BatchCancel(id="batch_a", at_s=6))]
    assert applied(*log).cancelled_s("batch_a") == 6
    assert applied(*compacted(*log)).cancelled_s("batch_a") == 6


def test_job_beyond_the_limit_of_its_tenant_does_not_exist() -> None:
    """Those before it in the partition count, whichever gateway wrote them."""
    limited = [job(id=f"batch_{n}", most_open=2, tenant=t) for n, t in enumerate("aabaa")]
    view = applied(*((1, each) for each in limited))
    assert [each.id for each in view.open_jobs()] == ["batch_0", "batch_1", "batch_2"]
    assert view.overwritten() == {
        batch_key(each.id): (0, Tombstone(key=batch_key(each.id))) for each in limited[3:]
    }
    applied((2, job(id="batch_0", tenant="a", fence=1, writes=1, status="completed")), view=view)
    applied((3, job(id="batch_5", tenant="a", most_open=2)), view=view)
    assert [each.id for each in view.open_jobs()] == ["batch_1", "batch_2", "batch_5"]


def test_what_does_not_count_is_forgotten_with_its_partition() -> None:
    view = applied((1, job(id="a", most_open=1)), (1, job(id="b", most_open=1)))
    view.forget(SOURCE)
    assert view.overwritten() == {}
    assert view.open_jobs() == []
    applied((1, job(id="b", most_open=1)), view=view)
    assert [each.id for each in view.open_jobs()] == ["b"]
