"""Tests of limits of a tenant, by a clock that is passed in."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.access.key_file import Tenant
from kvlane.app.access.quota import QuotaLease, QuotaRefusal, TenantLimit, TenantQuota


class Answer(NamedTuple):
    counted_tokens: int
    has_ended: bool = True


def quota(now_s: float = 0.0, **limits: Any) -> TenantQuota:
    return TenantQuota(Tenant(**limits), now_s)


class Lease(QuotaLease):
    def add_request(self, now_s: float) -> QuotaRefusal | None:
        return self.add({TenantLimit.REQUESTS: 1, TenantLimit.REQUEST_RATE: 1}, now_s)

    def add_reader(self, now_s: float) -> QuotaRefusal | None:
        return self.add({TenantLimit.READERS: 1, TenantLimit.REQUEST_RATE: 1}, now_s)

    def add_answers(
        self, answers: int, prompt_tokens: int, most_tokens: int, now_s: float
    ) -> QuotaRefusal | None:
        more = {TenantLimit.REQUESTS: answers - 1, TenantLimit.REQUEST_RATE: answers - 1}
        tokens = {TenantLimit.TOKENS: most_tokens, TenantLimit.TOKEN_RATE: prompt_tokens}
        return self.add(more | tokens, now_s)


def test_without_limits_every_request_is_accepted() -> None:
    of = quota()
    leases = [Lease(of) for _ in range(50)]
    for lease in leases:
        assert lease.add_request(0.0) is None
        assert lease.add_answers(128, 10**9, 10**9, 0.0) is None
        assert lease.add_reader(0.0) is None
    assert list(of.headers(0.0)) == []


def test_requests_in_flight_count_until_they_end() -> None:
    of = quota(requests=2)
    first, second, third = Lease(of), Lease(of), Lease(of)
    assert first.add_request(0.0) is None
    assert second.add_request(0.0) is None
    refused = third.add_request(0.0)
    assert refused is not None
    assert (refused.limit, refused.retry_after_s) == (TenantLimit.REQUESTS, 1.0)
    first.release(5.0)
    first.release(5.0)
    assert third.add_request(5.0) is None
    assert Lease(of).add_request(5.0) is not None


def test_each_of_several_answers_is_a_request() -> None:
    of = quota(requests=4)
    lease, other = Lease(of), Lease(of)
    assert lease.add_request(0.0) is None
    assert lease.add_answers(3, 1, 1, 0.0) is None
    assert other.add_request(0.0) is None
    refused = other.add_answers(2, 1, 1, 0.0)
    assert refused is not None
    assert refused.retry_after_s == 1.0
    too_many = Lease(quota(requests=4))
    assert too_many.add_request(0.0) is None
    never = too_many.add_answers(5, 1, 1, 0.0)
    assert never is not None
    assert never.retry_after_s is None


def test_tokens_in_flight_are_prompts_and_longest_answers() -> None:
    of = quota(tokens=100)
    lease, other = Lease(of), Lease(of)
    assert lease.add_answers(1, 20, 60, 0.0) is None
    refused = other.add_answers(1, 20, 50, 0.0)
    assert refused is not None
    assert (refused.limit, refused.retry_after_s) == (TenantLimit.TOKENS, 1.0)
    assert "60 of the 100" in refused.message
    lease.release(1.0)
    assert other.add_answers(1, 20, 50, 1.0) is None
    never = Lease(of).add_answers(1, 1, 101, 1.0)
    assert never is not None
    assert never.retry_after_s is None


def test_requests_a_minute_come_back_with_time() -> None:
    of = quota(requests_per_minute=60)
    for _ in range(60):
        lease = Lease(of)
        assert lease.add_request(0.0) is None
        lease.release(0.0)
    refused = Lease(of).add_request(0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(1.0)
    assert Lease(of).add_request(0.9) is not None
    assert Lease(of).add_request(1.0) is None


def test_tokens_a_minute_are_prompts_at_the_start_and_answers_at_the_end() -> None:
    of = quota(tokens_per_minute=600)
    lease = Lease(of)
    assert lease.add_answers(1, 500, 5000, 0.0) is None
    lease.answers = [Answer(200), Answer(100)]
    assert Lease(of).add_answers(1, 100, 100, 0.0) is None
    lease.release(0.0)
    refused = Lease(of).add_answers(1, 10, 10, 0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(31.0)  # 300 in debt, 10 tokens a second
    assert Lease(of).add_answers(1, 10, 10, 31.0) is None


def test_prompt_above_a_minutes_tokens_waits_for_a_full_bucket() -> None:
    of = quota(tokens_per_minute=60)
    assert Lease(of).add_answers(1, 1000, 1000, 0.0) is None
    refused = Lease(of).add_answers(1, 1000, 1000, 0.0)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(1000.0)


@pytest.mark.parametrize("name", ["requests", "requests_per_minute"])
def test_limit_of_zero_accepts_nothing(name: str) -> None:
    assert Lease(quota(**{name: 0})).add_request(1000.0) is not None


def test_readers_of_streams_are_bounded_like_requests_and_apart_from_them() -> None:
    of = quota(requests=1)
    reader, other = Lease(of), Lease(of)
    assert Lease(of).add_request(0.0) is None
    assert reader.add_reader(0.0) is None
    assert other.add_reader(0.0) is not None
    reader.release(0.0)
    assert other.add_reader(0.0) is None


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (TenantLimit.REQUESTS, "8 requests at a time: 2 here, 6 are shares of other gateways"),
        (TenantLimit.READERS, "8 readers of streams at a time: 2 here, 6 are shares of other"),
        (TenantLimit.REQUEST_RATE, "8 requests a minute: 2 here, 6 are shares of other gateways"),
        (TenantLimit.TOKEN_RATE, "8 tokens a minute: 2 here, 6 are shares of other gateways"),
        (TenantLimit.TOKENS, "1 tokens, 8 of the 8"),
    ],
)
def test_refusal_has_the_use_here_and_the_shares_elsewhere(
    limit: TenantLimit, message: str
) -> None:
    limits = Tenant(requests=8, tokens=8, requests_per_minute=8, tokens_per_minute=8)
    of = TenantQuota(limits, 0.0, is_shared=True)
    of.hold(limit, 2, 0.0)
    of.elsewhere[limit] = 6
    assert Lease(of).add({limit: 2}, 0.0) is None
    refused = Lease(of).add({limit: 1}, 0.0)
    assert refused is not None
    assert message in refused.message


def test_new_limits_apply_at_once_and_keep_the_usage() -> None:
    of = quota(requests=5, requests_per_minute=60)
    for _ in range(5):
        assert Lease(of).add_request(0.0) is None
    of.set_limits(Tenant(requests=2, requests_per_minute=6), 0.0)
    assert Lease(of).add_request(0.0) is not None
    assert dict(of.headers(0.0))["x-ratelimit-remaining-requests"] == "1"
    of.set_limits(Tenant(), 0.0)
    assert Lease(of).add_request(0.0) is None


def test_remaining_quota_has_the_header_names_of_openai() -> None:
    of = quota(requests_per_minute=60, tokens_per_minute=600)
    lease = Lease(of)
    assert lease.add_request(0.0) is None
    assert lease.add_answers(1, 100, 100, 0.0) is None
    assert dict(of.headers(0.0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "500",
        "x-ratelimit-reset-tokens": "10.000s",
    }


def test_clock_set_back_refills_nothing_twice() -> None:
    of = quota(100.0, requests_per_minute=60)
    for _ in range(60):
        assert Lease(of).add_request(100.0) is None
    assert Lease(of).add_request(50.0) is not None
    of.settle(100.5)
    assert of.used[TenantLimit.REQUEST_RATE] == pytest.approx(59.5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "grow", "attach", "end"]),
            st.integers(0, 5),
            st.integers(1, 9),
        ),
        max_size=60,
    )
)
def test_quota_state_is_empty_after_all_requests_end(steps: list[tuple[str, int, int]]) -> None:
    """Whatever was refused in between, and however often an end comes."""
    of = quota(requests=4, tokens=20, requests_per_minute=30, tokens_per_minute=40)
    leases = [Lease(of) for _ in range(6)]
    for now, (step, at, amount) in enumerate(steps):
        lease = leases[at]
        if step == "begin":
            lease.add_request(now)
        elif step == "grow":
            lease.add_answers(amount, amount, 2 * amount, now)
        elif step == "attach":
            lease.add_reader(now)
        else:
            lease.release(now)
        assert of.used[TenantLimit.REQUESTS] <= 4
        assert of.used[TenantLimit.TOKENS] <= 20
        assert of.used[TenantLimit.READERS] <= 4
    for lease in leases:
        lease.release(1000.0)
    assert of.is_idle
