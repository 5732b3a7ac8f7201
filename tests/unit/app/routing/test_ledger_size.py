"""Tests of the size of decisions in the ledger."""

from __future__ import annotations

import pytest

from kvlane.app.perf_curves import PerfCurves
from kvlane.app.routing.selection.routing_config import RoutingConfig
from kvlane.app.routing.state.fleet import WorkerRank
from kvlane.app.routing.state.performance import USUAL_LOAD_MS, FadingSums
from kvlane.streams.codecs import encode
from tests.harness.routing_harness import RoutingHarness, to_assigned

ID = "019aa5c1-7f3e-7c02-9d41-0123456789ab-5e884898"


def bytes_of(policy: str, workers: int, *, has_own_curves: bool = False) -> int:
    routing = RoutingHarness()
    for n in range(workers):
        curves = PerfCurves((4.3e-7 + n * 1e-9, 1.6e-2 + n * 1e-5, 17.1 + n / 100))
        engine = {"total_kv_blocks": 16_384, "max_num_batched_tokens": 8192}
        if has_own_curves:
            engine["curve"] = curves.coefficients()
        routing.worker(f"worker-{n:02}", engine=engine)
        routing.add_load(f"worker-{n:02}", 4000 + 97 * n, 300 + n, since_ms=1500)
        routing.add_blocks(f"worker-{n:02}", 1 + n % 10)
    usual_load = FadingSums[WorkerRank](USUAL_LOAD_MS)
    for name, epoch in routing.epochs.items():
        usual_load.add(WorkerRank(name, epoch), 900.0 + epoch, 1500)
    slowdown = {f"worker-{n:02}": 1 + n / 640 for n in range(workers)}
    known = {"slowdown": slowdown, "usual_load": usual_load}
    chosen = routing.chosen(RoutingConfig(policy), seed=2**32 - 1, known=known)
    record = to_assigned(chosen, id=ID, router="router-1")
    value = encode(record, ID).value
    assert value is not None
    return len(value)


@pytest.mark.parametrize(("policy", "most"), [("predictive", 3400), ("dynamo", 1750)])
def test_decision_among_many_takes_a_few_kilobytes(policy: str, most: int) -> None:
    """`predictive` records the prompts of each candidate that share its next step, 16 bytes, and
    its usual load, 9."""
    among_64 = bytes_of(policy, 64)
    assert among_64 < most
    assert bytes_of(policy, 512) < among_64 * 1.02, "only the best candidates are recorded"


def test_curves_of_their_own_take_a_third_more() -> None:
    assert bytes_of("predictive", 64, has_own_curves=True) < 4450
