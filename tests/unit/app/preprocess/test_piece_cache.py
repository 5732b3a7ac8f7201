"""Tests of the cache of tokenised pieces: a bound of the process, and a share for each tenant."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.preprocess.text import tokenizer
from kvlane.app.preprocess.text.tokenizer import MAX_SHARES, MIN_CHARS, PieceCache, Scope, size_of

MODEL = "a model"
TOKENS = array("I", range(10))


def text_of(name: str) -> str:
    return name.ljust(MIN_CHARS, "x")


ROOM = size_of(text_of(""), TOKENS)


def put(pieces: PieceCache, tenant: str, name: str) -> None:
    pieces.put(MODEL, Scope(tenant), text_of(name), TOKENS)


def has(pieces: PieceCache, tenant: str, name: str) -> bool:
    return pieces.get(MODEL, Scope(tenant), text_of(name)) is not None


def test_least_recently_used_piece_is_evicted() -> None:
    pieces = PieceCache(2 * ROOM)
    put(pieces, "", "a")
    put(pieces, "", "b")
    assert has(pieces, "", "a")
    put(pieces, "", "c")
    assert [name for name in "abc" if has(pieces, "", name)] == ["a", "c"]


def test_tenant_that_fills_the_cache_evicts_its_own_pieces() -> None:
    pieces = PieceCache(10 * ROOM)
    for name in ("a", "b", "c"):
        put(pieces, "acme", name)
    for number in range(100):
        put(pieces, "evil", str(number))
    assert all(has(pieces, "acme", name) for name in "abc")


def test_salts_of_a_tenant_share_its_share() -> None:
    pieces = PieceCache(10 * ROOM)
    put(pieces, "acme", "a")
    for number in range(100):
        pieces.put(MODEL, Scope("evil", str(number)), text_of("b"), TOKENS)
    assert has(pieces, "acme", "a")


def test_piece_belongs_to_its_model_and_salt() -> None:
    pieces = PieceCache()
    pieces.put(MODEL, Scope("acme", "s"), text_of("a"), TOKENS)
    assert pieces.get(MODEL, Scope("acme", "s"), text_of("a")) == TOKENS
    assert pieces.get("another", Scope("acme", "s"), text_of("a")) is None
    assert pieces.get(MODEL, Scope("acme"), text_of("a")) is None


def test_short_pieces_and_those_above_the_bound_are_not_kept() -> None:
    pieces = PieceCache(10 * ROOM)
    pieces.put(MODEL, Scope(), "short", TOKENS)
    pieces.put(MODEL, Scope(), "long" * 10 * ROOM, TOKENS)
    assert pieces.bytes == 0


def test_number_of_shares_is_bounded() -> None:
    pieces = PieceCache()
    for number in range(MAX_SHARES + 1):
        put(pieces, str(number), "a")
    assert not has(pieces, "0", "a")
    assert has(pieces, "1", "a")
    assert pieces.bytes == MAX_SHARES * ROOM


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 400))))
def test_memory_is_bounded_whatever_is_put(puts: list[tuple[str, int, int]]) -> None:
    most = 5 * ROOM
    pieces = PieceCache(most)
    for tenant, number, tokens in puts:
        pieces.put(MODEL, Scope(tenant), text_of(str(number)), array("I", range(tokens)))
        entries = [e for share in pieces._shares.values() for e in share.pieces.items()]
        assert pieces.bytes == sum(size_of(key.text, value) for key, value in entries) <= most
        assert pieces.bytes == sum(share.bytes for share in pieces._shares.values())


def test_size_of_an_entry_covers_its_key() -> None:
    key = tokenizer._Key(MODEL, "", "")
    assert key.__sizeof__() + 3 * 24 <= tokenizer.ENTRY_BYTES
