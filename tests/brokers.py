"""Broker fixtures for tests: a pytest plugin, with a report of the brokers that ran.

    kafka           one real broker, shared by the whole run
    kafka_cluster   three real brokers, one cluster per module; nodes may be killed
    topic_prefix    a prefix that no other test has, so that tests can share a broker

KVLANE_BROKER (env, docker, jvm) forces a kind and KVLANE_BOOTSTRAP_SERVERS names servers. Without
a real broker such tests fail, so that a green run means that Kafka was there; only
KVLANE_BROKER=memory skips them.

Where pytest runs several workers (`-n`), "the whole run" is that of one worker: each has a broker.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast, get_args

import pytest

from kvlane.streams.brokers.broker_factory import Broker, JvmBroker, Kind, obtain_broker
from kvlane.streams.brokers.jvm import prepare
from kvlane.streams.errors import BrokerUnavailable

_NEEDS = {"kafka": ("kafka", "kafka_cluster"), "cluster": ("kafka_cluster",)}
"""Marks of a test by the fixtures that it uses."""


class BrokerUsage:
    """The brokers of this session: number of tests on each, and kinds that were unavailable."""

    def __init__(self) -> None:
        self.running: dict[str, Broker] = {}  # by fixture
        self.tests: Counter[str] = Counter()
        self.missing: dict[str, str] = {}

    def count_test(self, broker: Broker) -> None:
        self.tests[f"{broker.kind}: {broker.description}"] += 1


_ledger = pytest.StashKey[BrokerUsage]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ledger] = BrokerUsage()


def requested_kind() -> str:
    """The kind in KVLANE_BROKER. Raises UsageError for an unknown one."""
    kind = os.environ.get("KVLANE_BROKER", "") or "auto"
    if kind != "auto" and kind not in get_args(Kind):
        raise pytest.UsageError(f"KVLANE_BROKER={kind}: must be one of {', '.join(get_args(Kind))}")
    return kind


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, before `-m` selects; skip all where memory is forced."""
    skip = pytest.mark.skip(reason="needs Kafka, and KVLANE_BROKER=memory")
    for item in items:
        taken = getattr(item, "fixturenames", ())
        for mark, fixtures in _NEEDS.items():
            if any(fixture in taken for fixture in fixtures):
                item.add_marker(mark)
        if requested_kind() == "memory" and item.get_closest_marker("kafka"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch jars before the first test, whose time limit is not meant for downloads."""
    needed = any(item.get_closest_marker("kafka") for item in session.items)
    if not needed or session.config.option.collectonly or requested_kind() not in ("auto", "jvm"):
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    try:
        prepare(reporter.write_line if reporter else lambda _: None)
    except BrokerUnavailable as reason:
        session.config.stash[_ledger].missing["jvm"] = str(reason)


def pytest_runtest_call(item: pytest.Item) -> None:
    ledger = item.config.stash[_ledger]
    for fixture, broker in ledger.running.items():
        if fixture in getattr(item, "fixturenames", ()):
            ledger.count_test(broker)


@pytest.fixture(scope="session")
def broker_ledger(request: pytest.FixtureRequest) -> BrokerUsage:
    return request.config.stash[_ledger]


@pytest.fixture(scope="session")
def kafka(broker_ledger: BrokerUsage) -> Iterator[Broker]:
    """A real broker, the same one for the whole run."""
    output: list[str] = []
    try:
        broker = obtain_broker(
            cast("Kind", requested_kind()),
            bootstrap_servers=os.environ.get("KVLANE_BOOTSTRAP_SERVERS", ""),
            report=output.append,
        )
    except BrokerUnavailable as reason:
        pytest.fail(f"no broker: {reason}", pytrace=False)
    with broker:
        if broker.kind == "memory":
            pytest.fail("no real broker:\n" + "\n".join(output), pytrace=False)
        broker_ledger.running["kafka"] = broker
        if broker.kind == "env":  # may be remote, and processes want a secret for those
            os.environ.setdefault("KVLANE_HASH_SECRET", "tests")
        yield broker


@pytest.fixture(scope="module")
def kafka_cluster(broker_ledger: BrokerUsage) -> Iterator[JvmBroker]:
    """Three brokers with a copy of everything on each, the same ones for a module.

    A test that kills or pauses a node starts or resumes it before it ends.
    """
    try:
        broker = obtain_broker("jvm", brokers=3, report=lambda _: None)
    except BrokerUnavailable as reason:
        pytest.fail(f"no cluster: {reason}", pytrace=False)
    with broker:
        broker_ledger.running["kafka_cluster"] = broker
        yield broker


@pytest.fixture
def topic_prefix() -> str:
    """A prefix for topics and groups that no other test has."""
    return f"t{uuid.uuid4().hex[:10]}."


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send this worker's ledger to the reporting process."""
    if (got := getattr(session.config, "workeroutput", None)) is not None:
        ledger = session.config.stash[_ledger]
        got["brokers"] = {"tests": dict(ledger.tests), "missing": ledger.missing}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add the ledger of a worker; one that crashed has sent none."""
    got = getattr(node, "workeroutput", {}).get("brokers", {"tests": {}, "missing": {}})
    ledger = node.config.stash[_ledger]
    ledger.tests.update(got["tests"])
    ledger.missing.update(got["missing"])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    ledger = config.stash[_ledger]
    skipped = terminalreporter.stats.get("skipped", [])
    without = sum("KVLANE_BROKER=memory" in str(report.longrepr) for report in skipped)
    if not (ledger.tests or ledger.missing or without):
        return
    terminalreporter.section("brokers")
    for line, tests in ledger.tests.items():
        terminalreporter.line(f"{line}, used by {tests} test{'s' * (tests != 1)}")
    for kind, reason in ledger.missing.items():
        terminalreporter.line(f"{kind}: not run: {reason}")
    if without:
        terminalreporter.line(f"no broker: {without} tests skipped by KVLANE_BROKER=memory")
