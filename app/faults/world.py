"""A whole deployment in one loop: broker, routers, workers and clients, under a seed.

Owns the processes (real classes on connections to the log in memory), their lives and deaths. What
is done to them is drawn in `chaos.py`, what clients ask in `asking.py`, what must hold in
`invariants.py`. Killing is exact: a killed process stops between two steps of its tasks, and
nothing of it reaches the broker afterwards.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, Literal, NamedTuple

from app.engine.echo import EchoEngine
from app.engine.validator import ValidatedEngine
from app.faults.history import History
from app.faults.uneven import UnevenEngine
from app.faults.vtime import VirtualClock, VirtualLoop, process_context
from app.faults.weather import Climate, Weather
from app.lifetime import Lifetime
from app.router import Router
from app.settings import Settings
from app.worker import Worker
from streams.memory.broker import MemoryBroker, MemoryLog
from streams.memory.partition import MemoryRecord
from streams.ports import Appended, Entry, Partition
from streams.topics import ASSIGNMENTS, KV_EVENTS, LEDGER, PROMPTS, REGISTRY, REQUESTS, RESPONSES

Kind = Literal["router", "worker"]
State = Literal["starting", "up", "paused", "stopping", "killed", "ended"]


AMBUSHED = (LEDGER, RESPONSES, ASSIGNMENTS, REGISTRY)
"""Topics on which the order of appends matters."""

CLIMATES = (
    Climate(),
    Climate(slow=0.02, lag=0.0),
    Climate(lost=0.06, twice=0.06),
    Climate(lag=0.4, longest_s=2.5),
    Climate(slow=0.4, lag=0.1),
)


class Shape(NamedTuple):
    """How large a world is, and what is drawn once for all of it.

    The counts are small: two or three of everything find most. `ambush`: how often a process is
    struck when a record of its own has landed on one of the topics `ambushed`.
    """

    routers: int
    workers: int
    lanes: int
    slots: int
    requests: int
    cramped: bool
    faults_s: float
    cancels: float
    ambush: float
    ambushed: tuple[str, ...]
    climate: Climate

    @staticmethod
    def draw(rng: random.Random) -> Shape:
        """A shape from a seed; every fifth one is of take-overs."""
        shape = Shape(
            routers=rng.choice((1, 2, 2, 3)),
            workers=rng.choice((1, 2, 2, 3)),
            lanes=rng.choice((1, 2, 3)),
            slots=rng.choice((1, 2, 3)),
            requests=rng.randint(4, 16),
            cramped=rng.random() < 0.15,
            faults_s=rng.uniform(8.0, 25.0),
            cancels=rng.choice((0.05, 0.15, 0.5)),
            ambush=rng.choice((0.0, 0.02, 0.05)),
            ambushed=tuple(rng.sample(AMBUSHED, rng.randint(1, len(AMBUSHED)))),
            climate=rng.choice(CLIMATES),
        )
        return shape.of_take_overs() if rng.random() < 0.2 else shape

    def of_take_overs(self) -> Shape:
        """The same, but lanes change hands in the middle of everything, and readers lag behind."""
        return self._replace(
            routers=max(self.routers, 2),
            workers=max(self.workers, 2),
            ambush=0.2,
            ambushed=(LEDGER, ASSIGNMENTS),
            climate=Climate(slow=0.1, lag=0.6, longest_s=4.0),
        )


SEQUENCES = 3
ROOMY = Settings.model_construct(
    max_attempts=4,
    worker_timeout_s=3.0,
    heartbeat_s=1.0,
    max_num_seqs=SEQUENCES,
    worker_queue=1,
    drain_grace_s=3.0,
    model="echo",
)
CRAMPED = ROOMY.model_copy(update={"held_requests": 1, "worker_queue": 0})
SESSION_TIMEOUT_S = 4.0
RESTART_S = 3.0
STEP_S = 0.2


class Node:
    """One life of a process. `label` is unique, `name` is what it calls itself."""

    def __init__(self, world: World, kind: Kind, name: str, label: str) -> None:
        rng = random.Random(f"{world.seed} {label}")
        self.kind = kind
        self.name = name
        self.label = label
        self.state: State = "starting"
        self.clock = VirtualClock(world.loop, ahead_ms=rng.randint(-2000, 2000))
        self.log: MemoryLog = world.broker.connect(label)
        self.life = Lifetime(label, self.clock, rng)
        self.process: Router | Worker
        self.engine: UnevenEngine | None = None
        if kind == "router":
            self.process = Router(self.log, world.settings, self.life, name)
        else:
            echo = EchoEngine(self.clock, STEP_S, max_num_seqs=SEQUENCES)
            self.engine = UnevenEngine(echo, self.clock, rng, world.calm)
            engine = ValidatedEngine(self.engine)
            self.process = Worker(self.log, world.settings, self.life, engine, worker_id=name)
        self.context = process_context(label)
        self._stop = asyncio.Event()
        self.task = world.loop.create_task(self._live(), name=f"{label}/main", context=self.context)

    @property
    def living(self) -> bool:
        """Whether it runs, or would if it were not paused."""
        return self.state in ("starting", "up", "paused", "stopping")

    def terminate(self) -> None:
        """SIGTERM."""
        self._stop.set()

    async def _live(self) -> None:
        """As `app/lifetime.py` runs a process."""
        ending = [
            asyncio.ensure_future(self.life.failure()),
            asyncio.ensure_future(self._stop.wait()),
        ]
        try:
            await self.log.start()
            starting = asyncio.ensure_future(self.process.start())
            await asyncio.wait([starting, *ending], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
            else:
                starting.result()
                self.state = "up"
                await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
                self.state = "stopping"
                if self.life.failed is None:
                    await self.process.stop()
        except Exception as e:  # noqa: BLE001 - it is judged by the invariants
            self.life.fail(e)
        finally:
            for task in ending:
                task.cancel()
            await self.life.end()
            await self.log.close()
            self.state = "ended"


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
        self.settings = CRAMPED if shape.cramped else ROOMY
        self.rng = random.Random(f"{seed} world")
        self.calm = asyncio.Event()
        """Set when faults have stopped."""
        self.weather = Weather(random.Random(f"{seed} weather"), shape.climate)
        self.history = History(loop)
        self.broker = RecordingBroker(
            VirtualClock(loop, ahead_ms=self.rng.randint(-5000, 5000)),
            lanes=shape.lanes,
            partitions={ASSIGNMENTS: shape.slots, KV_EVENTS: shape.slots, PROMPTS: 1},
            faults=self.weather,
            session_timeout_s=SESSION_TIMEOUT_S,
        )
        self.broker.history = self.history
        self.nodes: list[Node] = []
        """All lives there were."""
        self.present: dict[str, Node] = {}
        """The newest life of each name."""
        self.failures: list[tuple[str, BaseException]] = []
        self.truncated: dict[Partition, list[MemoryRecord]] = {}
        self.poisoned: dict[bytes, Partition] = {}
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

    def truncate(self, source: Partition, before: int) -> None:
        """Delete the oldest records of a partition; the invariants still get to read them."""
        log = self.broker.log(*source)
        gone = [r for r in log.records if r.offset < before]
        self.truncated.setdefault(source, []).extend(gone)
        self.broker.delete_records(source.topic, source.partition, before)
        self.history.happened(f"{source.topic}[{source.partition}] is cut below {before}")

    def poison(self, source: Partition, kind: bytes) -> None:
        """Append bytes that are no record, under the header of one."""
        key = b"poison-%d" % len(self.poisoned)
        self.poisoned[key] = source
        self.broker.append(*source, [Entry(key, b"\xc1 no record", (("t", kind),))])

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
            self.failures.append((node.label, error))
        self.reboot_later(node, RESTART_S * self.rng.random())
