"""Checks of the results that collectors have written, once the world has drained.

A reader that reads committed gets one result for each request that asks for one, with the text that
readers of its stream have seen, and none for any other request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvlane.streams.ports import Partition
from kvlane.streams.records import Result
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import REQUESTS, RESPONSES, RESULTS, lane_of
from workbench.testing.checks.stream_checks import decode_or_none, shown_streams
from workbench.testing.clients.all_clients import Clients
from workbench.testing.simulated_world import SimulatedWorld


def result_violations(world: SimulatedWorld, clients: Clients) -> Iterator[str]:
    """Violations, as texts."""
    if not world.parameters.collectors:
        return
    written: dict[str, list[Result]] = defaultdict(list)
    for partition in range(world.broker.partitions[RESULTS]):
        for raw in world.broker.records(RESULTS, partition):
            if isinstance(record := decode_or_none(raw), Result):
                written[record.id].append(record)
    shown = shown_streams(world)
    wants = dict.fromkeys(_requests_of_jobs(world), True)
    wants |= {request_id: q.wants_result for request_id, q in clients.requests.items()}
    for request_id in sorted(wants.keys() | written.keys()):
        found, wanted = written[request_id], int(wants.get(request_id, False))
        if len(found) != wanted:
            yield f"results: {request_id} has {len(found)}, not {wanted}"
        lane = lane_of(request_id, world.parameters.lanes)
        is_cut = any(Partition(topic, lane) in world.truncated for topic in (REQUESTS, RESPONSES))
        for result in found:
            if not is_cut and (difference := _difference(result, shown[request_id])):
                yield f"result: {request_id} {difference}"


def _requests_of_jobs(world: SimulatedWorld) -> set[str]:
    """The ids of the requests of batch jobs."""
    return {
        record.id
        for lane in range(world.parameters.lanes)
        for raw in world.all_records(REQUESTS, lane)
        if isinstance(record := decode_or_none(raw), Request)
        and record.result is not None
        and record.result.batch_id
    }


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
