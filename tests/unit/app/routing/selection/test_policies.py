"""Tests of the policies: worked examples, and a row in the docs for each."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvlane.app.routing.policy_names import POLICY_NAMES, RECORDED_POLICIES
from kvlane.app.routing.selection.candidates import Candidates, RequestFeatures
from kvlane.app.routing.selection.choice import INELIGIBLE, Costs, choose, cost_range, rank_hashes
from kvlane.app.routing.selection.decision_record import (
    MAX_RECORDED_CANDIDATES,
    candidates_from_record,
    record_decision,
)
from kvlane.app.routing.selection.policies.registry import POLICIES, RECORDED
from kvlane.app.routing.selection.routing_config import DynamoWeights, RoutingConfig
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.streams.records import Candidate
from workbench.bench.routing.cost_reference import dynamo_cost as plain_dynamo

ASK = RequestFeatures(id="a", prompt_tokens=160, block_size=16, seed=0)
DEFAULTS = DynamoWeights()


def options(*rows: dict[str, Any], names: str = "w{}") -> Candidates:
    """The places w0, w1, …; what a row does not say is 0."""
    return candidates_from_record(
        [Candidate(names.format(n), 1, **row) for n, row in enumerate(rows)]
    )


def costs_of(
    policy: str, send: RequestFeatures, among: Candidates, weights: DynamoWeights = DEFAULTS
) -> Costs:
    return POLICIES[policy].score(send, among, RoutingConfig(policy, weights)).costs


def worker(chosen: int | None, among: Candidates) -> str:
    assert chosen is not None
    return among.worker_ranks[chosen].worker


THREE = options(
    {"overlap_blocks": 2, "open_tokens": 160},
    {"overlap_blocks": 5, "open_tokens": 80},
    {"overlap_blocks": 8, "open_tokens": 144},
)
"""The example of Dynamo's documentation: 10 prompt blocks, overlaps 2, 5, 8, decode 10, 5, 9."""


def test_documented_example_has_its_documented_cost() -> None:
    assert costs_of("dynamo", ASK, THREE).tolist() == [18, 10, 11]


@pytest.mark.parametrize(
    ("weights", "row", "cost"),
    [
        ({}, {"prefill_tokens": 320}, 30),
        ({}, {"overlap_blocks": 50}, 0),
        ({}, {"open_tokens": 17}, 12),
        ({}, {"host_blocks": 4, "disk_blocks": 4}, 10 - 3 - 1),
        ({"overlap_score_credit": 0.5}, {"overlap_blocks": 8}, 6),
        ({"prefill_load_scale": 2}, {"overlap_blocks": 8, "open_tokens": 16}, 5),
        ({"active_request_weight": 3}, {"open_runs": 2}, 16),
        ({"overlap_decay": 1}, {"overlap_blocks": 8, "prefill_tokens": 160}, 20 - 8 / 2),
        ({}, {"taint_weight": 2.0}, 10 * math.exp(-math.tanh(2.0))),
    ],
)
def test_each_term_of_the_cost_counts_as_documented(
    weights: dict[str, float], row: dict[str, float], cost: float
) -> None:
    assert costs_of("dynamo", ASK, options(row), DynamoWeights(**weights)) == [pytest.approx(cost)]


def test_overlap_decays_with_the_excess_over_the_least_loaded() -> None:
    send = replace(ASK, least_prefill_tokens=160)
    row = options({"overlap_blocks": 8, "prefill_tokens": 320})
    assert costs_of("dynamo", send, row, DynamoWeights(overlap_decay=1)).tolist() == [30 - 8 / 2]


def test_round_robin_goes_in_turn_by_name() -> None:
    three = options({}, {}, {})
    backwards = replace(three, worker_ranks=three.worker_ranks[::-1])
    chosen = []
    for turn in range(6):
        costs = costs_of("round_robin", replace(ASK, dispatched_count=turn), backwards)
        chosen.append(worker(choose(costs, backwards.hashes, 0), backwards))
    assert chosen == ["w0", "w1", "w2"] * 2


def test_power_of_two_considers_two_and_takes_the_less_loaded() -> None:
    five = options(*({"open_tokens": n * 100} for n in range(5)))
    drawn = Counter[int]()
    for seed in range(500):
        costs = costs_of("power_of_two", replace(ASK, seed=seed), five)
        two = [i for i, cost in enumerate(costs) if cost < INELIGIBLE]
        assert len(two) == 2
        assert choose(costs, five.hashes, seed) == min(two)
        drawn.update(two)
    assert all(150 < drawn[i] < 250 for i in range(5))


def test_session_stays_when_another_worker_leaves_and_when_its_own_returns() -> None:
    five = options({}, {}, {}, {}, {})
    for n in range(100):
        send = replace(ASK, session=f"s{n}")
        chosen = choose(costs_of("session_hash", send, five), five.hashes, 0)
        assert chosen is not None
        left = [p for i, p in enumerate(five.worker_ranks) if i != (chosen + 1) % 5]
        again = [WorkerRank(p.worker, 7) for p in left]
        four = replace(options({}, {}, {}, {}), worker_ranks=again, hashes=rank_hashes(again))
        kept = choose(costs_of("session_hash", send, four), four.hashes, 0)
        assert worker(kept, four) == f"w{chosen}"


def test_sessions_spread_over_all_ranks() -> None:
    five = options({}, {}, {}, {}, {})
    seen = Counter(
        choose(costs_of("session_hash", replace(ASK, session=f"s{n}"), five), five.hashes, 0)
        for n in range(500)
    )
    assert all(60 < seen[i] < 140 for i in range(5))


def test_ties_are_drawn_evenly_from_the_seed() -> None:
    tags = options({}, {}, {}, {}).hashes
    drawn = Counter(choose(np.array([3.0, 3.0, 5.0, 3.0]), tags, seed) for seed in range(900))
    assert set(drawn) == {0, 1, 3}
    assert all(240 < n < 360 for n in drawn.values())


def test_tie_among_many_is_the_same_among_those_that_were_recorded() -> None:
    many = options(*[{}] * 40)
    for seed in range(50):
        chosen = choose(np.ones(40), many.hashes, seed)
        assert chosen is not None
        few = [*many.worker_ranks[:3], many.worker_ranks[chosen]]
        assert few[choose(np.ones(4), rank_hashes(few), seed) or 0] == many.worker_ranks[chosen]


def test_noise_chooses_in_proportion_to_the_softmax_of_the_costs() -> None:
    tags = options({}, {}, {}).hashes
    costs = np.array([0.0, 1.0, INELIGIBLE])
    drawn = Counter(choose(costs, tags, seed, noise=1.0) for seed in range(4000))
    assert drawn[0] / 4000 == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert drawn[2] == 0
    assert cost_range(costs) == 1.0


def test_little_noise_hardly_spreads() -> None:
    costs, tags = np.array([0.0, 1.0]), options({}, {}).hashes
    assert {choose(costs, tags, seed, noise=0.05) for seed in range(500)} == {0}


def test_empty_candidates_give_no_choice() -> None:
    assert choose(np.empty(0), rank_hashes([]), 0) is None
    assert choose(np.array([INELIGIBLE]), options({}).hashes, 0) is None
    assert choose(np.array([INELIGIBLE, 2.0, np.nan]), options({}, {}, {}).hashes, 0) == 1


@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 1.0]),
)
def test_choice_is_a_function_of_its_inputs(
    name: str, loads: list[int], seed: int, noise: float
) -> None:
    many = options(*({"open_tokens": load} for load in loads))

    def chosen() -> int | None:
        costs = costs_of(name, replace(ASK, seed=seed), many)
        return choose(costs, many.hashes, seed, noise)

    first = chosen()
    assert first is not None
    assert first == chosen()


@given(
    st.lists(
        st.fixed_dictionaries({
            "overlap_blocks": st.integers(0, 12), "host_blocks": st.integers(0, 3),
            "disk_blocks": st.integers(0, 3), "prefill_tokens": st.integers(0, 9000),
            "open_tokens": st.integers(0, 9000), "open_runs": st.integers(0, 9),
            "taint_weight": st.sampled_from([0.0, 0.5]),
        }),
        min_size=1, max_size=30,
    ),
    st.builds(
        DynamoWeights, overlap_score_credit=st.floats(0, 2), prefill_load_scale=st.floats(0, 300),
        active_request_weight=st.floats(0, 2), overlap_decay=st.sampled_from([0.0, 0.7]),
        host_weight=st.just(0.75), disk_weight=st.just(0.25), temperature=st.just(0.0),
    ),
)  # fmt: skip
def test_kernel_and_the_plain_formula_agree_to_the_bit(
    rows: list[dict[str, Any]], weights: DynamoWeights
) -> None:
    send = replace(ASK, least_prefill_tokens=min(row["prefill_tokens"] for row in rows))
    costs = costs_of("dynamo", send, options(*rows), weights)
    candidates = record_decision(options(*rows), costs, 0).candidates
    best = sorted(range(len(rows)), key=costs.tolist().__getitem__)[:MAX_RECORDED_CANDIDATES]
    assert [c.worker for c in candidates[: len(best)]] == [f"w{i}" for i in best]
    assert [c.cost for c in candidates] == [plain_dynamo(c, send, weights) for c in candidates]


def test_each_name_has_its_policy() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert tuple(RECORDED) == RECORDED_POLICIES


def test_docs_have_a_row_for_each_policy() -> None:
    page = (Path(__file__).parents[5] / "docs" / "routing.md").read_text()
    text = page.split("| `KVLANE_POLICY` | cost |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| (.*) \|$", text, re.MULTILINE)
    assert rows == [(name, policy.summary) for name, policy in POLICIES.items()]
