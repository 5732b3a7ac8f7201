"""Parts of a file in the log: which of them count, whoever writes them, and however often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.batches.file_store import FileKeys, PartOrder
from streams.memory.partition_log import MemoryRecord

FENCE = "fence"


def record(key: str, value: bytes | None = b"x") -> MemoryRecord:
    return MemoryRecord("file-parts", 0, 0, 0, key.encode(), value, ())


def accepted(*keys: str) -> list[str]:
    order = PartOrder("f")
    return [key for key in keys if order.accept(record(key))]


def test_parts_count_in_their_order_and_once() -> None:
    keys = ["f/0/0", "f/0/1", "f/0/1", "f/0/0", "f/0/2", "f/0/4", "f/0/3"]
    assert accepted(*keys) == ["f/0/0", "f/0/1", "f/0/2", "f/0/3"]


def test_parts_of_a_former_run_do_not_count_after_a_fence() -> None:
    keys = ["f/a/fence", "f/a/0", "f/b/fence", "f/a/1", "f/b/1", "f/a/2", "f/b/2"]
    assert accepted(*keys) == ["f/a/0", "f/b/1", "f/b/2"]


def test_other_records_of_the_partition_do_not_count() -> None:
    keys = ["g/0/0", "f/0/0", "f/0", "f/0/x", "f/0/-1", "f/0/\xb2", "ff/0/1", f"f/0/{10**12}"]
    assert accepted(*keys) == ["f/0/0"]
    order = PartOrder("f")
    assert not order.accept(record("f/0/0", None))
    assert order.accept(record("f/0/0", b""))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5) | st.just(FENCE))))
def test_parts_of_a_file_are_numbered_without_a_gap(writes: list[tuple[str, object]]) -> None:
    """Whatever three writers append, readers see one sequence, of one run between two fences."""
    keys = [f"f/{run}/{number}" for run, number in writes]
    order, run, numbers = PartOrder("f"), None, []
    for key in keys:
        if key.endswith(FENCE):
            run = key[2]
        if order.accept(record(key)):
            run = run or key[2]
            assert key[2] == run
            numbers.append(int(key.rpartition("/")[2]))
    assert numbers == list(range(len(numbers)))
    assert order.parts == len(numbers)


def test_filter_has_all_keys_of_its_files() -> None:
    keys = FileKeys("f", "g")
    assert all(key in keys for key in (b"f/0/0", b"g/x/fence"))
    assert not any(key in keys for key in (b"ff/0/0", b"f", None, b"h/f/0"))
