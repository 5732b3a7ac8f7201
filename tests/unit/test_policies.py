"""The policies, by worked examples and by what each promises."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.routing.policies import (
    NEVER,
    POLICIES,
    Ask,
    DynamoWeights,
    Option,
    dynamo,
    pick,
    session_hash,
)

ASK = Ask(id="a", prompt_tokens=160, block_size=16)


def option(worker: str, **over: float) -> Option:
    return Option(worker, 1, **over)  # type: ignore[arg-type]


THREE = [
    option("w1", overlap_blocks=2, open_tokens=160),
    option("w2", overlap_blocks=5, open_tokens=80),
    option("w3", overlap_blocks=8, open_tokens=144),
]
"""The example of Dynamo's documentation: 10 prompt blocks, overlaps 2, 5, 8, decode 10, 5, 9."""


def test_the_documented_example_costs_what_the_documentation_says() -> None:
    assert dynamo(DynamoWeights())(ASK, THREE, random.Random(0)) == [18, 10, 11]


def test_open_prefill_counts_in_blocks_and_cannot_become_negative() -> None:
    costs = dynamo(DynamoWeights())(
        ASK,
        [option("w1", prefill_tokens=320), option("w2", overlap_blocks=50)],
        random.Random(0),
    )
    assert costs == [30, 0]


def test_the_overlap_of_a_busy_worker_decays() -> None:
    busy = [option("w1", overlap_blocks=8, prefill_tokens=160), option("w2")]
    costs = dynamo(DynamoWeights(overlap_decay=1.0))(ASK, busy, random.Random(0))
    assert costs == [20 - 8 / 2, 10]


def test_a_preferred_taint_makes_a_worker_cheaper() -> None:
    costs = dynamo(DynamoWeights())(
        ASK, [option("w1", taint_weight=2.0), option("w2")], random.Random(0)
    )
    assert costs == [pytest.approx(10 * math.exp(-math.tanh(2.0))), 10]


def test_round_robin_goes_in_turn() -> None:
    options = [option("w2"), option("w1"), option("w3")]
    chosen = [
        options[pick(POLICIES["round_robin"](ASK._replace(turn=n), options, random.Random(0)),
                     random.Random(0)) or 0].worker
        for n in range(6)
    ]  # fmt: skip
    assert chosen == ["w1", "w2", "w3"] * 2


def test_power_of_two_considers_two_and_takes_the_less_loaded() -> None:
    options = [option(f"w{n}", open_tokens=n * 100) for n in range(5)]
    for seed in range(50):
        costs = POLICIES["power_of_two"](ASK, options, random.Random(seed))
        drawn = [i for i, cost in enumerate(costs) if cost < NEVER]
        assert len(drawn) == 2
        assert pick(costs, random.Random(seed)) == min(drawn)


def test_a_session_stays_when_another_worker_leaves() -> None:
    options = [option(f"w{n}") for n in range(5)]
    for n in range(100):
        ask = ASK._replace(session=f"s{n}")
        rng = random.Random(0)
        chosen = pick(session_hash(ask, options, rng), rng)
        assert chosen is not None
        gone = options[(chosen + 1) % 5]
        left = [o for o in options if o != gone]
        again = pick(session_hash(ask, left, rng), rng)
        assert again is not None
        assert left[again] == options[chosen]


def test_ties_reach_every_option() -> None:
    rng = random.Random(1)
    drawn = Counter(pick([3.0, 3.0, 5.0], rng) for _ in range(200))
    assert set(drawn) == {0, 1}


def test_a_high_temperature_spreads_and_a_low_one_hardly_does() -> None:
    def share(temperature: float) -> float:
        rng = random.Random(1)
        return sum(pick([0.0, 1.0], rng, temperature) == 0 for _ in range(2000)) / 2000

    assert share(0.1) > 0.99
    assert 0.45 < share(100.0) < 0.55


def test_nothing_to_consider_is_no_choice() -> None:
    assert pick([], random.Random(0)) is None
    assert pick([NEVER], random.Random(0)) is None


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    st.integers(0, 2**32),
)
def test_a_choice_is_a_function_of_its_inputs(name: str, loads: list[int], seed: int) -> None:
    options = [option(f"w{n}", open_tokens=load) for n, load in enumerate(loads)]

    def chosen() -> int | None:
        rng = random.Random(seed)
        return pick(POLICIES[name](ASK, options, rng), rng)

    first = chosen()
    assert first is not None
    assert first == chosen()
