"""Tests of rolling upgrade and rollback: processes of two versions share one deployment, under
load.

Every process is replaced by one of the other version, one after the other, as an orchestrator does.
The times to the first text are properties of the result (`--junitxml`), without a limit.
The other version is the commit, tag or branch in KVLANE_TEST_UPGRADE_FROM.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvlane.app.demo.expected_answers import AnswerOracle
from kvlane.app.local.deployment import DeploymentPart
from kvlane.app.local.processes import free_port
from kvlane.app.runtime.process import open_log
from kvlane.app.settings import Settings
from kvlane.streams.brokers.broker_factory import Broker
from kvlane.streams.client import Client
from kvlane.streams.kafka import provision
from tests.deployments import Deployment, kernel_folder
from tests.harness.http_and_kafka_clients import CLOCK
from tests.harness.topic_cleanup import delete_topics
from workbench.bench.chaos.load_generator import Conversation, LoadGenerator
from workbench.bench.chaos.log_observer import LogObserver
from workbench.bench.statistics import percentile

ROOT = Path(__file__).resolve().parents[2]
BEFORE = os.environ.get("KVLANE_TEST_UPGRADE_FROM", "3084ef4")
"""By default the last commit before batch work and the roles prefill and decode."""
LANES = 8
GRACE_S, STOP_S, MODEL_S = 30.0, 40.0, 60.0
GATEWAYS = ("gateway-1", "gateway-2")
ORDER = ("preprocessor-1", "router-1", "router-2", "router-3", *GATEWAYS, "worker-1", "worker-2")
"""Of an upgrade, see operations.md; a rollback has the opposite order."""
RATE, TOKENS, ON_KAFKA = 6.0, 40, 2
"""Requests/s, tokens of an answer, and requests in eight that are prompts on Kafka."""
STEADY_S = 8.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "KVLANE_TEST_LONG" not in os.environ, reason="minutes: KVLANE_TEST_LONG=1 runs it"
    ),
]


@pytest.fixture(scope="module")
def code_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the other version, and its kernels compiled."""
    archive = subprocess.run(
        ["git", "archive", BEFORE, "app", "streams", "indexer", "kvlane"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        pytest.skip(f"no commit {BEFORE} in this clone: {archive.stderr.decode().strip()}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    root = "kvlane." if (folder / "kvlane" / "indexer").exists() else ""
    # Numba's cache is valid for the files of one folder.
    kernels = {"KVLANE_KERNEL_CACHE_DIR": str(kernel_folder(folder))}
    subprocess.run(
        [sys.executable, "-m", f"{root}indexer.precompile"],
        cwd=folder,
        env=os.environ | kernels,
        check=True,
    )
    return folder


class Ground(NamedTuple):
    """A deployment whose processes run the other version, and its load."""

    deployment: Deployment
    load: LoadGenerator
    observer: LogObserver


@pytest.fixture
def deployment(
    kafka: Broker, code_before: Path, tmp_path: Path
) -> Iterator[tuple[Deployment, Settings, dict[str, str]]]:
    prefix = f"upgrade{random.randbytes(4).hex()}."
    common: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": prefix, "lanes": LANES,
        "cache_dir": tmp_path, "drain_grace_s": GRACE_S, "engine_speedup": 0.2,
        "validate_engine": True,
    }  # fmt: skip
    ports = {name: free_port() for name in GATEWAYS}
    parts = [
        *(
            DeploymentPart(name, name.partition("-")[0], {"indexer_port": 0})
            for name in ORDER
            if name not in GATEWAYS
        ),
        *(
            DeploymentPart(
                name, "gateway", {"http_port": port, "gateway_count": 2, "gateway_index": number}
            )
            for number, (name, port) in enumerate(ports.items())
        ),
    ]
    deployment = Deployment(parts, common)
    try:
        yield (
            deployment,
            Settings(**common),
            {name: f"http://127.0.0.1:{port}" for name, port in ports.items()},
        )
        asyncio.run(deployment.terminate(deployment.processes, STOP_S))
    finally:
        deployment.close()
        asyncio.run(delete_topics(kafka.bootstrap_servers, prefix))


@pytest.fixture
async def ground(
    deployment: tuple[Deployment, Settings, dict[str, str]], code_before: Path
) -> AsyncIterator[Ground]:
    parts, settings, urls = deployment
    log = open_log(settings, "test")
    await log.start()
    await provision.create_topics(log, lanes=LANES, replication=1, min_insync=1)
    parts.start(*ORDER, code=code_before)
    await parts.ready(*ORDER)
    oracle, observer = AnswerOracle(settings, CLOCK), LogObserver(log, CLOCK)
    await oracle.load()
    watching = asyncio.create_task(observer.run(await observer.end_offsets()))
    async with Client(log, CLOCK) as client:
        load = LoadGenerator(
            urls, client, oracle, CLOCK,
            rate=RATE, tokens=TOKENS, on_kafka=ON_KAFKA, rng=random.Random(1),
        )  # fmt: skip
        try:
            await load.wait_until_served(MODEL_S)
            yield Ground(parts, load, observer)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await load.close()
    await log.close()


async def replace(deployment: Deployment, names: Sequence[str], code: Path | None) -> None:
    """One process after the other by one of another version."""
    for name in names:
        await deployment.terminate([name], STOP_S)
        deployment.launch_version(name, code) if code else deployment.launch(name)
        await deployment.wait_ready(name)


def p99_s(conversations: Sequence[Conversation], start: float, end: float) -> float:
    """Of the time to the first text, for requests that were sent in a period."""
    sent = (chat.expected for chat in conversations if start <= chat.expected.sent_at < end)
    return percentile([answer.ttft_s for answer in sent], 0.99)


async def test_upgrade_and_rollback_lose_and_double_nothing(
    ground: Ground, code_before: Path, record_property: Callable[[str, object], None]
) -> None:
    load = ground.load
    moments = [CLOCK.now()]
    sending = asyncio.create_task(load.run())
    await CLOCK.sleep(STEADY_S)
    moments.append(CLOCK.now())
    await replace(ground.deployment, ORDER, code=None)
    moments.append(CLOCK.now())
    await replace(ground.deployment, ORDER[::-1], code=code_before)
    moments.append(CLOCK.now())
    sending.cancel()
    await load.drain()

    verdicts = Counter(chat.verdict for chat in load.conversations)
    assert verdicts == {"right": len(load.conversations)}
    async with asyncio.timeout(STOP_S):  # the observer reads a little later than the clients
        while open_requests(ground.observer):
            await CLOCK.sleep(0.2)
    for chat in load.conversations:
        seen = ground.observer.requests[chat.expected.id].transcript
        assert (seen.text, seen.gaps) == (chat.expected.expected.text, 0)

    steady, upgrade, rollback = (
        p99_s(load.conversations, start, end) for start, end in pairwise(moments)
    )
    found = {"steady": steady, "upgrade": upgrade, "rollback": rollback}
    record_property("p99 to the first text, s", found)
    record_property("requests", len(load.conversations))
    record_property("load generator was late by, s", load.max_lateness_s)


def open_requests(observer: LogObserver) -> list[str]:
    """Requests in the log that have no end yet."""
    return [name for name, seen in observer.requests.items() if not seen.transcript.is_over]
