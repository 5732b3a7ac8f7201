"""A whole deployment in one loop: brokers, processes and clients, under a seed.

Owns the lives and deaths of processes (`node.py`), and who leads which partition. What is done to
them is drawn in `chaos.py`, what clients ask in `asking.py` and `calling.py`, what must hold stands
in `invariants.py`. Killing is exact: a killed process stops between two steps of its tasks, and of
what it does only appends that had left it reach the broker afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any

from app.faults.history import History
from app.faults.node import Kind, Node
from app.faults.shape import MODELS, Shape
from app.faults.vtime import VirtualClock, VirtualLoop, process_context
from app.faults.weather import Weather
from streams.codecs import encode
from streams.memory.broker import MemoryBroker
from streams.memory.partition import MemoryRecord
from streams.ports import Appended, Entry, Partition
from streams.records import ModelCard
from streams.topics import ASSIGNMENTS, KV_EVENTS, PROMPTS, REGISTRY, REQUESTS

SESSION_TIMEOUT_S = 4.0
RESTART_S = 3.0
BROKERS = 3
DRIFT = 0.0002
"""How much faster or slower a broker's clock goes, at most."""


class RecordingBroker(MemoryBroker):
    """Writes every append into the history and says when one has landed."""

    history: History
    on_append: Callable[[str], None] | None = None
    """Called with the topic, in the process that appends, before it hears of it."""

    def append(self, topic: str, partition: int, entries: Sequence[Entry]) -> Appended:
        """Append and remember who did."""
        appended = super().append(topic, partition, entries)
        source = Partition(topic, partition)
        self.history.appended(appended.timestamp_ms, source, appended.offset, entries)
        if self.on_append is not None:
            self.on_append(topic)
        return appended


class World:
    """Everything of one seed. Lives inside its loop."""

    def __init__(self, seed: int, loop: VirtualLoop, shape: Shape) -> None:
        self.seed = seed
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.shape = shape
        self.settings = shape.settings
        self.rng = random.Random(f"{seed} world")
        self.calm = asyncio.Event()
        """Set when faults have stopped."""
        self.weather = Weather(random.Random(f"{seed} weather"), shape.climate)
        self.history = History(loop)
        ahead_ms = self.rng.randint(-5000, 5000)
        self.broker = RecordingBroker(
            VirtualClock(loop, ahead_ms),
            lanes=shape.lanes,
            partitions={ASSIGNMENTS: shape.slots, KV_EVENTS: shape.slots, PROMPTS: 2},
            faults=self.weather,
            session_timeout_s=SESSION_TIMEOUT_S,
        )
        self.broker.history = self.history
        half_ms = shape.skew_ms // 2
        self._clocks = [
            VirtualClock(
                loop,
                ahead_ms + self.rng.randint(-half_ms, half_ms),
                1 + self.rng.uniform(-DRIFT, DRIFT),
            )
            for _ in range(BROKERS)
        ]
        self._leaders: dict[Partition, int] = {}
        for topic, count in self.broker.partitions.items():
            for partition in range(count):
                self._lead(Partition(topic, partition), self.rng.randrange(BROKERS))
        self.nodes: list[Node] = []
        """All lives there were."""
        self.present: dict[str, Node] = {}
        """The newest life of each name."""
        self.failures: list[tuple[Node, BaseException]] = []
        self.truncated: dict[Partition, list[MemoryRecord]] = {}
        self.poisoned: dict[bytes, Partition] = {}
        self.on_told: Callable[[Node], None] | None = None
        """Called when a gateway has told its client something."""
        self._context = copy_context()
        self._lives: dict[str, int] = {}

    # --- processes -------------------------------------------------------------------------------

    def boot(self, kind: Kind, name: str) -> Node:
        """Start a process of this name; one that lives under it already becomes a stray."""
        life = self._lives[name] = self._lives.get(name, 0) + 1
        node = Node(self, kind, name, f"{name}#{life}")
        self.nodes.append(node)
        self.present[name] = node
        node.task.add_done_callback(lambda _: self._ended(node))
        self.history.happened(f"{node.label} starts")
        return node

    def populate(self) -> None:
        """Say which models there are, and start everybody."""
        for model in MODELS[: self.shape.models]:
            key = f"model/{model}"
            self.broker.append(REGISTRY, 0, [encode(ModelCard(name=model), key)])
        for kind, count in self.shape.population.items():
            for number in range(count):
                self.boot(kind, f"{kind}-{number}")

    def model_of(self, worker: str) -> str:
        """The model that a worker of this name serves."""
        return MODELS[int(worker.rpartition("-")[2]) % self.shape.models]

    def within(self, node: Node, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Let a process do something that it does not want to."""
        node.context.run(node.life.spawn, name, work)

    def living(self, kind: Kind | None = None) -> list[Node]:
        """All lives that run, strays too."""
        return [n for n in self.nodes if n.living and kind in (None, n.kind)]

    def kill(self, node: Node) -> None:
        """SIGKILL, between two steps of its tasks."""
        self.history.happened(f"{node.label} is killed")
        self.loop.hold(node.label)
        node.log.cut()
        node.state = "killed"
        node.gone.set()

    def pause(self, node: Node) -> None:
        """SIGSTOP."""
        self.history.happened(f"{node.label} is paused")
        self.loop.hold(node.label)
        node.log.stall()

    def resume(self, node: Node) -> None:
        """SIGCONT."""
        if node.living and self.loop.is_held(node.label):
            self.history.happened(f"{node.label} goes on")
            node.log.revive()
            self.loop.release(node.label)

    def terminate(self, node: Node) -> None:
        """SIGTERM."""
        self.history.happened(f"{node.label} is asked to stop")
        node.terminate()

    def later(self, after_s: float, do: Callable[..., None], *what: object) -> None:
        """Call something later, outside of all processes: also when one of them is running now."""
        self.loop.call_later(after_s, do, *what, context=self._context)

    def reboot_later(self, node: Node, after_s: float) -> None:
        """As an orchestrator does: start it again, if nobody else has meanwhile."""
        self.later(after_s, self._reboot, node)

    # --- the log ---------------------------------------------------------------------------------

    def depose(self, number: int) -> None:
        """A broker leads nothing any more: its partitions go to others, with their own clocks."""
        self.history.happened(f"broker {number} is deposed")
        for source, leader in self._leaders.items():
            if leader == number:
                self._lead(source, (number + self.rng.randrange(1, BROKERS)) % BROKERS)

    def _lead(self, source: Partition, number: int) -> None:
        self._leaders[source] = number
        self.broker.lead(*source, self._clocks[number])

    def truncate(self, source: Partition, before: int) -> None:
        """Delete the oldest records of a partition; the invariants still get to read them."""
        log = self.broker.log(*source)
        gone = [r for r in log.records if r.offset < before]
        self.truncated.setdefault(source, []).extend(gone)
        self.broker.delete_records(source.topic, source.partition, before)
        self.history.happened(f"{source.topic}[{source.partition}] is cut below {before}")

    def next_poison(self) -> str:
        """The key of the next poison."""
        return f"poison-{len(self.poisoned)}"

    def poison(self, source: Partition, kind: bytes, value: bytes = b"\xc1 no record") -> None:
        """Append bytes that are no record there, under the header of one."""
        key = self.next_poison().encode()
        self.poisoned[key] = source
        process_context("stranger").run(
            self.broker.append, *source, [Entry(key, value, (("t", kind),))]
        )

    def lane(self, topic: str, lane: int) -> list[MemoryRecord]:
        """Everything that was ever in a partition."""
        kept = self.broker.records(topic, lane)
        return [*self.truncated.get(Partition(topic, lane), ()), *kept]

    def committed(self, lane: int) -> int:
        """The routers' committed offset of a lane."""
        return self.broker.group(REQUESTS, "router").committed.get(lane, 0)

    def _reboot(self, node: Node) -> None:
        if self.present[node.name] is node and not node.living:
            self.boot(node.kind, node.name)

    def _ended(self, node: Node) -> None:
        if node.state != "ended":
            return
        error = node.life.failed
        self.history.happened(f"{node.label} has ended" + (f": {error!r}" if error else ""))
        if error is not None:
            self.failures.append((node, error))
        self.reboot_later(node, RESTART_S * self.rng.random())
