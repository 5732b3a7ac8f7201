"""Block hashes: the published vectors, a second implementation, and the rules around them."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from indexer.hashing import (
    FEW_ROWS,
    block_seed,
    hash_blocks,
    local_hashes,
    multimodal_hash,
    sequence_hashes,
    token_column,
)
from indexer.xxh3 import xxh3, xxh3_rows

TOKENS = list(range(12))
LOCAL = [9143094415614847814, 12124091508212882195, 1088361764653601668]
SEQUENCE = [9143094415614847814, 9510318385840434533, 16998148715716822651]
FIRST = 0
seeds = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 1337, 2**64 - 1])
LENGTH_CLASSES = [(0, 3), (4, 8), (9, 16), (17, 128), (129, 240), (241, 1024), (1025, 2100)]


# --- the hash function ---------------------------------------------------------------------------


@pytest.mark.parametrize(("shortest", "longest"), LENGTH_CLASSES)
@given(data=st.data(), seed=seeds)
def test_bytes_hash_as_the_reference_implementation_does(
    shortest: int, longest: int, data: st.DataObject, seed: int
) -> None:
    value = data.draw(st.binary(min_size=shortest, max_size=longest))
    assert xxh3(value, seed) == xxhash.xxh3_64_intdigest(value, seed)


@pytest.mark.parametrize("seed", [0, 1337, 2**64 - 1])
def test_every_length_up_to_the_second_block_of_stripes_agrees(seed: int) -> None:
    data = bytes(i * 37 % 251 for i in range(1100))
    for length in range(len(data)):
        assert xxh3(data[:length], seed) == xxhash.xxh3_64_intdigest(data[:length], seed), length


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5, 8, 16, 32, 33, 60, 61, 64, 128, 256, 257, 512])
@given(seed=seeds, start=st.integers(0, 2**32 - 1))
def test_rows_hash_as_their_bytes_do(words: int, seed: int, start: int) -> None:
    rows = (np.arange(3 * words, dtype=np.uint64) * 2654435761 + start).astype("<u4")
    rows = rows.reshape(3, words)
    assert xxh3_rows(rows, seed).tolist() == [
        xxhash.xxh3_64_intdigest(row.tobytes(), seed) for row in rows
    ]


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


def test_blocks_agree_with_the_formula_however_many_there_are() -> None:
    for blocks in (1, FEW_ROWS, FEW_ROWS + 1, 40):
        tokens = [i * 7919 % 2**32 for i in range(16 * blocks)]
        expected = [
            xxhash.xxh3_64_intdigest(np.array(tokens[16 * i : 16 * i + 16], "<u4").tobytes(), 1337)
            for i in range(blocks)
        ]
        assert local_hashes(tokens, 16).tolist() == expected


@given(local=st.lists(st.integers(0, 2**64 - 1), max_size=6), seed=seeds)
def test_the_chain_agrees_with_the_formula(local: list[int], seed: int) -> None:
    expected = local[:1]
    for value in local[1:]:
        data = np.array([expected[-1], value], "<u8").tobytes()
        expected.append(xxhash.xxh3_64_intdigest(data, seed))
    assert sequence_hashes(np.array(local, np.uint64), seed=seed).tolist() == expected


def test_a_tail_is_dropped() -> None:
    assert hash_blocks([*TOKENS, 1, 2, 3], 4).local.tolist() == LOCAL


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_less_than_a_block_has_no_hash(tokens: list[int]) -> None:
    hashes = hash_blocks(tokens, 4)
    assert (len(hashes.local), len(hashes.sequence)) == (0, 0)


def test_objects_change_their_own_block_only() -> None:
    assert hash_blocks(TOKENS, 4, mm_hashes=[None, {42}]).local[[0, 2]].tolist() == LOCAL[::2]


def test_objects_in_the_dropped_tail_count_nowhere() -> None:
    assert hash_blocks(TOKENS, 4, mm_hashes=[None, None, None, {42}]).local.tolist() == LOCAL


def test_salt_and_adapter_leave_the_chain_unsalted() -> None:
    hashes = hash_blocks(TOKENS, 4, cache_salt="tenant-a")
    assert hashes.sequence.tolist() == sequence_hashes(hashes.local).tolist()


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_speculative_heads_overlap_blocks_by_one_token(length: int, blocks: int) -> None:
    tokens = list(range(length))
    expected = [
        xxhash.xxh3_64_intdigest(np.array(tokens[4 * i : 4 * i + 5], "<u4").tobytes(), 1337)
        for i in range(blocks)
    ]
    assert hash_blocks(tokens, 4, eagle=True).local.tolist() == expected


def test_an_identifier_of_64_hex_digits_is_its_own_hash() -> None:
    assert multimodal_hash("0123456789abcdef" + "F" * 48) == 0x0123456789ABCDEF


@pytest.mark.parametrize("identifier", ["cat.png", "a" * 63, "g" * 64, "0x" + "1" * 62, "é" * 64])
def test_any_other_identifier_is_hashed(identifier: str) -> None:
    assert multimodal_hash(identifier) == xxhash.xxh3_64_intdigest(identifier.encode(), 0)


def test_an_empty_identifier_has_no_hash() -> None:
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
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_tokens_may_come_in_any_container(tokens: list[int]) -> None:
    assert hash_blocks(tokens, 4).local.tolist() == LOCAL


def test_the_largest_token_is_taken() -> None:
    assert token_column([2**32 - 1]).tolist() == [2**32 - 1]


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [1.5], np.zeros((2, 2), np.int64), b"abc"], ids=repr
)
def test_what_are_no_tokens_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_column(tokens)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block size"):
        hash_blocks(TOKENS, block_size)
