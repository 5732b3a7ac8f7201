"""What is done to a world, drawn from its seed: kills, pauses, false deaths, moves, cuts, outages.

Every deed is possible at any moment, also in the middle of another one's consequences; a process is
hit between any two of its steps. `rest` ends it: whoever is paused goes on, whoever is dead starts
again, and the network is quick.
"""

# ruff: noqa: SLF001 - a false accusation is made with the real tools

from __future__ import annotations

import random
from collections.abc import Callable

from app.faults.caching import Tearing
from app.faults.node import Kind, Node
from app.faults.shape import COMMITS
from app.faults.vtime import PROCESS
from app.faults.world import BROKERS, RESTART_S, World
from app.preprocess.byte_level import ASSISTANT
from app.router import Router
from app.worker import Worker
from streams.codecs import encode, pack_tokens
from streams.memory.faults import Operation
from streams.ports import Partition
from streams.records import Lost, Request
from streams.topics import (
    ASSIGNMENTS,
    KV_EVENTS,
    LEDGER,
    PROMPTS,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    lane_of,
)

EDGE: tuple[Kind, ...] = ("preprocessor", "gateway")
INTERRUPTED = 0.1
"""How often a gateway is struck when it has told its client a piece of an answer."""
TEMPERS = (0.0, 0.3, 1.0, 1.0, 5.0)


class Chaos:
    """The evil of one seed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = rng = random.Random(f"{world.seed} chaos")
        deeds: list[tuple[float, Callable[[], None]]] = [
            (2.0, self._kill_router),
            (2.0, self._kill_worker),
            (1.5, self._pause_router),
            (1.5, self._pause_worker),
            (0.5, self._terminate),
            (1.0, self._accuse),
            (1.0, self._evict),
            (0.4, self._usurp),
            (0.2, self._cut),
            (0.3, self._outage),
            (0.5, self._depose),
            (0.3, self._poison),
            (1.5, self._kill_edge),
            (0.7, self._pause_edge),
        ]
        world.broker.on_append = self._lie_in_wait
        world.on_told = self._interrupt
        world.weather.on_answer = self._lie_in_wait_for_commits
        self._tearing = Tearing(world)
        if world.shape.indexers:
            deeds += [(1.0, self._kill_indexer), (0.5, self._pause_indexer)]
        # Each seed has a temper: some deeds are left out, some come in swarms, so that rare ones
        # meet. Without it all seeds would be alike.
        self._deeds = [(weight * rng.choice(TEMPERS), deed) for weight, deed in deeds]
        self._every_s = rng.choice((0.3, 0.8, 0.8, 2.0))

    async def rage(self) -> None:
        """Do evil until the time for faults is over."""
        world, rng = self._world, self._rng
        weights = [weight + 1e-9 for weight, _ in self._deeds]
        while True:
            await world.clock.sleep(rng.expovariate(1 / self._every_s))
            if world.loop.time() >= world.shape.faults_s:
                return
            rng.choices(self._deeds, weights)[0][1]()

    def rest(self) -> None:
        """No more faults from here on."""
        world = self._world
        world.history.happened("faults stop")
        world.weather.clear()
        world.broker.available = True
        world.calm.set()
        world.broker.on_append = None
        world.on_told = None
        world.weather.on_answer = None
        for node in world.living():
            world.resume(node)

    def _lie_in_wait_for_commits(self, client: str, operation: Operation) -> None:
        """Strike whoever has committed: what was done then will never be done again."""
        if operation == "commit":
            self._strike(client, COMMITS)

    def _lie_in_wait(self, topic: str) -> None:
        """Strike a process whose record stands and that has not heard of it yet."""
        self._tearing.landed(topic)
        self._strike(PROCESS.get(), topic)

    def _strike(self, label: str, what: str) -> None:
        shape = self._world.shape
        if what in shape.ambushed and self._rng.random() < shape.ambush:
            node = next((n for n in self._world.living() if n.label == label), None)
            self._rng.choice((self._kill, self._pause, self._evict_of))(node)

    def _interrupt(self, gateway: Node) -> None:
        """Strike a gateway in the middle of an answer."""
        if self._rng.random() < INTERRUPTED:
            self._rng.choice((self._kill, self._pause))(gateway)

    def _victim(self, kind: Kind) -> Node | None:
        nodes = [n for n in self._world.living() if n.kind == kind]
        return self._rng.choice(nodes) if nodes else None

    def _kill_router(self) -> None:
        self._kill(self._victim("router"))

    def _kill_worker(self) -> None:
        self._kill(self._victim("worker"))

    def _kill(self, node: Node | None) -> None:
        if node is not None:
            self._world.kill(node)
            self._world.reboot_later(node, self._rng.expovariate(1 / RESTART_S))

    def _kill_edge(self) -> None:
        self._kill(self._victim(self._rng.choice(EDGE)))

    def _pause_edge(self) -> None:
        self._pause(self._victim(self._rng.choice(EDGE)))

    def _kill_indexer(self) -> None:
        self._kill(self._victim("indexer"))

    def _pause_indexer(self) -> None:
        self._pause(self._victim("indexer"))

    def _depose(self) -> None:
        self._world.depose(self._rng.randrange(BROKERS))

    def _pause_router(self) -> None:
        self._pause(self._victim("router"))

    def _pause_worker(self) -> None:
        self._pause(self._victim("worker"))

    def _pause(self, node: Node | None) -> None:
        if node is not None and not self._world.loop.is_held(node.label):
            self._world.pause(node)
            pause_s = self._rng.choice((0.3, 2.0, 6.0, 12.0)) * self._rng.random()
            self._world.later(pause_s, self._world.resume, node)

    def _terminate(self) -> None:
        if (node := self._victim(self._rng.choice(("router", "worker", *EDGE)))) is not None:
            self._world.terminate(node)

    def _accuse(self) -> None:
        """A router declares a worker lost that it only believes to be."""
        accuser, victim = self._victim("router"), self._victim("worker")
        if accuser is None or victim is None or accuser.state != "up":
            return
        assert isinstance(accuser.process, Router)
        assert isinstance(victim.process, Worker)
        epoch = victim.process.epoch
        if epoch is not None:
            self._world.history.happened(f"{accuser.label} accuses {victim.label}")
            declaring = accuser.process._deaths._declare(victim.name, epoch)
            self._world.within(accuser, "accusation", declaring)

    def _evict(self) -> None:
        self._evict_of(self._victim(self._rng.choice(("router", "router", "preprocessor"))))

    def _evict_of(self, node: Node | None) -> None:
        """The group's coordinator gives up a member that lives and does not know it."""
        for group in (
            self._world.broker.group(REQUESTS, "router"),
            self._world.broker.group(PROMPTS, "preprocessor"),
        ):
            for member in [m for m in group.members if node and m.startswith(f"{node.label}-")]:
                self._world.history.happened(f"the group gives up {member}")
                group.evict(member)

    def _usurp(self) -> None:
        """A worker is started under the name of one that runs."""
        if (node := self._victim("worker")) is not None:
            self._world.boot(node.kind, node.name)

    def _cut(self) -> None:
        """Retention takes records that somebody may still need."""
        world, rng = self._world, self._rng
        topic = rng.choice((RESPONSES, REQUESTS, KV_EVENTS))
        partition = rng.randrange(world.broker.partitions[topic])
        log = world.broker.log(topic, partition)
        # What is not taken in yet must not go: no design survives that.
        end = world.committed(partition) if topic == REQUESTS else log.end
        if end > log.start:
            world.truncate(Partition(topic, partition), rng.randint(log.start + 1, end))

    def _poison(self) -> None:
        """Somebody writes what nobody can read, or what does not belong there."""
        world, rng = self._world, self._rng
        topic = rng.choice((REQUESTS, LEDGER, RESPONSES, ASSIGNMENTS, KV_EVENTS, REGISTRY))
        kind = rng.choice((b"Request", b"Assigned", b"Chunk", b"Heartbeat", b"WorkerCard"))
        source = Partition(topic, rng.randrange(world.broker.partitions[topic]))
        if topic == REQUESTS and rng.random() < 0.3:
            self._misplace()
        elif topic == REQUESTS and rng.random() < 0.5:
            # A fold would stop at a type it does not know; intake has people look at it.
            value = encode(Lost(worker="worker-0", epoch=0), "-").value or b""
            world.poison(source, rng.choice((b"Future", b"Lost")), value)
        else:
            world.poison(source, kind)

    def _misplace(self) -> None:
        """A client of another partitioner: its request is in a lane where nobody looks for it."""
        world = self._world
        stray = world.next_poison()
        lanes = [n for n in range(world.shape.lanes) if n != lane_of(stray, world.shape.lanes)]
        if lanes:
            value = encode(Request(id=stray, token_ids=pack_tokens([ASSISTANT])), stray).value
            world.poison(Partition(REQUESTS, self._rng.choice(lanes)), b"Request", value or b"")

    def _outage(self) -> None:
        """The broker is away for a while."""
        world = self._world
        world.history.happened("the broker is down")
        world.broker.available = False
        world.later(3.0 * self._rng.random(), self._recover)

    def _recover(self) -> None:
        self._world.history.happened("the broker is back")
        self._world.broker.available = True
