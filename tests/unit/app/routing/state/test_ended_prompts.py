"""Tests of ids of ended prompts: their retention, and their records on the topic."""

from __future__ import annotations

from kvlane.app.routing.state.ended_prompts import BLOCK_IDS, MAX_UNSAVED_OFFSETS, EndedPrompts
from kvlane.streams.ports import Partition
from kvlane.streams.records import EndedIds, LogRecord
from kvlane.streams.topics import ENDED_IDS, PROMPT_READABLE_MS

WINDOW_MS = 20_000
SOURCE = Partition(ENDED_IDS, 0)


def ended(*ids: str, at_ms: int = 1_000_000, lane: int = 3, offset: int = 0) -> EndedPrompts:
    """A memory of prompts that ended one after the other."""
    view = EndedPrompts(WINDOW_MS)
    for n, name in enumerate(ids):
        view.add(lane, offset + n, name, at_ms)
    return view


def save(view: EndedPrompts, position: int, lane: int = 3) -> EndedIds:
    record = view.unsaved(lane, position)
    assert record is not None
    view.apply(SOURCE, [LogRecord(0, 0, record)], 1)
    return record


def test_copy_counts_by_its_append() -> None:
    view = ended("x", at_ms=1_000_000)
    assert view.is_repetition(3, "x", 0)
    assert view.is_repetition(3, "x", 1_000_000 + WINDOW_MS - 1)
    assert not view.is_repetition(3, "x", 1_000_000 + WINDOW_MS + 1000)
    assert not view.is_repetition(3, "y", 0)
    assert not view.is_repetition(2, "x", 0)


def test_later_end_of_an_id_counts_whatever_order_they_are_read_in() -> None:
    view = ended("x", at_ms=2_000_000)
    view.add(3, 1, "x", 1_000_000)
    assert view.is_repetition(3, "x", 2_000_000)


def test_ids_are_known_as_long_as_a_copy_can_be_read_and_no_longer() -> None:
    view = EndedPrompts(WINDOW_MS)
    kept_ms = PROMPT_READABLE_MS + WINDOW_MS
    view.add(0, 0, "first", 0)
    for n in range(1, BLOCK_IDS):
        view.add(0, n, f"a{n}", 0)
    for n in range(BLOCK_IDS):
        view.add(0, BLOCK_IDS + n, f"b{n}", kept_ms)
    assert view.is_repetition(0, "first", 0)
    for n in range(BLOCK_IDS):
        view.add(0, 2 * BLOCK_IDS + n, f"c{n}", kept_ms + 1000)
    assert not view.is_repetition(0, "first", 0)
    assert view.is_repetition(0, "b0", 0)
    assert view.is_repetition(0, "c8000", 0)


def test_each_end_is_saved_once_and_read_by_others() -> None:
    view = ended("a", "b", offset=10)
    first = save(view, 15)
    assert (first.until, len(first.digests), len(first.ended_s)) == (15, 16, 8)
    view.add(3, 14, "late", 1_000_000)  # it was in the record: the ledger is read again
    assert view.unsaved(3, 15) is None
    view.add(3, 15, "c", 1_000_000)
    second = save(view, 16)
    assert len(second.digests) == 8
    other = EndedPrompts(WINDOW_MS)
    other.apply(SOURCE, [LogRecord(n, 0, record) for n, record in enumerate((first, second))], 2)
    assert other.saved_until(3) == 16
    assert all(other.is_repetition(3, name, 0) for name in "abc")
    assert not other.is_repetition(3, "late", 0)


def test_position_is_saved_without_ends_from_the_first_record_on_and_now_and_then() -> None:
    view = EndedPrompts(WINDOW_MS)
    assert view.saved_until(3) is None
    assert save(view, 7).until == 7
    assert view.unsaved(3, 7 + MAX_UNSAVED_OFFSETS) is None
    assert save(view, 8 + MAX_UNSAVED_OFFSETS).digests == b""


def test_record_of_a_former_owner_moves_nothing_back() -> None:
    view = ended("a")
    save(view, 9)
    view.apply(SOURCE, [LogRecord(1, 0, EndedIds(lane=3, until=4))], 2)
    assert view.saved_until(3) == 9


def test_ledger_that_was_made_anew_is_saved_again() -> None:
    view = ended("a", offset=50)
    records = [save(view, 60)]
    view.add(3, 0, "b", 1_000_000)  # of the new ledger
    assert view.unsaved(3, 1) is None
    view.restart(3)
    view.add(3, 1, "c", 1_000_000)
    records.append(save(view, 2))
    view.add(3, 2, "d", 1_000_000)
    records.append(save(view, 3))
    assert len(records[-1].digests) == 8
    other = EndedPrompts(WINDOW_MS)
    other.apply(SOURCE, [LogRecord(n, 0, record) for n, record in enumerate(records)], 3)
    assert other.saved_until(3) == 3
    assert all(other.is_repetition(3, name, 0) for name in "abcd")


def test_damaged_record_is_read_as_far_as_it_goes() -> None:
    view = EndedPrompts(WINDOW_MS)
    record = save(ended("a", "b"), 9)
    cut = EndedIds(lane=3, until=9, digests=record.digests[:-1], ended_s=record.ended_s[:-1])
    view.apply(SOURCE, [LogRecord(0, 0, cut)], 1)
    assert view.is_repetition(3, "a", 0)
    assert not view.is_repetition(3, "b", 0)
