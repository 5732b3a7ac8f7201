"""Tests of block hashes: the published vectors, a second implementation, and the rules around
them."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvlane.indexer.block_hashes import (
    block_seed,
    hash_blocks,
    local_hashes,
    multimodal_hash,
    sequence_hashes,
    token_array,
)
from kvlane.indexer.native.xxh3_kernels import hash_rows
from kvlane.indexer.xxh3 import xxh3
from tests.hashing_times import hashing_times

TOKENS = list(range(12))
LOCAL = [9143094415614847814, 12124091508212882195, 1088361764653601668]
SEQUENCE = [9143094415614847814, 9510318385840434533, 16998148715716822651]
FIRST = 0
seeds = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 1337, 2**64 - 1])


# --- the hash function ---------------------------------------------------------------------------


WORDS = [*range(1, 70), 127, 128, 129, 255, 256, 257, 271, 272, 273, 511, 512, 513, 600]
"""Rows around every border of the format: of length classes, of stripes, of blocks of stripes."""


def rows_hashed(
    tokens: np.ndarray[Any, np.dtype[np.uint32]], size: int, stride: int, rows: int, seed: int
) -> list[int]:
    hashes = np.empty(rows, np.uint64)
    hash_rows(tokens, size, stride, seed, hashes)
    return hashes.tolist()


def rows_expected(
    tokens: np.ndarray[Any, np.dtype[np.uint32]], size: int, stride: int, rows: int, seed: int
) -> list[int]:
    return [
        xxhash.xxh3_64_intdigest(tokens[stride * i :][:size].tobytes(), seed) for i in range(rows)
    ]


@pytest.mark.parametrize("seed", [0, 1337, 2**63, 2**64 - 1])
def test_rows_of_every_length_hash_as_the_reference_implementation_does(seed: int) -> None:
    tokens = (np.arange(3 * WORDS[-1], dtype=np.uint64) * 2654435761).astype("<u4")
    for size in WORDS:
        for rows in (0, 1, 2, 3):
            expected = rows_expected(tokens, size, size, rows, seed)
            assert rows_hashed(tokens, size, size, rows, seed) == expected, (size, rows)


@pytest.mark.parametrize("seed", [0, 1337, 2**63, 2**64 - 1])
@pytest.mark.parametrize("stride", [0, 15, 16, 21])
def test_any_number_of_rows_of_16_tokens_hashes_as_the_reference_implementation_does(
    stride: int, seed: int
) -> None:
    tokens = (np.arange(21 * 21, dtype=np.uint64) * 2654435761).astype("<u4")
    for rows in range(21):
        expected = rows_expected(tokens, 16, stride, rows, seed)
        assert rows_hashed(tokens, 16, stride, rows, seed) == expected, rows


@pytest.mark.parametrize("value", [0, 1, 2**16, 2**31, 2**32 - 1])
def test_rows_of_extreme_tokens_hash_as_the_reference_implementation_does(value: int) -> None:
    tokens = np.full(160, value, "<u4")
    for seed in (0, 1337, 2**64 - 1):
        assert rows_hashed(tokens, 16, 16, 10, seed) == rows_expected(tokens, 16, 16, 10, seed)


@given(size=st.integers(1, 300), data=st.data(), seed=seeds)
def test_rows_of_any_words_hash_as_the_reference_implementation_does(
    size: int, data: st.DataObject, seed: int
) -> None:
    tokens = np.frombuffer(data.draw(st.binary(min_size=4 * size, max_size=4 * size)), "<u4")
    assert rows_hashed(tokens, size, size, 1, seed) == rows_expected(tokens, size, size, 1, seed)


@pytest.mark.parametrize("size", [5, 17, 33, 65, 129, 300])
def test_rows_may_overlap(size: int) -> None:
    tokens = (np.arange(4 * size, dtype=np.uint64) * 2654435761).astype("<u4")
    expected = rows_expected(tokens, size, size - 1, 4, 1337)
    assert rows_hashed(tokens, size, size - 1, 4, 1337) == expected


# --- published vectors ---------------------------------------------------------------------------


def test_vector_of_plain_bytes() -> None:
    assert xxh3(b"test data", 1337) == 13226331709069118873


def test_vectors_of_local_and_sequence_hashes() -> None:
    hashes = hash_blocks(TOKENS, 4)
    assert (hashes.local.tolist(), hashes.sequence.tolist()) == (LOCAL, SEQUENCE)


@pytest.mark.parametrize(
    ("lora_name", "cache_salt", "first"),
    [
        ("adapter-a", "", 6665157333201000639),
        ("", "tenant-a", 17009624042690211646),
        ("adapter-a", "tenant-a", 8269515957840517240),
    ],
)
def test_vectors_with_adapter_and_salt(lora_name: str, cache_salt: str, first: int) -> None:
    hashes = hash_blocks(TOKENS, 4, lora_name=lora_name, cache_salt=cache_salt)
    assert hashes.local[FIRST] == first


def test_vectors_of_seeds() -> None:
    assert block_seed(lora_name="adapter-a") == 8842669519798868182
    assert block_seed(cache_salt="tenant-a") == 1948188790972764086


@pytest.mark.parametrize(
    ("objects", "first"),
    [
        ([42], 18280081842874931122),
        ([7, 42], 4581426371996505827),
        ([42, 7], 4581426371996505827),
        ([7, 42, 7], 4581426371996505827),
    ],
)
def test_vectors_with_multimodal_objects(objects: list[int], first: int) -> None:
    assert hash_blocks(TOKENS, 4, mm_hashes=[objects]).local[FIRST] == first


# --- rules ---------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300),
    size=st.sampled_from([1, 3, 4, 16, 32, 64, 128]),
    lora_name=st.sampled_from(["", "adapter-ä"]),
    cache_salt=st.sampled_from(["", "tenant-a"]),
    objects=st.lists(st.none() | st.sets(st.integers(0, 2**64 - 1), max_size=3), max_size=4),
    seed=seeds,
)
def test_local_hashes_agree_with_the_formula(
    tokens: list[int], size: int, lora_name: str, cache_salt: str,
    objects: list[set[int] | None], seed: int,
) -> None:  # fmt: skip
    salted = seed
    if lora_name:
        salted += xxhash.xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        salted += xxhash.xxh3_64_intdigest(cache_salt.encode(), 1)
    expected = []
    for i in range(len(tokens) // size):
        data = np.array(tokens[size * i :][:size], "<u4").tobytes()
        held = objects[i] if i < len(objects) else None
        data += np.array(sorted(held or ()), "<u8").tobytes()
        expected.append(xxhash.xxh3_64_intdigest(data, salted % 2**64))
    found = local_hashes(
        tokens, size, lora_name=lora_name, cache_salt=cache_salt, mm_hashes=objects, seed=seed
    )
    assert found.tolist() == expected


@given(local=st.lists(st.integers(0, 2**64 - 1), max_size=6), seed=seeds)
def test_chain_agrees_with_the_formula(local: list[int], seed: int) -> None:
    expected = local[:1]
    for value in local[1:]:
        data = np.array([expected[-1], value], "<u8").tobytes()
        expected.append(xxhash.xxh3_64_intdigest(data, seed))
    assert sequence_hashes(np.array(local, np.uint64), seed=seed).tolist() == expected


def test_tail_is_dropped() -> None:
    assert hash_blocks([*TOKENS, 1, 2, 3], 4).local.tolist() == LOCAL


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_less_than_a_block_has_no_hash(tokens: list[int]) -> None:
    hashes = hash_blocks(tokens, 4)
    assert (len(hashes.local), len(hashes.sequence)) == (0, 0)


def test_objects_change_their_own_block_only() -> None:
    assert hash_blocks(TOKENS, 4, mm_hashes=[None, {42}]).local[[0, 2]].tolist() == LOCAL[::2]


def test_objects_in_the_dropped_tail_change_no_hash() -> None:
    assert hash_blocks(TOKENS, 4, mm_hashes=[None, None, None, {42}]).local.tolist() == LOCAL


def test_salt_and_adapter_leave_the_chain_unsalted() -> None:
    hashes = hash_blocks(TOKENS, 4, cache_salt="tenant-a")
    assert hashes.sequence.tolist() == sequence_hashes(hashes.local).tolist()


def test_identifier_of_64_hex_digits_is_its_own_hash() -> None:
    assert multimodal_hash("0123456789abcdef" + "F" * 48) == 0x0123456789ABCDEF


@pytest.mark.parametrize("identifier", ["cat.png", "a" * 63, "g" * 64, "0x" + "1" * 62, "é" * 64])
def test_any_other_identifier_is_hashed(identifier: str) -> None:
    assert multimodal_hash(identifier) == xxhash.xxh3_64_intdigest(identifier.encode(), 0)


def test_empty_identifier_has_no_hash() -> None:
    assert multimodal_hash("") is None


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        array("I", TOKENS),
        array("q", TOKENS),
        np.array(TOKENS, "<u4"),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, ">u4"),
        np.array(TOKENS, "<u4").tobytes(),
        memoryview(np.array(TOKENS, "<u4").tobytes()),
        memoryview(b"?" + np.array(TOKENS, "<u4").tobytes())[1:],
        bytearray(np.array(TOKENS, "<u4").tobytes()),
        np.repeat(np.array(TOKENS, "<u4"), 2)[::2],
        range(12),
        deque(TOKENS),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_may_come_in_any_container(tokens: list[int]) -> None:
    assert hash_blocks(tokens, 4).local.tolist() == LOCAL


def test_largest_token_is_taken() -> None:
    assert token_array([2**32 - 1]).tolist() == [2**32 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.5],
        ["a"],
        [[1, 2], [3, 4]],
        np.zeros((2, 2), np.int64),
        np.array([-1]),
        np.array([2**32]),
        np.array([1.5]),
        b"abc",
    ],
    ids=repr,
)
def test_invalid_tokens_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_array(tokens)


@pytest.mark.parametrize("block_size", [0, -1])
def test_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block size"):
        hash_blocks(TOKENS, block_size)


# --- the bench -----------------------------------------------------------------------------------


def test_bench_times_every_block_size() -> None:
    times = hashing_times(repeats=1)
    assert set(times.local) == set(times.listed) == {16, 32, 64, 128}
    assert min(*times.local.values(), *times.listed.values(), times.chain, times.sums) > 0
