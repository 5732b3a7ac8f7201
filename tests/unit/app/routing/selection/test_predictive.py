"""Tests of policy predictive: each term by hand, holding of requests, and properties of all
terms."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.queueing import joint_planning
from kvlane.app.routing.queueing.joint_planning import (
    PlannedOrder,
    PlanningContext,
    plan_together,
    plan_uniform,
    uniform_groups,
)
from kvlane.app.routing.queueing.pending import PendingRequest, ReservedRequests
from kvlane.app.routing.selection import cost_kernels as kernels
from kvlane.app.routing.selection.candidates import (
    NO_RESERVATIONS,
    Candidates,
    RequestFeatures,
    Reservations,
)
from kvlane.app.routing.selection.cost_kernels import (
    COMPARED,
    DECODE_PART,
    PREFILL_PART,
    STANDALONE,
    UNKNOWN,
    WHOLE,
    Floats,
)
from kvlane.app.routing.selection.decision import (
    Decision,
    Placement,
    Reservation,
    RoutingState,
    Wait,
)
from kvlane.app.routing.selection.decision_record import (
    MAX_RECORDED_CANDIDATES,
    MAX_RECORDED_RESERVATIONS,
    candidates_from_record,
    record_decision,
)
from kvlane.app.routing.selection.policies.predictive import Prediction, predict
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.selection.routing_config import PredictiveWeights, RoutingConfig
from kvlane.app.routing.selection.select import recompute_choice, reconstruct, select_worker
from kvlane.app.routing.state.active_load import WorkerLoad
from kvlane.app.routing.state.batch_runs import BatchRun, BatchRunKey, BatchRuns
from kvlane.app.routing.state.change_log import TrackedDict
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import (
    USUAL_LOAD_MS,
    EngineProfile,
    FadingSums,
    PerformanceModel,
)
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Candidate, CandidateRows, LogRecord
from kvlane.streams.request import Hints, Request, RoutingConstraints, StopConditions
from tests.harness.routing_harness import (
    NOW_MS,
    TOKENS,
    RoutingHarness,
    planned_reservations,
    reserved,
    to_assigned,
)
from workbench.bench.routing import cost_reference

CURVES = PerfCurves(prefill=(0.0, 0.01, 10.0), decode=(0.0, 10.0, 5.0))
"""A step takes 10 ms and 0.01 ms a prompt token; of decode 5 ms, and 10 ms more in a full cache."""
PACE = EngineProfile(CURVES, chunk_tokens=1000, capacity_tokens=10_000)
ASK = RequestFeatures(
    id="a", prompt_tokens=500, block_size=10, seed=0, output_tokens=200, mean_output_tokens=100
)
LAMBDA = 0.01


def options(*rows: dict[str, Any]) -> Candidates:
    """Places w0, w1, …; what a row does not say is 0."""
    candidates = []
    for n, row in enumerate(rows):
        fields = dict(row)
        pace = fields.pop("pace", PACE)
        fields |= {"slowness": pace.slowdown, "curve": pace.curves.coefficients()}
        fields |= {"chunk_tokens": pace.chunk_tokens, "capacity_tokens": pace.capacity_tokens}
        candidates.append(Candidate(f"w{n}", n, **fields))
    return candidates_from_record(candidates)


class Terms(NamedTuple):
    """Those of one option."""

    wait_ms: float
    prefill_ms: float
    stall_ms: float
    slower_ms: float
    decode_ms: float
    replication_ms: float
    delay_ms: float = 0.0
    usual_ms: float = 0.0


def predicted(*rows: dict[str, Any], send: RequestFeatures = ASK) -> Prediction:
    return predict(send, options(*rows), PredictiveWeights(LAMBDA))


def one(row: dict[str, Any], send: RequestFeatures = ASK) -> Terms:
    return Terms(*[float(column[0]) for column in predicted(row, send=send).terms])


def cost(row: dict[str, Any]) -> float:
    return float(predicted(row).costs[0])


def test_idle_rank_costs_its_prefill_and_the_future_decode() -> None:
    # 500 tokens: 10 + 5. Half of its answer on, 600 tokens are cached: a step takes 5.6.
    assert one({}) == pytest.approx(Terms(0, 15, 0, 0, 200 * 5.6, 0))
    assert cost({}) == pytest.approx(15 + 11.2)


def test_decoding_rank_costs_the_rest_of_a_step_and_slows_the_others() -> None:
    # 900 tokens of two prompts and half an answer of 100 each: 1000 tokens, a step takes 6.
    # Later it is 1000 + 500 + 100 tokens: 6.6.
    row = {"open_runs": 2, "prompt_tokens": 900}
    assert one(row) == pytest.approx(Terms(3, 15 + 6, 2 * 15, 2 * 50 * 0.6, 200 * 6.6, 0))
    assert predicted(row).ttft_ms(0) == pytest.approx(24)
    assert cost(row) == pytest.approx(24 + 0.01 * (30 + 60 + 1320))


def test_later_requests_find_a_rank_as_it_is_left() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900}
    send = replace(ASK, expected_followups=4.0, most_cached_tokens=200.0)
    found = float(predicted(row, send=send).costs[0])
    once = 24 + 200 * 0.02 / 4  # a second copy of 200 tokens, for four
    assert found == pytest.approx(once + 0.01 * (30 + 60 + 4 * 1320) + 3 * 1.5 * 6.6)


def test_usual_load_makes_the_decode_of_later_requests_longer() -> None:
    # A step at 600 tokens takes 5.6, and 2 more with 2000 others.
    row, send = {"usual_tokens": 2000.0}, replace(ASK, expected_followups=4.0)
    assert one(row, send).usual_ms == pytest.approx(3 * 200 * 2)
    costs = [float(predicted(each, send=send).costs[0]) for each in (row, {})]
    assert costs[0] - costs[1] == pytest.approx(LAMBDA * 3 * 200 * 2)
    assert one(row).usual_ms == 0, "no later request is expected"
    for part in (PREFILL_PART, DECODE_PART, COMPARED):
        assert one(row, replace(send, part=part)).usual_ms == 0


def test_usual_load_counts_up_to_the_size_of_the_cache() -> None:
    send = replace(ASK, expected_followups=4.0)
    found = one({"usual_tokens": 1e9}, send)
    assert found.usual_ms == pytest.approx(3 * 200 * 9.4)
    assert one({"usual_tokens": 1e9, "pace": PACE._replace(capacity_tokens=0)}, send).usual_ms == 0


def test_batch_runs_cost_the_rest_of_their_step() -> None:
    assert one({"batch_ms": 7.0}) == pytest.approx(Terms(7, 15, 0, 0, 200 * 5.6, 0))
    assert cost({"batch_ms": 7.0}) == pytest.approx(cost({}) + 7)


def test_request_goes_to_the_rank_without_batch_runs(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    runs = BatchRuns()
    before = [routing.chosen(PREDICTIVE, seed=seed) for seed in range(8)]
    known = {"batch_runs": runs}
    none = [routing.chosen(PREDICTIVE, seed=seed, known=known) for seed in range(8)]
    assert [each.candidates for each in none] == [each.candidates for each in before]
    assert {each.worker_rank.worker for each in before} == {"w1", "w2"}
    runs.put(WorkerRank("w1", 0), BatchRunKey("b"), BatchRun("b", 500))
    for seed in range(8):
        decision = routing.chosen(PREDICTIVE, seed=seed, known=known)
        assert decision.worker_rank.worker == "w2"
        assert recompute_choice(to_assigned(decision)) == decision.worker_rank
        costs = {each.worker: each.batch_ms for each in decision.candidates}
        assert costs["w1"] > costs["w2"] == 0
    runs.discard(BatchRunKey("b"))
    after = [routing.chosen(PREDICTIVE, seed=seed, known=known) for seed in range(8)]
    assert [each.candidates for each in after] == [each.candidates for each in before]


@pytest.mark.parametrize(
    ("busy_ms", "wait_ms"),
    [
        (0, 47),  # 1000 tokens: 20 + 6; 500: 15 + 6
        (7, 40),
        (46, 3),  # no less than half a step
        (9000, 3),
    ],
)
def test_started_prefill_is_awaited(busy_ms: float, wait_ms: float) -> None:
    row = {
        "open_runs": 2, "prompt_tokens": 900, "prefill_runs": 1, "prefill_tokens": 1500,
        "busy_ms": busy_ms,
    }  # fmt: skip
    assert one(row).wait_ms == pytest.approx(wait_ms)


JOINING = {"open_runs": 3, "prompt_tokens": 900, "prefill_runs": 1, "prefill_tokens": 200,
           "joining_runs": 1, "joining_tokens": 200}  # fmt: skip


def test_short_prompt_shares_the_next_step_with_those_that_join_it() -> None:
    # A step of decode takes 5 + 10 · 1050 / 10000 = 6.05; 200 tokens 2 ms more than none, 500 5.
    found = one(JOINING)
    assert found == pytest.approx(
        Terms(6.05 / 2 + 2, 15 + 6.05, 3 * 5, 3 * 50 * 0.6, 200 * 6.65, 0, delay_ms=5)
    )
    assert predicted(JOINING).hold_ms == 0


def test_prompts_that_wait_for_longer_than_a_step_of_decode_are_in_the_step_under_way() -> None:
    found = one(JOINING | {"joining_ms": 10})
    # 12 + 6.05 since half a step of decode after they came
    assert found.wait_ms == pytest.approx(12 + 6.05 - (10 - 6.05 / 2))
    assert (found.delay_ms, found.stall_ms) == (0, 3 * 15)


def test_step_that_has_begun_with_half_a_chance_is_awaited_by_half() -> None:
    # Half of the step of decode, 6.05, that the other prompt found: its own has begun, 12 + 6.05
    # long and a quarter of 6.05 ago, or begins a quarter of 6.05 later and is shared
    row = JOINING | {"joining_ms": 3, "shares_steps": True}
    begun = 3 / 6.05
    found = one(row)
    waits = (18.05 - 1.5, (6.05 - 3) / 2 + 2)
    assert found.wait_ms == pytest.approx(begun * waits[0] + (1 - begun) * waits[1])
    assert found.stall_ms == pytest.approx(0.7 * 3 * (begun * 15 + (1 - begun) * 5))
    assert found.delay_ms == pytest.approx((1 - begun) * 5)


def test_prompts_of_a_full_chunk_are_not_delayed_by_the_next_one() -> None:
    row = JOINING | {"joining_runs": 4, "joining_tokens": 1200, "prefill_runs": 4}
    row |= {"prefill_tokens": 1200, "open_runs": 5}
    # 200 of 1200 tokens are in a second step, which 500 more make 5 ms longer
    assert one(row).delay_ms == pytest.approx(4 * 200 / 1200 * 5)


def test_more_runs_than_elsewhere_cost_up_to_half_a_step() -> None:
    few, more, many = ({"open_runs": runs, "prefill_runs": runs} for runs in (20, 21, 30))
    costs = predicted(few, more, many, send=replace(ASK, least_runs=UNKNOWN)).costs
    alone = [predicted(row).costs[0] for row in (few, more, many)]
    step_ms = [10 + 5 + 10 * runs * 50 / 10_000 for runs in (21, 30)]
    extra = [a - b for a, b in zip(costs, alone, strict=True)]
    assert extra == pytest.approx([0, step_ms[0] / 2 / 3, step_ms[1] / 2])


def test_others_decode_more_slowly_for_the_whole_answer_and_the_next_request() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900, "shares_steps": True}
    for followups, lasting in ((1.0, 1), (1.5, 1.5), (9.0, 2)):
        found = one(row, replace(ASK, expected_followups=followups))
        assert found.slower_ms == pytest.approx(lasting * 2 * 200 * 0.6)


def test_prompts_that_join_wait_for_the_step_under_way() -> None:
    row = JOINING | {"prefill_runs": 3, "prefill_tokens": 1200, "busy_ms": 4.0}
    # 1000 tokens are under way: 20 + 6.05, of which 4 are over
    assert one(row).wait_ms == pytest.approx(22.05 + 2)
    long = replace(ASK, prompt_tokens=2500)
    assert one(row, long).wait_ms == pytest.approx(22.05 + 12 + 6.05), "with steps of its own"
    assert predicted(row, send=long).hold_ms == pytest.approx(22.05 + 12 + 6.05)


def test_planned_requests_that_share_a_step_delay_it_by_their_tokens() -> None:
    # Own prefill is 15, 5 of it for its tokens; others 11 and 30
    row = {"ahead_ms": (11.0, 30.0), "shares_steps": True}
    assert one(row).wait_ms == pytest.approx((5 + 1) + (15 + 0.3))


def test_former_decision_without_shared_steps_is_recomputed_as_it_was() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900, "prefill_runs": 1, "prefill_tokens": 500,
           "busy_ms": 4.0, "ahead_ms": (11.0,)}  # fmt: skip
    assert one(row) == pytest.approx(
        Terms(15 + 6 - 4 + 11 + 0.15, 15 + 6, 2 * 15, 2 * 50 * 0.6, 200 * 6.6, 0)
    )


def test_full_cache_is_awaited() -> None:
    # 9500 tokens are cached, a step takes 14.5; 500 and an answer of 100 are 100 too many.
    wait_ms = 14.5 / 2 + 100 / 9500 * 100 * 1.5 * 14.5
    assert one({"open_runs": 2, "prompt_tokens": 9400}).wait_ms == pytest.approx(wait_ms)
    shared = {"open_runs": 2, "prompt_tokens": 9400, "overlap_blocks": 10}
    assert one(shared).wait_ms == pytest.approx(14.5 / 2), "what is there needs no more room"
    unknown = PACE._replace(capacity_tokens=0)
    found = one({"open_runs": 2, "prompt_tokens": 9400, "pace": unknown})
    assert found.wait_ms == 2.5, "a place that does not say what it holds is never full"


def test_planned_requests_go_first_if_they_are_shorter_and_last_if_not() -> None:
    # Own prefill is 15: behind 5, before 20, which then waits for ours at the weight of decode.
    assert one({"ahead_ms": (20.0, 5.0)}).wait_ms == pytest.approx(15 + 0.2 + 5 + 0.15)


def test_blocks_cached_elsewhere_and_computed_here_cost_time() -> None:
    both = {"overlap_blocks": 30}, {"overlap_blocks": 10}
    found = predicted(*both, send=replace(ASK, most_cached_tokens=UNKNOWN))
    assert found.most_cached_tokens == 300
    terms = found.terms
    # The second has 200 tokens less, at 20 ms for a full chunk of 1000.
    assert terms.replication_ms == pytest.approx([0, 4])
    assert terms.prefill_ms == pytest.approx([12, 14])


def test_blocks_in_other_tiers_save_time_less_their_load() -> None:
    row = {"overlap_blocks": 10, "host_blocks": 20, "disk_blocks": 20}
    assert one(row).prefill_ms == pytest.approx(10 + 0.01 * (500 - 100 - 150 - 50))


def test_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    assert one({"overlap_blocks": 80}).prefill_ms == pytest.approx(10.01)


def test_long_prompt_is_computed_in_chunks_with_a_step_of_decode_each() -> None:
    send = replace(ASK, prompt_tokens=2500)
    assert one({}, send).prefill_ms == pytest.approx(20 + 20 + 15)
    found = one({"open_runs": 2, "prompt_tokens": 900}, send)
    assert found.prefill_ms == pytest.approx(26 + 26 + 21)
    assert found.stall_ms == pytest.approx(2 * 55)


def test_slower_rank_takes_longer_for_everything() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900, "overlap_blocks": 10, "prefill_runs": 1,
           "prefill_tokens": 1500}  # fmt: skip
    send = replace(ASK, most_cached_tokens=300)
    fast, slow = one(row, send), one(row | {"pace": PACE._replace(slowdown=3.0)}, send)
    assert slow == pytest.approx([3 * term for term in fast])


def test_preferred_taints_make_a_rank_cheaper() -> None:
    both = {}, {"taint_weight": 1.0}
    plain, liked = predicted(*both).costs
    assert liked == pytest.approx(plain * math.exp(-math.tanh(1.0)))


def test_prefill_for_another_worker_costs_no_decode() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900}
    part = replace(ASK, part=PREFILL_PART)
    assert one(row, part) == pytest.approx(Terms(3, 15 + 6, 2 * 15, 0, 0, 0))
    assert float(predicted(row, send=part).costs[0]) == pytest.approx(24 + 0.01 * 30)


def test_received_prompt_costs_transfer_step_and_room_of_second_copy() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900}
    part = replace(ASK, part=DECODE_PART, transfer_ms=40.0, expected_followups=2.0)
    found = one(row, part)
    assert found == pytest.approx(Terms(3, 40 + 6.6, 0, 2 * 50 * 0.6, 200 * 6.6, 0.5 * 500 * 0.02))
    total = 3 + 46.6 + 0.01 * (60 + 2 * 1320) + 0.5 * 500 * 0.02 / 2
    assert float(predicted(row, send=part).costs[0]) == pytest.approx(total)


def test_decode_takes_longer_beside_prefill_in_the_choice_of_one_worker_or_two() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900, "prefill_share": 0.75}
    for part in (COMPARED, DECODE_PART):
        assert one(row, replace(ASK, part=part)).decode_ms == pytest.approx(4 * 200 * 6.6)


def test_place_of_a_whole_request_does_not_depend_on_former_prefill() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900}
    assert one(row | {"prefill_share": 0.75}) == one(row)


def test_first_token_of_a_decode_waits_for_the_prefill_that_it_joins() -> None:
    row = {"open_runs": 2, "prompt_tokens": 900, "prefill_share": 0.5}
    found = one(row, replace(ASK, part=DECODE_PART, transfer_ms=40.0))
    chunk_ms = PACE.prefill_ms(PACE.chunk_tokens)
    assert found.prefill_ms == pytest.approx(40 + 6.6 + 0.5 * 1.5 * chunk_ms)


# Holding


PENDING = {"open_runs": 1, "prompt_tokens": 3000, "prefill_runs": 1, "prefill_tokens": 3000}
LONG = replace(ASK, prompt_tokens=2500)


@pytest.mark.parametrize(
    ("send", "row", "left_ms"),
    [
        (LONG, {}, 0),
        (LONG, {"open_runs": 1, "prompt_tokens": 3000}, 0),  # in decode: a prefill starts at once
        # 3000 tokens: three chunks of 20, each with a step of 5 + 10 · 3050 / 10000 beside it
        (LONG, PENDING, 3 * 28.05),
        (LONG, PENDING | {"busy_ms": 80.0}, 3 * 28.05 - 80),
        (LONG, PENDING | {"busy_ms": 84.2}, 0),
        # So short that a step of its own costs more (10 + 8.05 = 0.01 · 1805): it shares one.
        (replace(LONG, prompt_tokens=1805), PENDING, 0),
        (replace(LONG, prompt_tokens=1806), PENDING, 3 * 28.05),
        # 7400 + 2500 + 200 tokens do not fit: somebody has to end first.
        (LONG, {"open_runs": 1, "prompt_tokens": 7400}, math.inf),
        (LONG, {"open_runs": 1, "prompt_tokens": 7300}, 0),
        (LONG, {"open_runs": 1, "prompt_tokens": 7400, "overlap_blocks": 10}, 0),  # 100 are there
        (replace(LONG, prompt_tokens=9900), {}, 0),  # it never fits better than alone
    ],
)
def test_request_waits_until_its_rank_is_free(
    send: RequestFeatures, row: dict[str, Any], left_ms: float
) -> None:
    assert predicted(row, send=send).hold_ms == pytest.approx(left_ms)


def test_standalone_prefill_time_counts_cached_blocks() -> None:
    row = {"overlap_blocks": 20, "open_runs": 3, "prompt_tokens": 5000}
    assert predicted(row).results[:, STANDALONE] == pytest.approx(13)


SPOTS = st.fixed_dictionaries({
    "pace": st.builds(
        EngineProfile, st.sampled_from([CURVES, PerfCurves()]), st.floats(0.1, 10),
        st.sampled_from([512, 8192]), st.sampled_from([0, 10_000, 300_000]),
    ),
    "open_runs": st.integers(1, 50), "prompt_tokens": st.integers(0, 90_000),
    "prefill_tokens": st.integers(300, 90_000), "prefill_runs": st.integers(0, 3),
    "joining_tokens": st.integers(0, 300), "joining_runs": st.integers(0, 2),
    "joining_ms": st.sampled_from([0, 3, 40]), "shares_steps": st.just(True),
    "busy_ms": st.floats(0, 900), "overlap_blocks": st.integers(0, 60),
    "host_blocks": st.integers(0, 5), "disk_blocks": st.integers(0, 5),
    "taint_weight": st.sampled_from([0.0, 0.0, 0.7]), "later_ms": st.sampled_from([0.0, 5.0]),
    "prefill_share": st.sampled_from([0.0, 0.3, 0.95]),
    "batch_ms": st.sampled_from([0.0, 7.5]),
    "usual_tokens": st.sampled_from([0.0, 900.25, 1e6]),
    "ahead_ms": st.lists(st.floats(0, 500), max_size=3).map(tuple),
}).map(
    lambda row: row if row["joining_runs"] else row | {"joining_tokens": 0, "joining_ms": 0}
)  # fmt: skip


@given(st.lists(SPOTS, min_size=1, max_size=9))
def test_option_is_worth_the_same_to_the_bit_among_others_as_alone(
    rows: list[dict[str, Any]],
) -> None:
    together = predicted(*rows)
    for i, row in enumerate(rows):
        alone = predicted(row)
        assert [column[i] for column in together.terms] == [column[0] for column in alone.terms]
        assert together.hold_ms[i] == alone.hold_ms[0]
        blocks = row["overlap_blocks"] + 0.75 * row["host_blocks"] + 0.25 * row["disk_blocks"]
        pace, tokens = row["pace"], max(500 - 10 * blocks, 1)
        step_ms = pace.decode_ms(row["prompt_tokens"] + row["open_runs"] * 50)
        assert together.terms.prefill_ms[i] == pytest.approx(pace.prefill_ms(tokens, step_ms))


@given(
    st.lists(SPOTS, min_size=1, max_size=9), st.integers(1, 9000), st.floats(1, 900),
    st.floats(0, 9000), st.floats(1, 10), st.sampled_from([math.inf, 100.0]),
    st.sampled_from([WHOLE, PREFILL_PART, DECODE_PART, COMPARED]), st.floats(0, 500),
)  # fmt: skip
def test_kernel_and_the_plain_formulas_agree_to_the_bit(
    rows: list[dict[str, Any]], prompt: int, output: float, held: float, leads_to: float,
    target_ms: float, part: int, transfer_ms: float,
) -> None:  # fmt: skip
    send = replace(
        ASK, prompt_tokens=prompt, output_tokens=output, most_cached_tokens=held,
        expected_followups=leads_to,
        ttft_target_ms=target_ms, itl_target_ms=target_ms / 5,
        part=part, transfer_ms=transfer_ms,
    )  # fmt: skip
    found = predicted(*rows, send=send)
    candidates = record_decision(options(*rows), found.costs, 0, found.results).candidates
    assert len(candidates) == len(rows)
    for each in candidates:
        i = int(each.worker[1:])
        plainly = cost_reference.predictive_cost(each, send, LAMBDA)
        assert plainly.cost_ms == each.cost == found.costs[i]
        assert plainly.ttft_ms == found.ttft_ms(i)
        assert plainly.alone_ms == found.results[i, STANDALONE]
        assert max(plainly.hold_ms, 0) == found.hold_ms[i]


@given(
    st.lists(SPOTS, min_size=1, max_size=20), st.sampled_from([0, 5, 60]), st.booleans(), st.data()
)
def test_record_has_the_best_options_and_the_chosen_one_with_all_their_inputs(
    rows: list[dict[str, Any]], reserved: int, is_timed: bool, data: st.DataObject
) -> None:
    last = len(rows) - 1
    at = data.draw(st.lists(st.integers(-1, last), min_size=reserved, max_size=reserved))
    others = Reservations(np.array(at, np.int64), np.arange(reserved) / 3)
    among = replace(options(*rows), reservations=others if reserved else NO_RESERVATIONS)
    results = predict(ASK, among, PredictiveWeights(LAMBDA)).results if is_timed else None
    some = st.sampled_from([1.5, 2.5, math.inf]) | st.floats(0, 9)
    costs = np.array([data.draw(some) for _ in rows])
    chosen = data.draw(st.integers(0, last))
    record = record_decision(among, costs, chosen, results)
    best = [i for i in np.argsort(costs, kind="stable").tolist() if costs[i] < math.inf]
    recorded = dict.fromkeys([*best[:MAX_RECORDED_CANDIDATES], chosen])
    expected = [plain_candidate(among, costs, i, results) for i in recorded]
    assert record.candidates == tuple(expected)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=CandidateRows) == record
    found = [record.candidate(place) for place in among.worker_ranks]
    assert [each for each in found if each] == sorted(expected, key=lambda c: c.epoch)


COLUMNS = {
    "open_runs": kernels.RUNS,
    "open_tokens": kernels.OPEN_TOKENS,
    "prefill_tokens": kernels.PREFILL_TOKENS,
}
TIMED_COLUMNS = {
    "prompt_tokens": kernels.TOKENS, "prefill_runs": kernels.PREFILL_RUNS,
    "busy_ms": kernels.BUSY_MS, "slowness": kernels.SLOWDOWN,
    "chunk_tokens": kernels.CHUNK_TOKENS_COLUMN, "capacity_tokens": kernels.CAPACITY_TOKENS_COLUMN,
    "later_ms": kernels.STAGGER_MS, "prefill_share": kernels.PREFILL_SHARE,
    "batch_ms": kernels.BATCH_MS, "joining_tokens": kernels.JOINING_TOKENS,
    "joining_runs": kernels.JOINING_RUNS, "joining_ms": kernels.JOINING_MS,
    "usual_tokens": kernels.USUAL_TOKENS,
}  # fmt: skip


def plain_candidate(among: Candidates, costs: Floats, i: int, results: Floats | None) -> Candidate:
    """An option as a decision records it."""
    fields: dict[str, Any] = {"cost": costs[i]}
    columns = COLUMNS if results is None else COLUMNS | TIMED_COLUMNS
    fields |= {name: among.features[i, column] for name, column in columns.items()}
    names = ("overlap_blocks", "host_blocks", "disk_blocks")
    fields |= zip(names, among.blocks[i], strict=True)
    if among.taint_weights is not None:
        fields["taint_weight"] = among.taint_weights[i]
    if results is not None:
        fields["curve"], fields["shares_steps"] = among.curves[i], True
        ahead_ms = among.reservations.prefill_ms[among.reservations.rows == i]
        if len(ahead_ms) > MAX_RECORDED_RESERVATIONS:
            fields["planned_ms"] = results[i, kernels.PLANNED]
        else:
            fields["ahead_ms"] = tuple(ahead_ms)
    return Candidate(*among.worker_ranks[i], **fields)


def test_candidates_that_miss_a_target_follow_those_that_meet_it() -> None:
    near = {"overlap_blocks": 45}
    busy = near | {"open_runs": 2, "prompt_tokens": 900, "prefill_runs": 1, "prefill_tokens": 500}
    send = replace(ASK, most_cached_tokens=450.0)
    free, held = predicted({}, busy, send=send).costs
    assert predicted({}, busy, send=replace(send, ttft_target_ms=20.0)).costs[0] == free
    assert predicted({}, busy, send=replace(send, ttft_target_ms=20.0)).costs[1] == held + 1e9
    both = predicted({}, busy, send=replace(send, itl_target_ms=1.0)).costs
    assert both.tolist() == [free + 1e9, held + 1e9]


# As a part of `select_worker`


PREDICTIVE = RoutingConfig("predictive")
BIG = Request(id="big", model="m", token_ids=pack_tokens(list(range(4000))))
ENGINE = {"total_kv_blocks": 4096, "max_num_batched_tokens": 8192}


def held(routing: RoutingHarness, **over: Any) -> Wait:
    planned = routing.plan(PREDICTIVE, **({"request": BIG} | over))
    assert isinstance(planned, Wait), planned
    return planned


def test_busy_worker_is_awaited_with_a_retry_time(routing: RoutingHarness) -> None:
    routing.worker("w1")
    routing.add_load("w1", 4000, prefill=4000, since_ms=NOW_MS - 10)
    hold = held(routing)
    assert hold.reservation is not None
    assert hold.reservation.worker_rank == WorkerRank("w1", 0)
    # 4000 tokens by the published curve, beside a step of decode at an empty cache; 10 ms are over
    alone_ms = 4.209989e-7 * 4000**2 + 1.518344e-2 * 4000 + 16.50142
    assert hold.reservation.prefill_ms == pytest.approx(alone_ms)
    assert hold.retry_at_ms == math.ceil(NOW_MS + alone_ms + 5.74 - 10)


def test_first_token_of_the_current_request_frees_the_worker_at_once(
    routing: RoutingHarness,
) -> None:
    routing.worker("w1")
    routing.add_load("w1", 4000, prefill=4000, since_ms=NOW_MS - 10)
    held(routing)
    place = WorkerRank("w1", 0)
    routing.got.remove(place, WorkerLoad(1, 4000, 4000, 1, NOW_MS - 10))
    routing.got.add(place, WorkerLoad(1, 4000))
    assert isinstance(routing.plan(PREDICTIVE, request=BIG), Placement)


def test_wait_counts_from_the_last_first_token(routing: RoutingHarness) -> None:
    routing.worker("w1")
    for _ in range(2):
        routing.add_load("w1", 4000, prefill=4000, since_ms=NOW_MS - 500)
    assert isinstance(routing.plan(PREDICTIVE, request=BIG), Placement), "long over by the curve"
    routing.got.on_first_token(WorkerRank("w1", 0), NOW_MS - 30)
    decision = held(routing)
    assert decision.retry_at_ms is not None
    assert NOW_MS < decision.retry_at_ms < NOW_MS + 200


def test_prompts_after_the_last_first_token_join_the_next_step(routing: RoutingHarness) -> None:
    routing.worker("w1")
    routing.add_load("w1", 300, prefill=200, since_ms=NOW_MS - 50)
    routing.got.on_first_token(WorkerRank("w1", 0), NOW_MS - 30)
    routing.add_load("w1", 120, prefill=80, since_ms=NOW_MS - 20)
    routing.own.add(WorkerRank("w1", 0), WorkerLoad(1, 60, 60, 1, NOW_MS - 10))
    decision = routing.chosen(PREDICTIVE)
    (found,) = decision.candidates
    assert (found.prefill_tokens, found.prefill_runs, found.busy_ms) == (340, 3, 30)
    assert (found.joining_tokens, found.joining_runs, found.joining_ms) == (140, 2, 15)
    assert recompute_choice(to_assigned(decision)) == decision.worker_rank


def test_later_requests_avoid_the_worker_whose_sessions_come_back(routing: RoutingHarness) -> None:
    for worker in ("w1", "w2"):
        routing.worker(worker, engine={"curve": CURVES.coefficients(), "total_kv_blocks": 625})
    usual = FadingSums[WorkerRank](USUAL_LOAD_MS)
    known = {"usual_load": usual, "expected_followups": 4.0}
    assert routing.chosen(PREDICTIVE, known=known).record.usual_tokens == ()
    usual.add(WorkerRank("w1", 0), 4000.0, NOW_MS)
    routing.got.changes.record(WorkerRank("w1", 0))
    later_ms = NOW_MS + 1500
    for seed in range(8):
        decision = routing.chosen(PREDICTIVE, known=known, seed=seed, now_ms=later_ms)
        assert decision.worker_rank.worker == "w2"
        record = to_assigned(decision)
        assert recompute_choice(record) == decision.worker_rank
        recalled = reconstruct(record)
        assert recalled is not None
        assert recalled.scores.costs.tolist() == [c.cost for c in record.candidates]
        loads = {each.worker: each.usual_tokens for each in decision.candidates}
        assert loads == {"w1": pytest.approx(4000 * math.exp(-0.1)), "w2": 0}


def test_equal_requests_go_to_equal_workers_in_turn(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2", "w3", "w4")
    paces, chosen = PerformanceModel(), Counter[str]()
    for n in range(40):
        at_ms = NOW_MS + 50 * n
        known = {"usual_load": paces.usual_load}
        decision = routing.chosen(PREDICTIVE, known=known, seed=n, now_ms=at_ms)
        record = to_assigned(decision)
        assert recompute_choice(record) == decision.worker_rank
        paces.on_record(LogRecord(n, at_ms, record))
        routing.got.changes.record(decision.worker_rank)
        chosen[decision.worker_rank.worker] += 1
    assert [*chosen.values()] == [10] * 4


def test_own_decisions_keep_a_worker_busy_before_they_are_read_back(
    routing: RoutingHarness,
) -> None:
    routing.worker("w1")
    first = routing.chosen(PREDICTIVE, request=BIG)
    routing.own.add(first.worker_rank, first.load)
    assert held(routing).reservation is not None


def test_deferral_is_bounded_by_its_limit_and_the_deadline(routing: RoutingHarness) -> None:
    routing.worker("w1", engine={"total_kv_blocks": 300})  # 4800 tokens: full
    routing.add_load("w1", 4000)
    assert held(routing).retry_at_ms == NOW_MS + 10_000
    assert held(routing, queued_since_ms=NOW_MS - 9_990).retry_at_ms == NOW_MS + 10
    assert isinstance(
        routing.plan(PREDICTIVE, request=BIG, queued_since_ms=NOW_MS - 10_000), Placement
    )
    hold = held(routing, deadline_ms=NOW_MS + 60_000)
    assert hold.retry_at_ms == NOW_MS + 10_000
    soon = routing.plan(PREDICTIVE, request=BIG, deadline_ms=NOW_MS + 50)
    assert isinstance(soon, Placement), "there is no time to wait in"


def test_worker_is_predicted_by_its_own_curve_and_its_learned_slowdown(
    routing: RoutingHarness,
) -> None:
    routing.worker("w1", engine={"curve": CURVES.coefficients(speedup=2.0)})
    routing.worker("w2", engine={"curve": CURVES.coefficients()})
    assert routing.chosen(PREDICTIVE).worker_rank.worker == "w1"
    known = {"slowdown": {"w1": 4.0}}
    decision = routing.chosen(PREDICTIVE, known=known)
    assert decision.worker_rank.worker == "w2"
    assert {c.worker: c.slowness for c in decision.candidates} == {"w1": 4.0, "w2": 1.0}
    assert {c.curve for c in decision.candidates} == {
        CURVES.coefficients(2.0),
        CURVES.coefficients(),
    }


def test_worker_is_predicted_by_learned_curves_until_they_are_forgotten(
    routing: RoutingHarness,
) -> None:
    routing.worker("w1", engine={"curve": CURVES.coefficients()})
    routing.worker("w2", engine={"curve": CURVES.coefficients()})
    slowness, curves = TrackedDict(), {"w1": PerfCurves(prefill=(0.0, 0.5, 90.0))}
    known = {"slowdown": slowness, "curves": curves}
    decision = routing.chosen(PREDICTIVE, known=known)
    assert decision.worker_rank.worker == "w2"
    assert {c.worker: c.curve for c in decision.candidates} == {
        "w1": curves["w1"].coefficients(),
        "w2": CURVES.coefficients(),
    }
    record = to_assigned(decision)
    assert recompute_choice(record) == decision.worker_rank
    recalled = reconstruct(record)
    assert recalled is not None
    assert recalled.scores.costs.tolist() == [c.cost for c in record.candidates]
    del curves["w1"]
    slowness.changes.record("w1")
    decision = routing.chosen(PREDICTIVE, known=known)
    assert {c.curve for c in decision.candidates} == {CURVES.coefficients()}


def test_unmeasured_worker_counts_as_the_fastest_of_its_kind(routing: RoutingHarness) -> None:
    for worker in ("w1", "w2", "w3", "w4"):
        routing.worker(worker)
    routing.worker("w5", engine={"curve": CURVES.coefficients(3.0)})
    slowness = TrackedDict()

    def supposed() -> dict[str, float]:
        decision = routing.chosen(PREDICTIVE, known={"slowdown": slowness})
        return {each.worker: each.slowness for each in decision.candidates}

    assert set(supposed().values()) == {1.0}
    slowness["w1"] = 0.5
    slowness["w5"] = 7.0
    assert supposed() == {"w1": 0.5, "w2": 0.5, "w3": 0.5, "w4": 0.5, "w5": 7.0}
    slowness["w2"] = 2.0
    assert supposed() == {"w1": 0.5, "w2": 2.0, "w3": 0.5, "w4": 0.5, "w5": 7.0}
    slowness["w3"] = 0.4
    assert supposed()["w4"] == 0.4
    del slowness["w5"], slowness["w2"], slowness["w3"]
    assert supposed() == {"w1": 0.5, "w2": 0.5, "w3": 0.5, "w4": 0.5, "w5": 1.0}


@pytest.mark.parametrize(
    "curve", [(1.0,), (math.nan,) * 7, (-1.0,) * 7, (math.inf,) * 7, (1e7,) * 7]
)
def test_implausible_curve_is_ignored(routing: RoutingHarness, curve: tuple[float, ...]) -> None:
    routing.worker("w1", engine={"curve": curve})
    assert routing.chosen(PREDICTIVE).candidates[0].curve == (), "the published one"


def test_reservations_of_others_count_as_load(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    at = WorkerRank("w1", 0)
    assert (
        routing.chosen(
            PREDICTIVE, known={"reservations": planned_reservations([(at, 90.0)])}
        ).worker_rank.worker
        == "w2"
    )


def test_expected_output_length_is_that_of_the_request(routing: RoutingHarness) -> None:
    routing.worker("w1")

    def expected(**over: Any) -> float:
        request = Request(id="a", model="m", token_ids=TOKENS, **over)
        return routing.chosen(PREDICTIVE, request=request).params["output_tokens"]

    assert expected() == 200
    assert expected(hints=Hints(expected_output_tokens=70)) == 70
    assert expected(stop=StopConditions(max_tokens=30)) == 30
    assert expected(stop=StopConditions(max_tokens=0)) == 1
    assert (
        routing.chosen(PREDICTIVE, known={"mean_output_tokens": 90.0}).params["output_tokens"] == 90
    )


def test_preferred_taints_count(routing: RoutingHarness) -> None:
    routing.worker("w1")
    routing.worker("w2", taints=("fast",))
    wanted = RoutingConstraints(preferred_taints={"fast": 0.1})
    request = Request(id="a", model="m", hints=Hints(routing_constraints=wanted))
    assert routing.chosen(PREDICTIVE, request=request).worker_rank.worker == "w2"


REQUESTS = st.lists(
    st.fixed_dictionaries({
        "tokens": st.integers(1, 9000), "blocks": st.integers(0, 10),
        "hints": st.sampled_from([
            Hints(), Hints(), Hints(expected_output_tokens=7), Hints(backend_instance_id="w0"),
            Hints(allowed_worker_ids=("w0", "w1")), Hints(backend_instance_id="gone"),
        ]),
        "waited_ms": st.integers(0, 11_000), "left_ms": st.integers(50, 60_000),
    }),
    min_size=2, max_size=9,
)  # fmt: skip


WORKERS = st.lists(
    st.fixed_dictionaries({
        "tokens": st.integers(0, 9000), "prefill": st.integers(0, 9000),
        "since_ms": st.none() | st.integers(NOW_MS - 900, NOW_MS), "blocks": st.integers(0, 10),
        "slowness": st.floats(0.1, 10), "others": st.lists(st.floats(0, 500), max_size=3),
        "engine": st.sampled_from([{}, ENGINE, ENGINE | {"curve": CURVES.coefficients()}]),
    }),
    min_size=1, max_size=20,
)  # fmt: skip


def got(workers: list[dict[str, Any]]) -> tuple[RoutingHarness, dict[str, Any]]:
    """A stage with these workers, and what else is known of them."""
    routing = RoutingHarness()
    known: dict[str, Any] = {"slowdown": {}}
    others: list[tuple[WorkerRank, float]] = []
    for n, each in enumerate(workers):
        name = routing.worker(f"w{n}", engine=each["engine"])
        if each["tokens"]:
            routing.add_load(name, each["tokens"], each["prefill"], since_ms=each["since_ms"])
        if each["blocks"]:
            routing.add_blocks(name, each["blocks"])
        known["slowdown"][name] = each["slowness"]
        others += [(WorkerRank(name, n), ms) for ms in each["others"]]
    known["reservations"] = planned_reservations(others)
    return routing, known


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=40), st.floats(0, 1))
def test_many_reservations_are_recorded_as_their_sum_and_costs_recomputed_to_the_bit(
    others: list[float], decode_weight: float
) -> None:
    routing = RoutingHarness()
    place = WorkerRank(routing.worker("w1"), 0)
    weights = PREDICTIVE.predictive_weights._replace(decode_weight=decode_weight)
    decision = routing.chosen(
        PREDICTIVE._replace(predictive_weights=weights),
        known={"reservations": planned_reservations([(place, ms) for ms in others])},
    )
    (candidate,) = decision.candidates
    if len(others) <= MAX_RECORDED_RESERVATIONS:
        assert (candidate.ahead_ms, candidate.planned_ms) == (tuple(others), None)
    else:
        assert candidate.ahead_ms == ()
        assert (candidate.planned_ms or 0) > 0 or not any(others)
    recalled = reconstruct(to_assigned(decision))
    assert recalled is not None
    assert recalled.scores.costs.tolist() == [candidate.cost]


@given(WORKERS, st.integers(0, 2**32 - 1))
def test_decision_is_a_function_of_its_inputs_and_recomputed_from_its_record(
    workers: list[dict[str, Any]], seed: int
) -> None:
    routing, known = got(workers)
    over: dict[str, Any] = {"seed": seed, "known": known, "queued_since_ms": NOW_MS - 10_000}
    decision = routing.chosen(PREDICTIVE, **over)
    assert decision == routing.chosen(PREDICTIVE, **over)
    assert recompute_choice(to_assigned(decision)) == decision.worker_rank
    assert all(math.isfinite(c.cost) and c.cost > 0 for c in decision.candidates)


@given(WORKERS, st.floats(0, 20_000), st.floats(-500, 20_000))
def test_wait_has_an_end(workers: list[dict[str, Any]], waited_ms: float, left_ms: float) -> None:
    routing, known = got(workers)
    since_ms, deadline_ms = NOW_MS - waited_ms, NOW_MS + left_ms
    planned = routing.plan(
        PREDICTIVE, request=BIG, known=known, queued_since_ms=since_ms, deadline_ms=deadline_ms
    )
    if isinstance(planned, Wait):
        assert planned.retry_at_ms is not None
        assert NOW_MS < planned.retry_at_ms <= min(since_ms + 10_000, deadline_ms)
    else:
        assert isinstance(planned, Placement)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 900)), min_size=2, max_size=12),
    st.integers(0, 99),
)
def test_predictive_policy_without_caches_is_least_load_in_milliseconds(
    loads: list[tuple[int, int]], seed: int
) -> None:
    """Prompts that came in this very millisecond are another case: their step has not begun."""
    routing = RoutingHarness()
    for n, (thousands, ago_ms) in enumerate(loads):
        routing.worker(f"w{n}")
        tokens = 1000 * thousands
        routing.add_load(f"w{n}", 20_000, prefill=tokens, since_ms=NOW_MS - ago_ms)
    known = {"slowdown": {}}
    decision = routing.chosen(PREDICTIVE, seed=seed, queued_since_ms=0, known=known)

    def left_ms(load: tuple[int, int]) -> float:
        return max(EngineProfile().prefill_ms(1000 * load[0], 5.74) - load[1], 5.74 / 2)

    place = int(decision.worker_rank.worker[1:])
    assert left_ms(loads[place]) == min(map(left_ms, loads))


def test_own_reservation_is_no_load(routing: RoutingHarness) -> None:
    routing.workers("w1", "w2")
    routing.add_load("w2", 500)
    held, wants = (
        ReservedRequests[int](),
        [PendingRequest(n, n, PromptHashes(BIG), n, NOW_MS) for n in range(2)],
    )
    held.add(0, 0, NOW_MS, Reservation(WorkerRank("w1", 0), 500.0, 0))
    view = RoutingState(
        routing.fleet, routing.pools, routing.index, routing.got, routing.own, NOW_MS
    )
    by = PlanningContext(view, PREDICTIVE)
    ((pool, group),) = uniform_groups(wants, by)
    assert pool is not None
    plans = plan_uniform(group, held, pool, by)
    assert [each.reservation.worker_rank.worker for each in plans] == ["w1", "w2"]


@given(WORKERS, REQUESTS, st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)))
def test_batch_plan_equals_sequential_planning(
    workers: list[dict[str, Any]], requests: list[dict[str, Any]], looks: set[int], old: set[int]
) -> None:
    routing, known = got(workers)
    del known["reservations"]
    wanted = [
        PendingRequest(
            n, n, PromptHashes(Request(
                id=f"{n}", model="m", hints=each["hints"],
                token_ids=TOKENS[: 64 * each["blocks"]] + pack_tokens([5] * each["tokens"]),
            )), n, NOW_MS - each["waited_ms"], NOW_MS + each["left_ms"],
        )
        for n, each in enumerate(requests)
    ]  # fmt: skip
    view = RoutingState(
        routing.fleet, routing.pools, routing.index, routing.got, routing.own, NOW_MS,
        slowdown=known["slowdown"],
    )  # fmt: skip

    def in_a_batch() -> tuple[PlannedOrder[int], list[tuple[WorkerRank, float]]]:
        held = ReservedRequests[int]()

        def alone(each: PendingRequest[int]) -> Decision:
            return select_worker(
                each.prompt, replace(view, reservations=held.reservations_of_others(each.key)),
                PREDICTIVE,
                seed=each.seed, queued_since_ms=each.since_ms, deadline_ms=each.deadline_ms,
            )  # fmt: skip

        for n in old:
            held.add(
                n, n, 0, Reservation(WorkerRank(f"w{n % len(workers)}", n % len(workers)), 500.0, 0)
            )
        looking = [wanted[n] for n in looks if n < len(wanted)]
        return plan_together(looking, held, PlanningContext(view, PREDICTIVE), alone), reserved(
            held.reservations_of_others(99)
        )

    together = in_a_batch()
    with mock.patch.object(joint_planning, "_is_plain", return_value=False):
        assert in_a_batch() == together
