"""Checks of replies, once the world has drained: copies of results in topics of clients.

A reply whose topic exists is there, equal to the result and with the correlation id of its prompt;
once, unless the broker itself appended it again or later than its producer waited. A reply to
another topic is nowhere. No result and no reply waits for a topic that takes none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvlane.streams.memory.partition_log import MemoryRecord
from kvlane.streams.topics import RESPONSES, RESULTS
from workbench.testing.clients.all_clients import Clients
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.world_parameters import OPEN_REPLIES

MAX_RESULT_DELAY_S = 25.0
"""Longest time from the end of an answer, of the faults, or from the last start of a collector, to
its result: groups rebalance. A topic that takes no replies is given up later."""
MAX_REPLY_DELAY_S = 25.0
"""The same for a reply after its result; a new owner waits for the appends of the former one."""


def reply_violations(world: SimulatedWorld, clients: Clients) -> Iterator[str]:
    """Violations, as texts."""
    if "replies" not in world.parameters.scenarios:
        return
    results = {each[0].key: each[0] for each in _records_by_key(world, RESULTS).values()}
    replies = _records_by_key(world, OPEN_REPLIES)
    ended = {key: each[-1] for key, each in _records_by_key(world, RESPONSES).items()}
    extra = world.network.repeated[OPEN_REPLIES]
    for request_id, question in clients.requests.items():
        key = request_id.encode()
        result, found = results.get(key), replies.get(key, [])
        if result is None:
            continue  # `result_checks.py` requires the result
        if key in ended and _is_late(world, ended[key], result, MAX_RESULT_DELAY_S):
            yield f"held: the result of {request_id} has waited"
        if question.reply_topic != OPEN_REPLIES:
            if found:
                yield f"reply: {request_id} has {len(found)} that it did not ask for"
            continue
        extra -= max(0, len(found) - 1)
        if not found or extra < 0:
            yield f"reply: {request_id} has {len(found)}, not 1"
            continue
        if _is_late(world, result, found[0], MAX_REPLY_DELAY_S):
            yield f"held: the reply to {request_id} has waited"
        correlation = ("correlation_id", key)
        if any(r.value != result.value or correlation not in r.headers for r in found):
            yield f"reply: {request_id} has another one than its result"


def _records_by_key(world: SimulatedWorld, topic: str) -> dict[bytes | None, list[MemoryRecord]]:
    records: dict[bytes | None, list[MemoryRecord]] = defaultdict(list)
    for partition in range(world.broker.partitions[topic]):
        for record in world.broker.records(topic, partition):
            records[record.key].append(record)
    return records


def _is_late(
    world: SimulatedWorld, cause: MemoryRecord, effect: MemoryRecord, within_s: float
) -> bool:
    since_ms = max(cause.timestamp, world.faults_stopped_ms, world.collector_started_ms)
    return effect.timestamp > since_ms + (within_s * 1000) + world.parameters.skew_ms
