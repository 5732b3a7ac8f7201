"""Tests of request ids."""

from __future__ import annotations

import random
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.ids import RequestIds, TenantTag, has_tenant_tag, issued_ms, new_request_id


class Wall:
    """A clock that shows the given times, one after the other, and then the last one."""

    def __init__(self, *times_ms: int) -> None:
        self._times = list(times_ms)

    def now(self) -> float:
        raise NotImplementedError

    def wall_ms(self) -> int:
        return self._times.pop(0) if len(self._times) > 1 else self._times[0]

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def test_id_is_a_uuid_of_version_7() -> None:
    drawn = uuid.UUID(new_request_id(Wall(1_700_000_000_123), random.Random(1)))
    assert (drawn.version, drawn.variant) == (7, uuid.RFC_4122)


def test_id_has_its_creation_time() -> None:
    assert issued_ms(new_request_id(Wall(1_700_000_000_123), random.Random(1))) == 1_700_000_000_123


def test_text_after_the_uuid_is_ignored() -> None:
    drawn = new_request_id(Wall(1_700_000_000_123), random.Random(1))
    assert issued_ms(drawn + "0badcafe") == 1_700_000_000_123


@given(st.integers(0, 2**32), st.lists(st.integers(1, 2**47), min_size=1, max_size=50))
def test_ids_rise_whatever_the_clock_does(seed: int, times_ms: list[int]) -> None:
    ids = RequestIds(Wall(*times_ms), random.Random(seed))
    drawn = [ids.new() for _ in range(len(times_ms) + 5)]
    assert drawn == sorted(set(drawn))


def test_ids_rise_beyond_the_room_of_a_millisecond() -> None:
    ids = RequestIds(Wall(1_700_000_000_000), random.Random(1))
    drawn = [ids.new() for _ in range(20_000)]
    assert drawn == sorted(set(drawn))
    ahead_ms = (issued_ms(drawn[-1]) or 0) - 1_700_000_000_000
    assert ahead_ms <= 10, "an id must not say a time that is far ahead"


def test_ids_of_two_processes_differ() -> None:
    first, second = (
        RequestIds(Wall(1_700_000_000_000), random.Random(seed)).new() for seed in (1, 2)
    )
    assert first != second


@pytest.mark.parametrize(
    "other",
    [
        "job-17",
        "",
        "018f2d3c-0000-4000-8000-000000000001",  # version 4
        "018f2d3c000070008000000000000001",
        "{018f2d3c-0000-7000-8000-000000000001}",
        "urn:uuid:018f2d3c-0000-7000-8000-000000000001",
    ],
)
def test_foreign_ids_have_no_creation_time(other: str) -> None:
    assert issued_ms(other) is None


@given(st.text())
def test_any_text_is_an_id_without_a_time_or_with_one(text: str) -> None:
    assert issued_ms(text) is None or 0 <= (issued_ms(text) or 0) < 2**48


DRAWN = "01900000-0000-7000-8000-0123456789ab"


def test_sealed_id_is_that_of_its_tenant_only() -> None:
    seal = TenantTag(b"secret")
    sealed = seal.tagged(DRAWN, "acme")
    assert sealed[:36] == DRAWN
    assert len(sealed) == 45
    assert seal.matches(sealed, "acme")
    assert not seal.matches(sealed, "acme2")
    assert not seal.matches(sealed, "")
    assert not TenantTag(b"another").matches(sealed, "acme")


def test_seal_is_stable_between_versions() -> None:
    assert TenantTag(b"secret").tagged(DRAWN, "acme") == f"{DRAWN}-5f3e7c96"


@pytest.mark.parametrize("place", [0, 8, 35, 36, 37, 44])
def test_changed_sealed_id_belongs_to_no_tenant(place: int) -> None:
    seal = TenantTag(b"secret")
    sealed = seal.tagged(DRAWN, "acme")
    other = "1" if sealed[place] != "1" else "2"
    assert not seal.matches(sealed[:place] + other + sealed[place + 1 :], "acme")


@given(st.text(max_size=60), st.text(max_size=20))
def test_tenant_tag_matches_no_malformed_id(request_id: str, tenant: str) -> None:
    assert not TenantTag(b"secret").matches(request_id, tenant)
    assert not TenantTag(b"secret").matches(f"{DRAWN}-{request_id}", tenant)


def test_sealed_id_has_its_creation_time() -> None:
    drawn = new_request_id(Wall(1_700_000_000_123), random.Random(1))
    sealed = TenantTag(b"secret").tagged(drawn, "")
    assert issued_ms(sealed) == 1_700_000_000_123
    assert has_tenant_tag(sealed)
    assert not has_tenant_tag(drawn)
    assert not has_tenant_tag("job-17")


def test_id_shows_whether_its_response_is_stored() -> None:
    tag, drawn = TenantTag(b"s"), new_request_id(Wall(1_700_000_000_123), random.Random(1))
    stored, other = tag.tagged(drawn, "acme", is_stored=True), tag.tagged(drawn, "acme")
    assert tag.matches(stored, "acme")
    assert [tag.is_stored(each, "acme") for each in (stored, other)] == [True, False]
    assert not tag.is_stored(stored, "globex")
    assert not TenantTag(b"t").is_stored(stored, "acme")
