"""Fault injection from a seed: kills, pauses, false suspicions, lane moves, truncation, outages.

Every fault is possible at any moment, also during the recovery from another one, and hits a process
between any two of its steps. `stop` ends it: paused processes resume, killed ones restart, and the
network is fast and reliable.
"""

# ruff: noqa: SLF001 - a false suspicion is declared with the product's own code

from __future__ import annotations

import random
from collections.abc import Callable

from kvlane.app.router import Router
from kvlane.app.text.byte_level import ASSISTANT
from kvlane.app.worker import Worker
from kvlane.streams.codecs import encode, pack_tokens
from kvlane.streams.memory.memory_broker import Operation
from kvlane.streams.ports import Partition
from kvlane.streams.records import Cordon, Lost, Tombstone
from kvlane.streams.request import Request
from kvlane.streams.topics import (
    ASSIGNMENTS,
    BATCH,
    KV_EVENTS,
    LEDGER,
    PROMPTS,
    REGISTRY,
    REQUESTS,
    RESPONSES,
    lane_of,
)
from workbench.testing.api_keys import TENANTS
from workbench.testing.cache_scenarios import SnapshotFaults
from workbench.testing.checks.cordon_checks import cordons_of, differing_cordons
from workbench.testing.simulated_process import SimulatedProcess
from workbench.testing.simulated_world import (
    BROKER_COUNT,
    MEAN_RESTART_S,
    SESSION_TIMEOUT_S,
    SimulatedWorld,
)
from workbench.testing.virtual_time import PROCESS, process_context
from workbench.testing.world_parameters import COMMITS, Absence, ProcessKind

EDGE_KINDS: tuple[ProcessKind, ...] = ("preprocessor", "gateway")
RESPONSE_FAULT_SHARE = 0.1
"""Probability of a fault in a gateway right after it has sent an event to its client."""
EVACUATION_SHARE = 0.05
"""Probability of the evacuation of a worker right after a piece of an answer from it."""
MAX_PREPROCESSORS = 3
WEIGHT_FACTORS = (0.0, 0.3, 1.0, 1.0, 5.0)


class SimulationFaults:
    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._rng = rng = random.Random(f"{world.seed} chaos")
        faults: list[tuple[float, Callable[[], None]]] = [
            (2.0, self._kill_router),
            (2.0, self._kill_worker),
            (1.5, self._pause_router),
            (1.5, self._pause_worker),
            (0.5, self._terminate),
            (1.0, self._declare_lost),
            (1.0, self._evict),
            (0.4, self._reuse_worker_id),
            (0.2, self._cut),
            (0.3, self._outage),
            (0.5, self._depose),
            (0.3, self._poison),
            (1.5, self._kill_edge),
            (0.7, self._pause_edge),
        ]
        world.broker.on_append = self._hit_after_append
        world.on_response_event = self._interrupt
        world.network.on_answer = self._hit_after_commit
        self._tearing = SnapshotFaults(world)
        if world.parameters.indexers:
            faults += [(1.0, self._kill_indexer), (0.5, self._pause_indexer)]
        if world.parameters.collectors:
            faults += [
                (2.0, self._kill_collector),
                (1.0, self._pause_collector),
                (1.0, self._evict_collector),
            ]
        if world.parameters.peak_s is not None:
            faults += [
                (3.0, self._kill_preprocessor),
                (3.0, self._stop_preprocessor),
                (2.0, self._add_preprocessor),
                (1.0, self._evict_preprocessor),
            ]
        if "clock skew" in world.parameters.scenarios:
            faults += [(2.0, self._depose)]
        if "cut links" in world.parameters.scenarios:
            faults += [(3.0, self._cut_link)]
        self._has_orders = "cordons" in world.parameters.scenarios
        if self._has_orders:
            faults += [(2.0, self._order_about_worker)]
        if world.keys is not None:
            faults += [(3.0, self._rotate_key)]
        self._cut_links: list[tuple[SimulatedProcess, int]] = []
        # Each seed weights the faults in its own way: some are left out, some come in swarms, so
        # that rare ones meet. With equal weights all seeds would be alike.
        self._faults = [(weight * rng.choice(WEIGHT_FACTORS), fault) for weight, fault in faults]
        self._every_s = rng.choice((0.3, 0.8, 0.8, 2.0))

    async def run(self) -> None:
        """Inject faults until the time for faults is over."""
        world, rng = self._world, self._rng
        if (absence := world.parameters.absence) is not None:
            world.call_later(absence.begins_s, self._begin_absence, absence)
            world.call_later(absence.ends_s, self._end_absence)
        weights = [weight + 1e-9 for weight, _ in self._faults]
        while True:
            await world.clock.sleep(rng.expovariate(1 / self._every_s))
            if world.loop.time() >= world.parameters.faults_s:
                break
            rng.choices(self._faults, weights)[0][1]()
        if (absence := world.parameters.absence) is not None:
            await world.clock.sleep(absence.ends_s + 1.0 - world.clock.now())

    def stop(self) -> None:
        """Stop all faults and resume paused processes."""
        world = self._world
        world.history.add_event("faults stop")
        self._has_orders = False
        for worker in cordons_of(world):
            self._order(worker, _end_of_order(worker))
        world.network.clear()
        world.broker.available = True
        world.faults_stopped.set()
        world.faults_stopped_ms = world.broker.now_ms()
        world.broker.on_append = None
        world.on_response_event = None
        world.network.on_answer = None
        for cut in list(self._cut_links):
            self._restore_link(cut)
        for node in world.running():
            world.resume(node)

    def _hit_after_commit(self, client: str, operation: Operation) -> None:
        """Maybe hit a process that has committed: work before that offset is not repeated."""
        if operation == "commit":
            self._strike(client, COMMITS)

    def _hit_after_append(self, topic: str) -> None:
        """Maybe hit a process whose record is appended but not yet acknowledged."""
        self._tearing.on_append(topic)
        name = PROCESS.get().partition("#")[0]
        answers = self._has_orders and topic == RESPONSES and name.startswith("worker-")
        if answers and self._rng.random() < EVACUATION_SHARE:
            self._world.call_later(0.0, self._evacuate, name)
        self._strike(PROCESS.get(), topic)

    def _strike(self, label: str, what: str) -> None:
        shape = self._world.parameters
        if what in shape.trigger_topics and self._rng.random() < shape.trigger_share:
            node = next((n for n in self._world.running() if n.label == label), None)
            self._rng.choice((self._kill, self._pause, self._evict_of))(node)

    def _interrupt(self, gateway: SimulatedProcess) -> None:
        """Maybe hit a gateway in the middle of a response."""
        if self._rng.random() < RESPONSE_FAULT_SHARE:
            self._rng.choice((self._kill, self._pause))(gateway)

    def _rotate_key(self) -> None:
        assert self._world.keys is not None
        tenant = self._rng.choice(TENANTS)
        self._world.history.add_event(f"the key of {tenant} is revoked and replaced")
        self._world.keys.rotate(tenant)

    def _order_about_worker(self) -> None:
        """An operator cordons or uncordons a worker."""
        worker = f"worker-{self._rng.randrange(self._world.parameters.workers)}"
        is_closed = self._rng.random() < 0.5
        self._order(worker, Cordon(worker=worker) if is_closed else _end_of_order(worker))

    def _evacuate(self, worker: str) -> None:
        """An operator evacuates a worker that answers, and lets the others serve."""
        for other in cordons_of(self._world):
            self._order(other, _end_of_order(other))
        self._order(worker, Cordon(worker=worker, evacuates=True))

    def _order(self, worker: str, record: Cordon | Tombstone) -> None:
        self._world.differing_cordons += differing_cordons(self._world)
        entry = encode(record, f"cordon/{worker}")
        process_context("operator").run(self._world.broker.append, REGISTRY, 0, [entry])

    def _begin_absence(self, absence: Absence) -> None:
        """A part is away; no other fault brings it back."""
        world = self._world
        world.history.add_event(f"absence of {absence.part} begins")
        if absence.part == "broker":
            world.absent.add(absence.part)
            world.broker.available = False
            return
        nodes = world.running(absence.part)
        if absence.is_of_one:
            nodes = nodes[:1]
        world.absent |= {node.name for node in nodes}
        for node in nodes:
            (world.pause if absence.is_paused else world.kill)(node)

    def _end_absence(self) -> None:
        world = self._world
        world.history.add_event("absence ends")
        names = world.absent
        world.absent = set()
        if "broker" in names:
            self._recover()
        for node in [world.current[name] for name in names - {"broker"}]:
            world.resume(node)
            world.restart_later(node, 0.0)

    def _victim(self, kind: ProcessKind) -> SimulatedProcess | None:
        nodes = [n for n in self._world.running() if n.kind == kind]
        return self._rng.choice(nodes) if nodes else None

    def _kill_router(self) -> None:
        self._kill(self._victim("router"))

    def _kill_worker(self) -> None:
        self._kill(self._victim("worker"))

    def _kill(self, node: SimulatedProcess | None) -> None:
        if node is not None:
            self._world.kill(node)
            self._world.restart_later(node, self._rng.expovariate(1 / MEAN_RESTART_S))

    def _kill_edge(self) -> None:
        self._kill(self._victim(self._rng.choice(EDGE_KINDS)))

    def _pause_edge(self) -> None:
        self._pause(self._victim(self._rng.choice(EDGE_KINDS)))

    def _kill_indexer(self) -> None:
        self._kill(self._victim("indexer"))

    def _pause_indexer(self) -> None:
        self._pause(self._victim("indexer"))

    def _kill_collector(self) -> None:
        self._kill(self._victim("collector"))

    def _pause_collector(self) -> None:
        self._pause(self._victim("collector"))

    def _evict_collector(self) -> None:
        self._evict_of(self._victim("collector"))

    def _cut_link(self) -> None:
        """A process does not reach one broker, for longer than a session or for less."""
        world, rng = self._world, self._rng
        if not (running := world.running()):
            return
        cut = (rng.choice(running), rng.randrange(BROKER_COUNT))
        if cut not in self._cut_links:
            self._cut_links.append(cut)
            world.cut_link(*cut)
            world.call_later(4 * SESSION_TIMEOUT_S * rng.random(), self._restore_link, cut)

    def _restore_link(self, cut: tuple[SimulatedProcess, int]) -> None:
        if cut in self._cut_links:
            self._cut_links.remove(cut)
            self._world.restore_link(*cut)

    def _kill_preprocessor(self) -> None:
        self._kill(self._victim("preprocessor"))

    def _evict_preprocessor(self) -> None:
        self._evict_of(self._victim("preprocessor"))

    def _stop_preprocessor(self) -> None:
        """Stop one in order, as an upgrade does; it starts again."""
        if (node := self._victim("preprocessor")) is not None:
            self._world.terminate(node)

    def _add_preprocessor(self) -> None:
        """One more, as a scale-up does."""
        names = [name for name in self._world.current if name.startswith("preprocessor-")]
        if len(names) < MAX_PREPROCESSORS:
            self._world.start_process("preprocessor", f"preprocessor-{len(names)}")

    def _depose(self) -> None:
        self._world.move_leadership(self._rng.randrange(BROKER_COUNT))

    def _pause_router(self) -> None:
        self._pause(self._victim("router"))

    def _pause_worker(self) -> None:
        self._pause(self._victim("worker"))

    def _pause(self, node: SimulatedProcess | None) -> None:
        if node is not None and not self._world.loop.is_paused(node.label):
            self._world.pause(node)
            pause_s = self._rng.choice((0.3, 2.0, 6.0, 12.0)) * self._rng.random()
            self._world.call_later(pause_s, self._world.resume, node)

    def _terminate(self) -> None:
        if (node := self._victim(self._rng.choice(("router", "worker", *EDGE_KINDS)))) is not None:
            self._world.terminate(node)

    def _declare_lost(self) -> None:
        """A router declares a live worker lost."""
        router, victim = self._victim("router"), self._victim("worker")
        if router is None or victim is None or router.state != "up":
            return
        assert isinstance(router.process, Router)
        assert isinstance(victim.process, Worker)
        epoch = victim.process.epoch
        if epoch is not None:
            self._world.history.add_event(f"{router.label} falsely suspects {victim.label}")
            declaring = router.process._failure_detector._declare(victim.name, epoch)
            self._world.run_in(router, "false suspicion", declaring)

    def _evict(self) -> None:
        self._evict_of(self._victim(self._rng.choice(("router", "router", "preprocessor"))))

    def _evict_of(self, node: SimulatedProcess | None) -> None:
        """The coordinator evicts a live member from its group."""
        for group in (
            self._world.broker.group(REQUESTS, "router"),
            self._world.broker.group(PROMPTS, "preprocessor"),
            self._world.broker.group(BATCH, "preprocessor-batch"),
            self._world.broker.group(REQUESTS, "collector"),
        ):
            for member in [m for m in group.members if node and m.startswith(f"{node.label}-")]:
                self._world.history.add_event(f"the group evicts {member}")
                group.evict(member)

    def _reuse_worker_id(self) -> None:
        """A second worker starts under the id of a running one."""
        node = self._victim("worker")
        if node is not None and node.name not in self._world.absent:
            self._world.start_process(node.kind, node.name)

    def _cut(self) -> None:
        """Retention deletes records that may still be needed."""
        world, rng = self._world, self._rng
        topic = rng.choice((RESPONSES, REQUESTS, KV_EVENTS))
        partition = rng.randrange(world.broker.partitions[topic])
        log = world.broker.log(topic, partition)
        # Requests that no router has read must stay: no design survives their loss.
        end = world.committed(partition) if topic == REQUESTS else log.end
        if end > log.start:
            world.truncate(Partition(topic, partition), rng.randint(log.start + 1, end))

    def _poison(self) -> None:
        """Append a malformed record, or one that does not belong on its topic."""
        world, rng = self._world, self._rng
        topic = rng.choice((REQUESTS, LEDGER, RESPONSES, ASSIGNMENTS, KV_EVENTS, REGISTRY))
        kind = rng.choice((b"Request", b"Assigned", b"Chunk", b"Heartbeat", b"WorkerCard"))
        source = Partition(topic, rng.randrange(world.broker.partitions[topic]))
        if topic == REQUESTS and rng.random() < 0.3:
            self._misplace()
        elif topic == REQUESTS and rng.random() < 0.5:
            # A view stops at an unknown type; the request consumer writes a dead letter.
            value = encode(Lost(worker="worker-0", epoch=0), "-").value or b""
            world.append_malformed(source, rng.choice((b"Future", b"Lost")), value)
        else:
            world.append_malformed(source, kind)

    def _misplace(self) -> None:
        """A client with another partitioner: its request is in the wrong lane."""
        world = self._world
        stray = world.next_malformed_key()
        lanes = [
            n for n in range(world.parameters.lanes) if n != lane_of(stray, world.parameters.lanes)
        ]
        if lanes:
            value = encode(Request(id=stray, token_ids=pack_tokens([ASSISTANT])), stray).value
            world.append_malformed(
                Partition(REQUESTS, self._rng.choice(lanes)), b"Request", value or b""
            )

    def _outage(self) -> None:
        """The broker is unavailable for up to 3 s."""
        world = self._world
        world.history.add_event("the broker is down")
        world.broker.available = False
        world.call_later(3.0 * self._rng.random(), self._recover)

    def _recover(self) -> None:
        if "broker" in self._world.absent:
            return
        self._world.history.add_event("the broker is back")
        self._world.broker.available = True


def _end_of_order(worker: str) -> Tombstone:
    return Tombstone(key=f"cordon/{worker}")
