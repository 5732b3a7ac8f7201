"""Tests of the keys of the index: sums that continue from any block with the secret."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.indexer.block_hashes import (
    LOOPBACK_SECRET,
    derive_secret,
    hash_blocks,
    keys_from_sums,
    prefix_sums,
    prompt_keys,
)

SECRET = derive_secret(b"a secret")
MASK = 2**64 - 1
columns = st.lists(st.integers(0, MASK), max_size=40)


def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


def sums_by_hand(local: list[int]) -> list[int]:
    total, sums = 0, []
    for j, value in enumerate(local):
        y = (value ^ (SECRET.start + j * SECRET.step & MASK)) * SECRET.first & MASK
        total = total + (y ^ y >> 32) * SECRET.second & MASK
        sums.append(total)
    return sums


@given(local=columns)
def test_keys_follow_the_formula(local: list[int]) -> None:
    assert prefix_sums(column(local), SECRET).tolist() == sums_by_hand(local)


@given(local=columns, cut=st.integers(0, 40))
def test_sums_can_be_continued_from_any_block(local: list[int], cut: int) -> None:
    head, tail = local[:cut], local[cut:]
    first = prefix_sums(column(head), SECRET).tolist()
    before = first[-1] if first else 0
    rest = prefix_sums(column(tail), SECRET, position=len(head), parent_sum=before).tolist()
    assert first + rest == prefix_sums(column(local), SECRET).tolist()


def test_same_content_has_another_key_at_another_place() -> None:
    twice = prefix_sums(column([5, 5]), SECRET).tolist()
    assert twice[1] - twice[0] & MASK != twice[0]


def test_swapped_blocks_have_other_keys() -> None:
    assert prompt_keys(column([1, 2]), SECRET)[1] != prompt_keys(column([2, 1]), SECRET)[1]


def test_no_key_equals_the_marker_of_an_empty_slot() -> None:
    assert keys_from_sums(column([0, 1, 2])).tolist() == [1, 1, 2]


def test_salts_separate_keys() -> None:
    one, other = (hash_blocks(range(8), 4, cache_salt=s).local for s in ("a", "b"))
    assert not set(prompt_keys(one, SECRET)) & set(prompt_keys(other, SECRET))


def test_keys_and_fingerprint_belong_to_the_secret() -> None:
    other = derive_secret(b"another secret")
    assert other.fingerprint != SECRET.fingerprint
    assert prompt_keys(column([1]), other)[0] != prompt_keys(column([1]), SECRET)[0]


def test_constants_are_fixed_for_a_secret() -> None:
    secret = derive_secret(LOOPBACK_SECRET)
    assert prompt_keys(column([1, 2]), secret).tolist() == [
        13704697850232968236,
        466053648525957990,
    ]
    assert secret.fingerprint == "06d0638898337431"


def test_multipliers_are_odd_so_that_nothing_is_lost() -> None:
    assert SECRET.step % 2 == SECRET.first % 2 == SECRET.second % 2 == 1


def test_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        derive_secret(b"")
