"""Checks of the results that collectors have written, once the world has drained.

A reader that reads committed gets one result for each request that asks for one, with the text that
readers of its stream have seen, and none for any other request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from app.testing.checks.stream_checks import decode_or_none, shown_streams
from app.testing.kafka_clients import KafkaClients
from app.testing.simulated_world import SimulatedWorld
from streams.ports import Partition
from streams.records import Result
from streams.responses.transcript import Transcript
from streams.topics import REQUESTS, RESPONSES, RESULTS, lane_of


def result_violations(world: SimulatedWorld, kafka_clients: KafkaClients) -> Iterator[str]:
    """Violations, as texts."""
    if not world.parameters.collectors:
        return
    written: dict[str, list[Result]] = defaultdict(list)
    for partition in range(world.broker.partitions[RESULTS]):
        for raw in world.broker.records(RESULTS, partition):
            if isinstance(record := decode_or_none(raw), Result):
                written[record.id].append(record)
    shown = shown_streams(world)
    for request_id, question in kafka_clients.requests.items():
        found = written.pop(request_id, [])
        if len(found) != question.wants_result:
            yield f"results: {request_id} has {len(found)}, not {int(question.wants_result)}"
        lane = lane_of(request_id, world.parameters.lanes)
        is_cut = any(Partition(topic, lane) in world.truncated for topic in (REQUESTS, RESPONSES))
        for result in found:
            if not is_cut and (difference := _difference(result, shown[request_id])):
                yield f"result: {request_id} {difference}"
    for request_id in written:
        yield f"results: {request_id} has a result, expected none"


def _difference(result: Result, seen: Transcript) -> str:
    """Difference between a result and the stream of its request; "" for none."""
    if not seen.is_over:
        return f"has a result ({result.status}) and goes on"
    is_whole = seen.finish_reason in ("stop", "length") or (
        seen.end is not None and seen.end.code in ("stop", "length")
    )
    if is_whole != (result.body is not None):
        return f"is {result.status}, its stream ended as {seen.finish_reason or seen.end}"
    if result.body is None:
        return ""
    text = result.body["choices"][0]["text"]
    return "" if text == seen.text else f"has {text!r}, its stream {seen.text!r}"
