"""A whole deployment in one loop: brokers, processes and clients, under a seed.

Starts, pauses and kills processes (`simulated_process.py`), and assigns partition leaders. Faults
are drawn in `fault_schedule.py`, client requests in `kafka_clients.py` and `http_clients.py`;
`checks/invariants.py` checks the outcome. Killing is exact: a killed process stops between two
steps of its tasks, and only the appends that had already left it reach the broker afterwards.
"""

# ruff: noqa: SLF001 - observes the credit of preprocessors

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

from pydantic import SecretStr

from kvlane.app.preprocessor import Preprocessor
from kvlane.streams.codecs import encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.ports import Appended, Entry, Partition
from kvlane.streams.records import ModelCard
from kvlane.streams.topics import ASSIGNMENTS, BATCH, KV_EVENTS, PROMPTS, REGISTRY, REQUESTS
from workbench.testing.api_keys import SimulatedKeys
from workbench.testing.credit_recount import CreditRecount
from workbench.testing.event_history import EventHistory
from workbench.testing.network_faults import NetworkFaults
from workbench.testing.simulated_process import SimulatedProcess
from workbench.testing.simulation_engines import new_transfers
from workbench.testing.virtual_time import VirtualClock, VirtualLoop, process_context
from workbench.testing.world_parameters import (
    DEAD_REPLIES,
    MODELS,
    REPLY_TOPICS,
    ProcessKind,
    WorldParameters,
)

SESSION_TIMEOUT_S = 4.0
MEAN_RESTART_S = 3.0
BROKER_COUNT = 3
COORDINATOR = 0
"""The broker that coordinates all groups."""
HOUR_MS = 3_600_000
MAX_BROKER_CLOCK_DRIFT = 0.0002
"""Largest drift of a broker's clock."""


class RecordingBroker(MemoryBroker):
    """A broker in memory that records every append in the history and reports it."""

    history: EventHistory
    on_append: Callable[[str], None] | None = None
    """Called with the topic, in the appending process, before it gets the acknowledgement."""

    def append(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        """Append, and record which process did."""
        appended = super().append(topic, partition, entries)
        source = Partition(topic, partition)
        self.history.add_append(appended.timestamp_ms, source, appended.offset, entries)
        if self.on_append is not None:
            self.on_append(topic)
        return appended


class SimulatedWorld:
    """The deployment of one seed, inside its loop."""

    def __init__(self, seed: int, loop: VirtualLoop, shape: WorldParameters) -> None:
        self.seed = seed
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.transfers = new_transfers(self.clock, has_bootstrap=shape.has_bootstrap)
        self.parameters = shape
        self.settings = shape.settings
        self.keys: SimulatedKeys | None = None
        if shape.scenarios & {"keys", "limits"}:
            self.keys = SimulatedKeys(loop, has_limits="limits" in shape.scenarios)
            secret = SecretStr("the same for all gateways, and long enough")
            changes = {"api_keys_file": self.keys.path, "stream_secret": secret}
            self.settings = self.settings.model_copy(update=changes)
        self.rng = random.Random(f"{seed} world")
        self.faults_stopped = asyncio.Event()
        """Set when faults have stopped."""
        self.faults_stopped_ms = 0
        """The same in broker time."""
        self.collector_started_ms = 0
        """The last start of a collector, in broker time; it may be later than the faults."""
        self.network = NetworkFaults(random.Random(f"{seed} weather"), shape.network)
        self.history = EventHistory(loop)
        ahead_ms = self.rng.randint(-5000, 5000)
        self.broker = RecordingBroker(
            VirtualClock(loop, ahead_ms),
            lanes=shape.lanes,
            partitions={ASSIGNMENTS: shape.slots, KV_EVENTS: shape.slots, PROMPTS: 2, BATCH: 2},
            faults=self.network,
            session_timeout_s=SESSION_TIMEOUT_S,
        )
        self.broker.history = self.history
        self.network.leader_of = self.leader_of
        half_ms = shape.skew_ms // 2
        self._clocks = [
            VirtualClock(
                loop,
                ahead_ms + self.rng.randint(-half_ms, half_ms),
                1 + self.rng.uniform(-MAX_BROKER_CLOCK_DRIFT, MAX_BROKER_CLOCK_DRIFT),
            )
            for _ in range(BROKER_COUNT)
        ]
        if "replies" in shape.scenarios:
            for topic, partitions in REPLY_TOPICS.items():
                self.broker.create_topic(topic, partitions, retention_ms=HOUR_MS)
            self.network.dead_topics = frozenset({DEAD_REPLIES})
        self._leaders: dict[Partition, int] = {}
        for topic, count in self.broker.partitions.items():
            for partition in range(count):
                self._lead(Partition(topic, partition), self.rng.randrange(BROKER_COUNT))
        self.processes: list[SimulatedProcess] = []
        """All processes so far, ended ones included."""
        self.current: dict[str, SimulatedProcess] = {}
        """The newest process of each name."""
        self.absent: set[str] = set()
        """Names of processes that are away for long, and "broker"."""
        self.failures: list[tuple[SimulatedProcess, BaseException]] = []
        self.credit_recounts: list[CreditRecount] = []
        self.differing_cordons: list[str] = []
        """Violations that were seen while faults were injected (`checks/cordon_checks.py`)."""
        self.truncated: dict[Partition, list[MemoryRecord]] = {}
        self.malformed: dict[bytes, Partition] = {}
        self.on_response_event: Callable[[SimulatedProcess], None] | None = None
        """Called when a gateway has sent an event to its client."""
        self._context = copy_context()
        self._starts: dict[str, int] = {}

    # --- processes -------------------------------------------------------------------------------

    def start_process(self, kind: ProcessKind, name: str) -> SimulatedProcess:
        """Start a process of this name; one that already runs under it becomes a duplicate."""
        if "compaction" in self.parameters.scenarios:
            self.broker.compact_all(lag_ms=0)
        start = self._starts[name] = self._starts.get(name, 0) + 1
        node = SimulatedProcess(self, kind, name, f"{name}#{start}")
        self.processes.append(node)
        self.current[name] = node
        if isinstance(process := node.process, Preprocessor):
            records = partial(self.all_records, REQUESTS)
            self.credit_recounts += [
                CreditRecount(node.label, credit, node.clock.now, records)
                for credit in (process._credit, process._batch_credit)
            ]
        node.task.add_done_callback(lambda _: self._ended(node))
        self.history.add_event(f"{node.label} starts")
        if kind == "collector":
            self.collector_started_ms = self.broker.clock.wall_ms()
        return node

    def start_all(self) -> None:
        """Write the cards of the models, and start all processes."""
        for model in MODELS[: self.parameters.models]:
            key = f"model/{model}"
            self.broker.append(REGISTRY, 0, [encode(ModelCard(name=model), key)])
        for kind, count in self.parameters.process_counts.items():
            for number in range(count):
                self.start_process(kind, f"{kind}-{number}")

    def model_of(self, worker: str) -> str:
        """The model that a worker of this name serves."""
        return MODELS[int(worker.rpartition("-")[2]) % self.parameters.models]

    def run_in(self, node: SimulatedProcess, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task of a process."""
        node.context.run(node.ctx.spawn, name, work)

    def running(self, kind: ProcessKind | None = None) -> list[SimulatedProcess]:
        """All processes that exist, duplicates of a name included."""
        return [n for n in self.processes if n.exists and kind in (None, n.kind)]

    def kill(self, node: SimulatedProcess) -> None:
        """SIGKILL, between two steps of its tasks."""
        self.history.add_event(f"{node.label} is killed")
        self.loop.pause(node.label)
        node.kill()

    def pause(self, node: SimulatedProcess) -> None:
        self.history.add_event(f"{node.label} is paused")
        self.loop.pause(node.label)
        node.log.suspend()

    def resume(self, node: SimulatedProcess) -> None:
        if node.exists and self.loop.is_paused(node.label) and node.name not in self.absent:
            self.history.add_event(f"{node.label} is resumed")
            node.running_since_s = self.loop.time()
            node.log.resume()
            self.loop.resume(node.label)

    def terminate(self, node: SimulatedProcess) -> None:
        self.history.add_event(f"{node.label} is asked to stop")
        node.terminate()

    def cut_link(self, node: SimulatedProcess, number: int) -> None:
        """Let a process reach all brokers but one."""
        self.history.add_event(f"{node.label} is cut off from broker {number}")
        self.network.cut_links.add((node.label, number))
        if number == COORDINATOR:
            node.log.cut_off()

    def restore_link(self, node: SimulatedProcess, number: int) -> None:
        """Let a process reach a broker again."""
        self.history.add_event(f"{node.label} reaches broker {number} again")
        self.network.cut_links.discard((node.label, number))
        if number == COORDINATOR and node.exists:
            node.log.reconnect()

    def leader_of(self, topic: str, partition: int) -> int:
        """The number of the broker that leads a partition."""
        return self._leaders[Partition(topic, partition)]

    def call_later(self, after_s: float, do: Callable[..., None], *what: object) -> None:
        """Call a function later, outside of all processes, whichever is running now."""
        self.loop.call_later(after_s, do, *what, context=self._context)

    def restart_later(self, node: SimulatedProcess, after_s: float) -> None:
        """Restart a process as an orchestrator does, unless it was restarted meanwhile."""
        self.call_later(after_s, self._reboot, node)

    # --- the log ---------------------------------------------------------------------------------

    def move_leadership(self, number: int) -> None:
        """Move all partitions of a broker to other leaders, with their own clocks."""
        self.history.add_event(f"broker {number} loses its partitions")
        for source, leader in self._leaders.items():
            if leader == number:
                self._lead(source, (number + self.rng.randrange(1, BROKER_COUNT)) % BROKER_COUNT)

    def _lead(self, source: Partition, number: int) -> None:
        self._leaders[source] = number
        self.broker.set_leader_clock(*source, self._clocks[number])

    def truncate(self, source: Partition, before: int) -> None:
        """Delete the oldest records of a partition; kept aside for the invariants."""
        log = self.broker.log(*source)
        gone = [r for r in log.records if r.offset < before]
        self.truncated.setdefault(source, []).extend(gone)
        self.broker.delete_records(source.topic, source.partition, before)
        self.history.add_event(f"{source.topic}[{source.partition}] is cut below {before}")

    def next_malformed_key(self) -> str:
        """The key of the next malformed record."""
        return f"poison-{len(self.malformed)}"

    def append_malformed(
        self, source: Partition, kind: bytes, value: bytes = b"\xc1 no record"
    ) -> None:
        """Append malformed bytes with the type header of a record."""
        key = self.next_malformed_key().encode()
        self.malformed[key] = source
        process_context("stranger").run(
            self.broker.append, *source, [Entry(key, value, (("t", kind),))]
        )

    def all_records(self, topic: str, lane: int) -> list[MemoryRecord]:
        """All records of a partition, deleted ones included."""
        kept = self.broker.records(topic, lane)
        return [*self.truncated.get(Partition(topic, lane), ()), *kept]

    def committed(self, lane: int) -> int:
        """The committed offset of a lane: the lower one of routers and collectors."""
        groups = ("router", "collector") if self.parameters.collectors else ("router",)
        return min(self.broker.group(REQUESTS, name).committed.get(lane, 0) for name in groups)

    def _reboot(self, node: SimulatedProcess) -> None:
        is_due = node.name not in self.absent and not node.exists
        if is_due and self.current[node.name] is node:
            self.start_process(node.kind, node.name)

    def _ended(self, node: SimulatedProcess) -> None:
        if node.state != "ended":
            return
        error = node.ctx.error
        self.history.add_event(f"{node.label} has ended" + (f": {error!r}" if error else ""))
        if error is not None:
            self.failures.append((node, error))
        self.restart_later(node, MEAN_RESTART_S * self.rng.random())
