"""The comparison of `kvlane bench engines`: its turns, with simulated engines in place of vLLM."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from kvlane.app.demo.demo_session import demo_environment
from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import free_port
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import obtain_broker
from workbench.bench.streaming.engine_comparison import (
    MODEL,
    POLICIES,
    EngineComparison,
    make_traffic,
)

WORDS = (" a", " b")


async def test_sides_take_turns_with_all_kinds_of_traffic() -> None:
    parts = [DeploymentPart(f"worker-{n}", "worker") for n in (1, 2)]
    parts += [DeploymentPart("router-1", "router"), DeploymentPart("gateway-1", "gateway")]
    changes = {
        "http_port": free_port(), "model": MODEL, "engine_speedup": 20.0, "drain_grace_s": 0.0,
        "heartbeat_interval_s": 0.1, "lanes": 1,
    }  # fmt: skip
    progress: list[float] = []
    with obtain_broker("memory", report=print) as broker:
        async with demo_environment(
            Settings(_env_file=None, worker_id="-", router_id="-"), broker, parts=parts,
            changes=changes,
        ) as on:  # fmt: skip
            traffic = make_traffic(WORDS, 0.1, 40.0, 1024, shrink=16)
            comparison = EngineComparison(on, traffic, [], progress.append)
            comparison.sides = {name: comparison.sides[name] for name in POLICIES[:2]}
            report = await comparison.run(rounds=1)
    assert [(row["traffic"], row["side"]) for row in report.rows] == [
        (kind, side) for kind in traffic for side in POLICIES[:2]
    ]
    assert sum(progress) == pytest.approx(1)
    for row in report.rows:
        assert row["requests"] == 4
        assert 0 < row["TTFT ms"]["mean"] < row["E2E ms"]
        assert 1 <= row["busiest"] <= 2
        assert math.isnan(row["TTFT error"]["p50"]) == (row["side"] != "predictive")
    in_turn = [row["busiest"] for row in report.rows if row["side"] == "round_robin"]
    assert in_turn == [1.0] * len(traffic)


def test_requests_of_the_trace_share_the_prefixes_of_its_chunks() -> None:
    traffic = make_traffic([f" {n}" for n in range(999)], 10.0, 30.0, 1024, shrink=16)
    assert set(map(len, traffic.values())) == {300}
    requests = traffic["trace"]
    texts = sorted(request.text.split() for request in requests)
    shared = [sum(a == b for a, b in zip(*pair, strict=False)) for pair in pairwise(texts)]
    assert max(shared) >= 32, "a chunk"
    assert max(len(text) for text in texts) < 1024
    assert (requests[0].at_s, requests[-1].at_s) == (0.0, 10.0)
