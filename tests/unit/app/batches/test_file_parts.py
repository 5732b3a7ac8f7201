"""Tests of parts of a file in the log: those that count, with any writers and repetitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.batches.file_store import FileKeys, PartOrder
from kvlane.streams.memory.partition_log import MemoryRecord

FENCE = "fence"


def record(key: str, value: bytes | None = b"x") -> MemoryRecord:
    return MemoryRecord("file-parts", 0, 0, 0, key.encode(), value, ())


def accepted(*keys: str) -> list[str]:
    order = PartOrder("f")
    return [key for key in keys if order.accept(record(key))]


def test_each_number_counts_once_wherever_it_comes() -> None:
    keys = ["f/0/0", "f/0/1", "f/0/1", "f/0/0", "f/0/2", "f/0/4", "f/0/3", "f/0/4", "f/0/003"]
    assert accepted(*keys) == ["f/0/0", "f/0/1", "f/0/2", "f/0/4", "f/0/3"]


@given(st.permutations([f"f/0/{'0' * (n % 3)}{n}" for n in range(6)]))
def test_repetition_behind_other_parts_takes_nothing_away_by_compaction(keys: list[str]) -> None:
    order = PartOrder("f")
    assert all(order.accept(record(key)) for key in keys)
    assert order.next_number == 6


def test_parts_of_a_former_run_do_not_count_after_a_fence() -> None:
    keys = ["f/a/fence", "f/a/0", "f/b/fence", "f/a/1", "f/b/1", "f/a/2", "f/b/2"]
    assert accepted(*keys) == ["f/a/0", "f/b/1", "f/b/2"]


def test_other_records_of_the_partition_do_not_count() -> None:
    keys = [
        "g/0/0",
        "f/0/0",
        "f/0",
        "f/0/x",
        "f/0/-1",
        "f/0/\xb2",
        "ff/0/1",
        f"f/0/{10**12}",
        f"f/0/{10**9}",
    ]
    assert accepted(*keys) == ["f/0/0"]
    order = PartOrder("f")
    assert not order.accept(record("f/0/0", None))
    assert order.accept(record("f/0/0", b""))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5) | st.just(FENCE))))
def test_parts_between_two_fences_are_of_one_run(writes: list[tuple[str, object]]) -> None:
    """Whatever three writers append, readers see each number once."""
    order, run, numbers = PartOrder("f"), None, []
    for key in (f"f/{run}/{number}" for run, number in writes):
        if key.endswith(FENCE):
            run = key[2]
        if order.accept(record(key)):
            run = run or key[2]
            assert key[2] == run
            numbers.append(int(key.rpartition("/")[2]))
            assert order.number == numbers[-1]
    assert len(numbers) == len(set(numbers))
    assert order.next_number == max(numbers, default=-1) + 1


def test_filter_has_all_keys_of_its_files() -> None:
    keys = FileKeys("f", "g")
    assert all(key in keys for key in (b"f/0/0", b"g/x/fence"))
    assert not any(key in keys for key in (b"ff/0/0", b"f", None, b"h/f/0"))
