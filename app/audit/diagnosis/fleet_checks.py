"""Checks of workers, caches, routers, queues, processes and files: facts in, findings out. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvlane.app.audit.diagnosis.facts import (
    Facts,
    FleetSample,
    ProcessAnswer,
    Unread,
    UnreadRecords,
)
from kvlane.app.audit.diagnosis.findings import Finding, finding
from kvlane.app.audit.drift import MAX_ERROR_BLOCKS
from kvlane.app.audit.fleet.fleet_status import state_words
from kvlane.app.audit.fleet.model_rows import model_rows
from kvlane.app.audit.fleet.queue_rows import lane_rows
from kvlane.app.audit.fleet.request_rows import open_requests_of
from kvlane.app.audit.fleet.routing_rows import routing_rows
from kvlane.app.audit.fleet.worker_rows import worker_rows
from kvlane.app.routing.state.fleet import FleetMember
from kvlane.streams.records import WorkerCard
from kvlane.streams.topics import BATCH, DEAD_LETTERS, REQUESTS

SETTLED_MS = 10_000
"""Age from which on a heartbeat of a replaced epoch is no straggler, and a run without an event
lacks it."""
RUNS_WITHOUT_EVENTS = 5
"""Runs without an event by which events are missing: the prompt of one may have been cached between
its decision and its prefill."""
SLOW_S = 1.0
"""Answer of a probe that is slow: orchestrators give it a second."""
MAX_CLOCK_MS = 5_000
_UNUSED = {
    "unread": "has not read the order about routing", "unusable": "cannot use it",
    "unreported": "does not report how it routes, as earlier versions, which ignore the order",
}  # fmt: skip
_NO_ADDRESS = "no address was given: --url http://HOST:PORT for each gateway"
_OTHERS_WRITE, _ALL_READ = 0o022, 0o004


def check_workers(facts: Facts) -> Iterator[Finding]:
    sample = _sample(facts)
    for row in worker_rows(sample.view, sample.now_ms, sample.timeout_s):
        name = {"silent": "worker-silent", "lost": "worker-lost", "unhealthy": "worker-unhealthy"}
        if row.state in name:
            yield finding("workers", name[row.state], row.id, state_words(row))
        if row.order and row.state != "lost":
            yield finding("workers", "worker-cordoned", row.id, f"is {row.order} by an order")


def check_epochs(facts: Facts) -> Iterator[Finding]:
    """Heartbeats of an epoch that has ended: two processes under one id, or one that does not know
    that it was declared lost."""
    sample = _sample(facts)
    for worker, heard in sorted(sample.events.heard_ms.items()):
        member, lost = sample.view.fleet.members.get(worker), sample.view.lost.get(worker)
        for epoch, at_ms in heard.items():
            ended_ms = None
            if member is not None and epoch < member.epoch:
                ended_ms = member.since_ms
            elif lost is not None and epoch <= lost.epoch:
                ended_ms = lost.at_ms
            if ended_ms is not None and at_ms > ended_ms + SETTLED_MS:
                yield finding(
                    "epochs", "worker-epoch-stale", worker,
                    f"sends heartbeats of epoch {epoch}, which ended "
                    f"{(sample.now_ms - ended_ms) / 1000:.0f} s ago",
                )  # fmt: skip


def check_models(facts: Facts) -> Iterator[Finding]:
    sample = _sample(facts)
    open_requests = open_requests_of(sample.view, sample.now_ms)
    workers = worker_rows(sample.view, sample.now_ms, sample.timeout_s)
    for row in model_rows(sample.view, workers, open_requests):
        if not row.ready and (row.workers or row.open):
            yield finding(
                "models", "model-without-worker", row.name,
                f"has no ready worker, and {row.open} open requests",
            )  # fmt: skip


_SAME: dict[str, Callable[[WorkerCard], Any]] = {
    "block size": lambda card: card.config.kv_cache_block_size,
    "context length": lambda card: card.config.context_length,
}
"""Properties in which workers of one model agree."""


def check_agreement(facts: Facts) -> Iterator[Finding]:
    """Settings that workers of one model share, and the versions of their packages."""
    sample = _sample(facts)
    members = [member for _, member in sample.view.fleet.live_members()]
    for model, of_model in _by(members, lambda member: member.card.model).items():
        for what, value_of in _SAME.items():
            values = {member.card.id: value_of(member.card) for member in of_model}
            yield from _minority("agreement", "workers-differ", what, f"model {model}", values)
        packages = {name for member in of_model for name in member.card.versions}
        for name in sorted(packages):
            versions = {
                member.card.id: member.card.versions[name]
                for member in of_model
                if name in member.card.versions
            }
            yield from _minority("agreement", "versions-differ", name, f"model {model}", versions)


def _by(members: Iterable[FleetMember], key: Callable[[FleetMember], str]) -> dict[str, list[Any]]:
    found: dict[str, list[FleetMember]] = defaultdict(list)
    for member in members:
        found[key(member)].append(member)
    return found


def _minority(
    check: str, name: str, what: str, where: str, values: dict[str, Any]
) -> Iterator[Finding]:
    """A finding for each object whose value is not the most frequent one."""
    if len(set(values.values())) < 2:
        return
    most = Counter(values.values()).most_common(1)[0][0]
    for worker, value in sorted(values.items()):
        if value != most:
            words = f"{where}: {what} is {value}, that of most others is {most}"
            yield finding(check, name, worker, words)


def check_secrets(facts: Facts) -> Iterator[Finding]:
    """The fingerprints of hash secrets, which workers publish with their cache events."""
    sample = _sample(facts)
    live, published = dict(sample.view.fleet.live_members()), sample.events.fingerprints
    found = {worker: fingerprint for worker, fingerprint in published.items() if worker in live}
    if not found:
        yield Finding(
            "skipped", "secrets", "secrets",
            message="no worker has published cache events since --since",
        )  # fmt: skip
        return
    own, usual = facts.fingerprint, Counter(found.values()).most_common(1)[0][0]
    should = usual if isinstance(own, Unread) else own
    for worker, fingerprint in sorted(found.items()):
        if fingerprint != should:
            whose = "most workers'" if isinstance(own, Unread) else "that of the settings here"
            yield finding(
                "secrets", "hash-secret-differs", worker,
                f"its hash secret (fingerprint {fingerprint or 'none'}) is not {whose} ({should})",
            )  # fmt: skip
    if isinstance(own, Unread):
        message = f"workers were compared with each other alone: {own.reason}"
        yield Finding("skipped", "secrets", "secrets", message=message)


def check_events(facts: Facts) -> Iterator[Finding]:
    sample = _sample(facts)
    for worker, member in sorted(sample.view.fleet.live_members()):
        if member.card.config.guesses_cache:
            continue
        runs = sample.events.runs_without_events(worker, sample.now_ms - SETTLED_MS)
        if runs >= RUNS_WITHOUT_EVENTS:
            yield finding(
                "events", "cache-events-missing", worker,
                f"has computed the blocks of {runs} prompts and published no cache event since",
            )  # fmt: skip
    for holder, stream in sorted(sample.events.streams.items()):
        if stream.missing:
            yield finding(
                "events", "cache-events-lost", f"{holder.worker}/{holder.rank}",
                f"{stream.missing} cache events of its epoch {stream.epoch} are not in the log",
            )  # fmt: skip


def check_drift(facts: Facts) -> Iterator[Finding]:
    """Index against engines: cached tokens that routers expected, and that the engines found."""
    sample = _sample(facts)
    for worker in sample.view.drift.workers_with_runs(sample.now_ms):
        drift = sample.view.drift.summary_of([worker], sample.now_ms)
        if drift.is_within_limit is False:
            yield finding(
                "index", "cache-drift", worker,
                f"95 % of {drift.runs} runs found up to {drift.blocks:.1f} blocks more or fewer "
                f"in its cache than expected; {MAX_ERROR_BLOCKS:g} is normal",
            )  # fmt: skip


def check_routers(facts: Facts) -> Iterator[Finding]:
    sample = _sample(facts)
    lanes = lane_rows(sample.view, sample.now_ms, ())
    unowned = [row.lane for row in lanes if not row.router]
    if len(unowned) == len(lanes):
        yield finding("routers", "no-router", "routers", "none has reported for 5 s")
        return
    for lane in unowned:
        yield finding(
            "routers", "lane-without-router", f"lane {lane}", "no router reports that it owns it"
        )


def check_routing(facts: Facts) -> Iterator[Finding]:
    """Routers that do not route by the order, or by other settings than most."""
    sample = _sample(facts)
    placed = sample.view.fleet.routing
    rows = routing_rows(placed, sample.view.reports.reports(sample.now_ms).routing)
    if placed is not None and sample.now_ms - placed.at_ms > SETTLED_MS:
        for row in rows:
            if row.routing_of in _UNUSED:
                words = row.problem or _UNUSED[row.routing_of]
                yield finding("routing", "routing-order-unused", row.router, words)
    settings = {row.router: row.settings for row in rows if row.settings is not None}
    for name in sorted({name for each in settings.values() for name in each}):
        values = {router: str(each.get(name)) for router, each in settings.items()}
        yield from _minority("routing", "routing-differs", name, "routing", values)


def check_backlog(facts: Facts) -> Iterator[Finding]:
    backlog = facts.backlog
    assert isinstance(backlog, UnreadRecords)
    for row in backlog.topics:
        if row.late and row.name != BATCH:  # its prompts wait for capacity
            reader = "routers" if row.name == REQUESTS else "preprocessors"
            yield finding(
                "backlog", "records-unread", row.name,
                f"{row.late} records have waited for {reader} for more than a minute",
                f"Start more {reader}, or those that are missing.",
            )  # fmt: skip


def check_results(facts: Facts) -> Iterator[Finding]:
    backlog = facts.backlog
    assert isinstance(backlog, UnreadRecords)
    if backlog.uncollected is None:
        message = "no collector has committed a position; prompts on Kafka need one"
        yield Finding("skipped", "results", "results", message=message)
    elif backlog.uncollected:
        yield finding(
            "results", "records-unread", "results",
            f"{backlog.uncollected} requests that are over wait for collectors",
            "Start more collectors, or those that are missing.",
        )  # fmt: skip


def check_dead_letters(facts: Facts) -> Iterator[Finding]:
    backlog = facts.backlog
    assert isinstance(backlog, UnreadRecords)
    if backlog.dead_letters:
        message = f"{backlog.dead_letters} records could not be processed since --since"
        yield finding("dead letters", "dead-letters", DEAD_LETTERS, message)


def check_processes(facts: Facts) -> Iterator[Finding]:
    if not facts.processes:
        yield Finding("skipped", "processes", "processes", message=_NO_ADDRESS)
    for process in facts.processes:
        yield from _process_findings(process)


def _process_findings(process: ProcessAnswer) -> Iterator[Finding]:
    url = process.url
    if not process.live:
        words = process.unmeasured or "no answer"
        yield finding("processes", "process-unreachable", url, words)
        return
    if process.live != 200:
        yield finding("processes", "process-dead", url, f"/livez answers {process.live}")
    if process.ready != 200:
        checks = ", ".join(process.not_ready) or "no check is named"
        message = f"/readyz answers {process.ready or 'nothing'}: {checks}"
        yield finding("processes", "process-not-ready", url, message)
    if process.slowest_s > SLOW_S:
        message = f"a probe took {process.slowest_s:.1f} s"
        yield finding("processes", "process-slow", url, message)
    if process.ahead_ms is not None and abs(process.ahead_ms) > MAX_CLOCK_MS:
        way = "ahead of" if process.ahead_ms > 0 else "behind"
        message = f"its clock is {abs(process.ahead_ms) / 1000:.0f} s {way} that of this machine"
        yield finding("processes", "process-clock", url, message)


def check_counters(facts: Facts) -> Iterator[Finding]:
    """Counters that must stay 0, of the processes whose metrics could be read."""
    for process in facts.processes:
        for name, count in (process.counts or {}).items():
            if count:
                yield finding("metrics", "counter-rises", process.url, f"{name} is {count:.0f}")
    yield from _unmeasured(facts, "metrics", [p for p in facts.processes if p.counts is None])


def check_views(facts: Facts) -> Iterator[Finding]:
    """The hashes of views at equal offsets, of processes that publish them."""
    hashes: dict[tuple[str, str, str, int], dict[str, float]] = defaultdict(dict)
    for process in facts.processes:
        for place, value in process.hashes.items():
            hashes[place][process.url] = value
    pairs = {place: values for place, values in hashes.items() if len(values) > 1}
    if not pairs:
        yield Finding(
            "skipped", "views", "views",
            message="needs --url of two routers or indexers, read at an equal offset",
        )  # fmt: skip
    for (view, topic, partition, offset), values in sorted(pairs.items()):
        if len(set(values.values())) > 1:
            yield finding(
                "views", "views-differ", ", ".join(sorted(values)),
                f"have different states of {view} from {topic}[{partition}] at offset {offset}",
            )  # fmt: skip


def _unmeasured(facts: Facts, check: str, processes: list[ProcessAnswer]) -> Iterator[Finding]:
    for process in processes:
        if process.live:
            yield Finding("skipped", check, check, process.url, process.unmeasured)
    if not facts.processes:
        yield Finding("skipped", check, check, message=_NO_ADDRESS)


def check_files(facts: Facts) -> Iterator[Finding]:
    if not facts.files:
        message = "the settings here name no file with a secret"
        yield Finding("skipped", "files", "files", message=message)
    for file in facts.files:
        if file.problem:
            yield finding("files", "key-file", file.path, file.problem)
            continue
        if file.keys == 0:
            message = "all keys are expired or disabled, so gateways refuse every request"
            yield finding("files", "no-valid-key", file.path, message)
        mode = f"({file.mode:03o}, {file.setting})"
        if file.mode & _OTHERS_WRITE:
            message = f"others than its owner may write it {mode}"
            yield finding("files", "file-writable", file.path, message)
        elif file.mode & _ALL_READ:
            yield finding("files", "file-readable", file.path, f"all users may read it {mode}")


def _sample(facts: Facts) -> FleetSample:
    assert isinstance(facts.fleet, FleetSample)
    return facts.fleet
