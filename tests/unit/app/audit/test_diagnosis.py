"""Tests of the checks of `kvlane doctor`: a healthy deployment, and one planted fault after the
other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.access.key_file import KeyFile, new_key, write_key_file
from kvlane.app.audit.diagnosis import fact_reader
from kvlane.app.audit.diagnosis.diagnosis import CHECKS, diagnose
from kvlane.app.audit.diagnosis.fact_reader import WRONG_PORT, secret_files
from kvlane.app.audit.diagnosis.facts import (
    Facts,
    FileState,
    FleetSample,
    ProcessAnswer,
    Unread,
    UnreadRecords,
)
from kvlane.app.audit.diagnosis.findings import KINDS
from kvlane.app.audit.diagnosis.fleet_checks import check_processes
from kvlane.app.audit.drift import MIN_RUNS
from kvlane.app.audit.fleet.fleet_status import TopicRow
from kvlane.app.settings import Settings
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.broker_state import BrokerState
from kvlane.streams.kafka.provision import REPLICATION, TopicState, expected_partitions
from kvlane.streams.ports import Partition
from kvlane.streams.records import (
    Blocks,
    Candidate,
    Cordon,
    Deployment,
    Finished,
    Lost,
    ModelCard,
    ReportedWaits,
    RouterCapacity,
    RoutingOrder,
    RoutingReport,
)
from kvlane.streams.topics import CAPACITY, KV_EVENTS, LEDGER, REGISTRY, REQUESTS, AclRule
from tests.harness.made_fleet import NOW_MS, TIMEOUT_S, MadeFleet

ROOT = Path(__file__).resolve().parents[4]
SECRET = "0123456789abcdef"
OWN = {"policy": "predictive"}
URLS = ("http://r1", "http://r2")
VIEW = ("kv index", "kv-events", "0", 7)


class Planted:
    """A healthy deployment of two workers, with everything in reach of a fault."""

    def __init__(self) -> None:
        self.fleet = MadeFleet()
        self.brokers = BrokerState(
            {1: "a:9092", 2: "b:9092"}, True, {Partition(KV_EVENTS, 0): 1}, frozenset()
        )
        self.topics = {
            name: TopicState(name, True, count, count, {}, 2, 1)
            for name, count in expected_partitions(1).items()
        }
        self.ahead_ms = {Partition(KV_EVENTS, 0): -3}
        self.epochs = {name: self.fleet.register(name) for name in ("w1", "w2")}
        self.fleet.append(REGISTRY, ModelCard(name="demo"))
        for worker, epoch in self.epochs.items():
            self.fleet.beat(worker, epoch)
            self.blocks(worker)
        self.fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 0}))
        self.over: dict[str, Any] = {}
        self.processes = {
            url: ProcessAnswer(url, 200, 200, 0.1, (), 0, {"x_total": 0.0}, {VIEW: 5.0})
            for url in URLS
        }
        self.rows = [TopicRow(REQUESTS, 1.0, 0, 0)]

    def blocks(self, worker: str, after_ms: int = 0, secret: str = SECRET, first: int = 0) -> None:
        record = Blocks(
            worker=worker, epoch=self.epochs[worker], first_event_id=first,
            hash_fingerprint=secret, kinds=b"\0",
        )  # fmt: skip
        self.fleet.append(KV_EVENTS, record, after_ms)

    def run(self, number: int, after_ms: int, cached: int = 0, predicted: int = 0) -> None:
        """A run of w1 whose prompt has ten blocks."""
        run = self.fleet.assign(
            f"job-{number}", self.epochs["w1"], after_ms, block_size=10,
            cached_tokens_predicted=predicted,
            listed=(Candidate(worker="w1", epoch=self.epochs["w1"]),),
        )  # fmt: skip
        end = Finished(**run, code="stop", output_tokens=1, cached_tokens=cached)
        self.fleet.append(LEDGER, end, after_ms)

    def process(self, **over: Any) -> None:
        self.processes[URLS[0]] = replace(self.processes[URLS[0]], **over)

    def topic(self, name: str, **over: Any) -> None:
        self.topics[name] = self.topics[name]._replace(**over)

    def facts(self) -> Facts:
        sample = FleetSample(
            self.fleet.view, self.fleet.events, NOW_MS, TIMEOUT_S, self.ahead_ms
        )  # fmt: skip
        facts = Facts(
            "a:9092", 1, SECRET, ["operator"], self.brokers, list(self.topics.values()), (),
            Deployment(lanes=1, partitions=expected_partitions(1)), sample,
            UnreadRecords(self.rows, 0, 0), list(self.processes.values()),
            [FileState("/keys.json", "KVLANE_API_KEYS_FILE", 0o600, keys=1)],
        )  # fmt: skip
        return replace(facts, **self.over)


def found(facts: Facts) -> list[tuple[str, str]]:
    """Name and object of each warning and fault."""
    return [
        (each.name, each.object)
        for each in diagnose(facts)
        if each.severity in ("warning", "fault")
    ]


def test_healthy_deployment_has_no_finding_and_no_skipped_check() -> None:
    assert [each for each in diagnose(Planted().facts()) if each.severity != "ok"] == []


def plant_silence(at: Planted) -> None:
    at.fleet = MadeFleet()
    at.fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 0}))
    for worker, ms in (("w1", 0), ("w2", -30_000)):
        at.epochs[worker] = at.fleet.register(worker)
        at.fleet.beat(worker, at.epochs[worker], ms)


def plant_stale_epoch(at: Planted) -> None:
    old = at.epochs["w1"]
    new = at.fleet.register("w1", after_ms=-30_000)
    at.fleet.beat("w1", old)
    at.fleet.beat("w1", new)


def plant_loss(at: Planted) -> None:
    lost = Lost(worker="w2", epoch=at.epochs["w2"], by="r1", silent_ms=5000)
    at.fleet.append(KV_EVENTS, lost, -1000)


ORDER = RoutingOrder(settings={"policy": "dynamo"})


def plant_routing(*, is_read: bool, problem: str = "") -> Callable[[Planted], None]:
    """An order of a minute ago, and how a router that has read it routes."""

    def plant_fault(at: Planted) -> None:
        offset = at.fleet.append(REGISTRY, ORDER, -60_000)
        routing = RoutingReport(own=OWN, order=offset if is_read else None, problem=problem)
        at.fleet.append(
            CAPACITY,
            RouterCapacity(router="r1", positions={0: 0}, waits=ReportedWaits(), routing=routing),
        )

    return plant_fault


def plant_earlier_version(at: Planted) -> None:
    """A router that has reported for longer than routers need to report how they route."""
    at.fleet.append(REGISTRY, ORDER, -60_000)
    at.fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 0}), 20_000)


def plant_other_router(at: Planted) -> None:
    for name, policy in (("r1", "predictive"), ("r2", "random")):
        report = RouterCapacity(
            router=name, positions={0: 0}, waits=ReportedWaits(),
            routing=RoutingReport(own={"policy": policy}),
        )  # fmt: skip
        at.fleet.append(CAPACITY, report)


def plant_zombie(at: Planted) -> None:
    lost = Lost(worker="w2", epoch=at.epochs["w2"], by="r1", silent_ms=5000)
    at.fleet.append(KV_EVENTS, lost, -20_000)
    at.fleet.beat("w2", at.epochs["w2"])


def plant_third_worker(**config: Any) -> Callable[[Planted], None]:
    def plant(at: Planted) -> None:
        at.fleet.beat("w3", at.fleet.register("w3", **config))

    return plant


def plant_runs_without_events(at: Planted) -> None:
    for number in range(5):
        at.run(number, 1 + number)
    at.over["fleet"] = FleetSample(
        at.fleet.view, at.fleet.events, NOW_MS + 12_000, 60.0, at.ahead_ms
    )
    at.fleet.append(CAPACITY, RouterCapacity(router="r1", positions={0: 0}), 12_000)


def plant_drift(at: Planted) -> None:
    for number in range(MIN_RUNS):
        at.run(number, -100, cached=0, predicted=80)
    at.blocks("w1", 0, first=1)


def plant_idle_model(at: Planted) -> None:
    at.fleet.append(REGISTRY, Cordon(worker="w1"))
    at.fleet.append(REGISTRY, Cordon(worker="w2"))


def plant(**over: Any) -> Callable[[Planted], None]:
    return lambda at: at.over.update(over)


FAULTS: list[tuple[str, str, Callable[[Planted], object]]] = [
    ("broker-unreachable", "a:9092", plant(brokers=Unread("no answer", "BrokerUnavailable"))),
    ("broker-connection", "a:9092", plant(brokers=Unread("no Kafka", WRONG_PORT, "It is HTTP."))),
    ("broker-refuses", "a:9092", plant(brokers=Unread("refused", "AccessDenied"))),
    ("broker-version", "a:9092",
     lambda at: plant(brokers=at.brokers._replace(is_kafka_4=False))(at)),
    ("partition-without-leader", "kv-events[0]",
     lambda at: at.brokers.leaders.update({Partition(KV_EVENTS, 0): -1})),
    ("replica-behind", "kv-events[0]",
     lambda at: plant(brokers=at.brokers._replace(lagging=frozenset(at.brokers.leaders)))(at)),
    ("right-missing", "topic ledger",
     plant(denied=[AclRule("operator", "Read", "topic", "ledger")])),
    ("topic-missing", "results", lambda at: at.topic("results", exists=False, partitions=0)),
    ("topic-partitions", "prompts", lambda at: at.topic("prompts", partitions=3)),
    ("topic-replicas", "ledger",
     lambda at: at.topic("ledger", differing_configs={REPLICATION: ("1", "2")})),
    ("topic-unwritable", "ledger", lambda at: at.topic("ledger", min_insync=3)),
    ("acknowledged-once", "ledger", lambda at: at.topic("ledger", replicas=3)),
    ("topic-loses-records", "ledger",
     lambda at: at.topic("ledger", differing_configs={"retention.ms": ("60000", "86400000")})),
    ("topic-loses-records", "registry",
     lambda at: at.topic("registry", differing_configs={"cleanup.policy": ("delete", "compact")})),
    ("topic-loses-records", "batch",
     lambda at: at.topic("batch", differing_configs={"max.message.bytes": ("1", "8")})),
    ("topic-setting", "ledger",
     lambda at: at.topic("ledger", differing_configs={"compression.type": ("gzip", "lz4")})),
    ("deployment-missing", "registry", plant(deployment=None)),
    ("lanes-differ", "KVLANE_LANES", plant(lanes=4)),
    ("broker-clock", "broker 1 (a:9092)",
     lambda at: at.ahead_ms.update({Partition(KV_EVENTS, 0): -90_000})),
    ("worker-silent", "w2", plant_silence),
    ("worker-lost", "w2", plant_loss),
    ("worker-unhealthy", "w1",
     lambda at: at.fleet.beat("w1", at.epochs["w1"], state="unhealthy", reason="no GPU")),
    ("worker-cordoned", "w1", lambda at: at.fleet.append(REGISTRY, Cordon(worker="w1"))),
    ("worker-epoch-stale", "w1", plant_stale_epoch),
    ("worker-epoch-stale", "w2", plant_zombie),
    ("model-without-worker", "demo", plant_idle_model),
    ("workers-differ", "w3", plant_third_worker(kv_cache_block_size=64)),
    ("workers-differ", "w3", plant_third_worker(context_length=512)),
    ("versions-differ", "w3", plant_third_worker(version="0.31")),
    ("hash-secret-differs", "w2", lambda at: at.blocks("w2", secret="other", first=1)),
    ("cache-events-missing", "w1", plant_runs_without_events),
    ("cache-events-lost", "w1/0", lambda at: at.blocks("w1", first=4)),
    ("cache-events-lost", "w1/0",
     lambda at: at.fleet.beat("w1", at.epochs["w1"], last_event_ids=(9,))),
    ("cache-drift", "w1", plant_drift),
    ("no-router", "routers",
     lambda at: at.fleet.append(CAPACITY, RouterCapacity(router="r1", positions={}))),
    ("lane-without-router", "lane 1",
     lambda at: at.fleet.view.apply(Partition(REQUESTS, 1), (), 0)),
    ("routing-order-unused", "r1", plant_routing(is_read=True, problem="it has format 2")),
    ("routing-order-unused", "r1", plant_routing(is_read=False)),
    ("routing-order-unused", "r1", plant_earlier_version),
    ("routing-differs", "r2", plant_other_router),
    ("records-unread", "requests", lambda at: at.rows.append(TopicRow(REQUESTS, 1.0, 9, 3))),
    ("records-unread", "results", lambda at: plant(backlog=UnreadRecords(at.rows, 2, 0))(at)),
    ("dead-letters", "dead-letters", lambda at: plant(backlog=UnreadRecords(at.rows, 0, 4))(at)),
    ("process-unreachable", URLS[0], lambda at: at.process(live=0)),
    ("process-dead", URLS[0], lambda at: at.process(live=503)),
    ("process-not-ready", URLS[0], lambda at: at.process(ready=503, not_ready=["fleet_read"])),
    ("process-slow", URLS[0], lambda at: at.process(slowest_s=1.7)),
    ("process-clock", URLS[0], lambda at: at.process(ahead_ms=60_000)),
    ("counter-rises", URLS[0], lambda at: at.process(counts={"x_total": 2.0})),
    ("views-differ", ", ".join(URLS), lambda at: at.process(hashes={VIEW: 6.0})),
    ("key-file", "/k", plant(files=[FileState("/k", "X", problem="no such file")])),
    ("no-valid-key", "/k", plant(files=[FileState("/k", "X", keys=0)])),
    ("file-writable", "/k", plant(files=[FileState("/k", "X", 0o660)])),
    ("file-readable", "/k", plant(files=[FileState("/k", "X", 0o644)])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "about", "plant_fault"), FAULTS, ids=[f"{name}-{about}" for name, about, _ in FAULTS]
)
def test_planted_fault_is_found_by_name(
    name: str, about: str, plant_fault: Callable[[Planted], object]
) -> None:
    at = Planted()
    plant_fault(at)
    findings = found(at.facts())
    assert (name, about) in findings
    follow = {"model-without-worker": {"worker-cordoned"}, "worker-epoch-stale": {"worker-lost"}}
    assert {each for each, _ in findings} <= {name} | follow.get(name, set())


def test_order_that_a_router_uses_or_may_not_have_read_yet_is_no_finding() -> None:
    at = Planted()
    at.fleet.append(CAPACITY, RouterCapacity(router="r2", positions={}))
    plant_routing(is_read=True)(at)
    assert found(at.facts()) == []
    at.fleet.append(REGISTRY, ORDER, -1000)
    assert found(at.facts()) == []


def test_each_kind_of_finding_can_be_planted() -> None:
    others = {"newer-record", "malformed-records"}
    assert {name for name, _, _ in FAULTS} | others == KINDS.keys()


def test_records_of_newer_and_unknown_forms_are_found() -> None:
    newer = Unread("the record at registry:0:7 requires …", "NewerRecord")
    assert found(replace(Planted().facts(), fleet=newer)) == [("newer-record", "the log")]
    facts = Planted().facts()
    assert isinstance(facts.fleet, FleetSample)
    facts = replace(facts, fleet=replace(facts.fleet, malformed=2))
    assert found(facts) == [("malformed-records", "the log")]


def test_check_without_its_reading_is_skipped_with_the_reason() -> None:
    findings = diagnose(Facts("a:9092", 1, SECRET, ["operator"], Unread("gone", "StreamError")))
    assert [each.name for each in findings if each.severity == "fault"] == ["broker-unreachable"]
    assert [each.name for each in findings if each.severity == "ok"] == []
    assert {each.check for each in findings} == {check.name for check in CHECKS}
    assert all(each.message for each in findings)


def test_findings_that_say_the_same_are_one() -> None:
    at = Planted()
    at.topic("results", exists=False)
    at.topic("ledger", exists=False)
    assert found(at.facts()) == [("topic-missing", "ledger, results")]


def test_safer_settings_of_topics_are_no_finding() -> None:
    at = Planted()
    at.topic(
        "ledger",
        differing_configs={
            REPLICATION: ("3", "2"), "retention.ms": ("-1", "86400000"),
            "min.insync.replicas": ("2", "1"),
        },
    )  # fmt: skip
    assert found(at.facts()) == []


def test_runs_with_cached_prompts_need_no_event() -> None:
    at = Planted()
    for number in range(9):
        at.run(number, 1, cached=100)
    sample = FleetSample(at.fleet.view, at.fleet.events, NOW_MS + 12_000, 60.0, at.ahead_ms)
    assert at.fleet.events.runs_without_events("w1", sample.now_ms) == 0


def test_events_of_prompts_count_for_runs_that_end_after_them() -> None:
    at = Planted()
    runs = [
        at.fleet.assign(f"job-{number}", at.epochs["w1"], 1, block_size=10) for number in range(8)
    ]
    at.blocks("w1", 100, first=1)
    for run in runs:
        at.fleet.append(LEDGER, Finished(**run, code="stop", output_tokens=1), 2000)
    assert at.fleet.events.runs_without_events("w1", NOW_MS + 12_000) == 0


def test_workers_are_compared_with_each_other_without_a_secret_here() -> None:
    at = Planted()
    at.over["fingerprint"] = Unread("KVLANE_HASH_SECRET is not set here")
    at.blocks("w2", secret="other", first=1)
    at.epochs["w3"] = at.fleet.register("w3")
    at.fleet.beat("w3", at.epochs["w3"])
    at.blocks("w3")
    findings = diagnose(at.facts())
    assert ("hash-secret-differs", "w2") in found(at.facts())
    assert "skipped" in {each.severity for each in findings if each.check == "secrets"}


def test_names_and_sections_stand_in_the_runbook() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert {kind.section for kind in KINDS.values()} <= anchors
    table = page.split("## A finding of `kvlane doctor`")[1].split("\n## ")[0]
    named = re.findall(
        r"`([a-z-]+)`", "\n".join(re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE))
    )
    assert named == list(KINDS)


def test_correction_of_an_error_replaces_the_usual_action() -> None:
    at = Planted()
    at.over["brokers"] = Unread("no Kafka", WRONG_PORT, "The port speaks HTTP.")
    (finding,) = [each for each in diagnose(at.facts()) if each.severity == "fault"]
    assert finding.action == "The port speaks HTTP."


def test_key_file_is_read_with_its_rights_and_valid_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    settings = Settings(api_keys_file=path)
    assert [file.problem for file in secret_files(settings)] == [f"{path}: no such file"]
    write_key_file(path, KeyFile().with_key(new_key("acme").entry))
    (file,) = secret_files(settings)
    assert (file.keys, file.mode, file.problem) == (1, 0o600, "")
    path.chmod(0o644)
    assert [file.mode for file in secret_files(settings)] == [0o644]


async def test_process_that_is_not_read_in_time_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_answer(*_: object) -> list[ProcessAnswer]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(fact_reader, "READ_S", 0.2)
    monkeypatch.setattr(fact_reader, "read_processes", no_answer)
    settings = Settings(bootstrap_servers="127.0.0.1:1")
    reader = fact_reader.FactReader(settings, SystemClock(), "-1m")
    facts = await reader.read(["operator"], ["http://127.0.0.1:2"])
    assert [finding.name for finding in check_processes(facts)] == ["process-unreachable"]
