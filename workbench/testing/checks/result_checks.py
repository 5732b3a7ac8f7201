"""Checks of the results that collectors have written, once the world has drained.

A reader that reads committed gets one result for each request that asks for one, with the text that
readers of its stream have seen, and none for any other request. A stored response has the input of
its request, and the calls and the reasoning of its answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from kvlane.streams.records import PassthroughDelta, Result
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import REQUESTS, RESULTS
from workbench.testing.checks.stream_checks import decode_or_none, is_cut, shown_streams
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
    asides: dict[str, list[PassthroughDelta]] = defaultdict(list)
    shown = shown_streams(world, asides)
    wants = dict.fromkeys(_requests_of_jobs(world), True)
    wants |= {request_id: q.wants_result for request_id, q in clients.requests.items()}
    for request_id in sorted(wants.keys() | written.keys()):
        found, wanted = written[request_id], int(wants.get(request_id, False))
        if len(found) != wanted:
            yield f"results: {request_id} has {len(found)}, not {wanted}"
        for result in found:
            difference = _difference(result, shown[request_id], asides[request_id])
            if difference and not is_cut(world, request_id):
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


def _difference(result: Result, seen: Transcript, asides: Sequence[PassthroughDelta]) -> str:
    """Difference between a result and the stream of its request; "" for none."""
    if not seen.is_over:
        return f"has a result ({result.status}) and goes on"
    if result.kind == "response":
        return _difference_of_stored(result, seen, asides)
    is_whole = seen.finish_reason in ("stop", "length") or (
        seen.end is not None and seen.end.code in ("stop", "length")
    )
    if is_whole != (result.body is not None):
        return f"is {result.status}, its stream ended as {seen.finish_reason or seen.end}"
    if result.body is None:
        return ""
    text = result.body["choices"][0]["text"]
    return "" if text == seen.text else f"has {text!r}, its stream {seen.text!r}"


def _difference_of_stored(
    result: Result, seen: Transcript, asides: Sequence[PassthroughDelta]
) -> str:
    """Difference between a stored response and the stream of its request; "" for none. White space
    alone is no item."""
    if result.stored is UNSET or result.body is None:
        return "is not stored"
    if result.stored.input != [{"role": "user", "content": result.id}]:
        return f"has the input {result.stored.input}"
    if seen.finish_reason is None:  # it ended without the last part of its answer
        return "" if result.body["status"] in ("failed", "cancelled") else "has not failed"
    items: Sequence[Mapping[str, Any]] = result.body["output"]
    stored = {
        "text": _joined(item["content"][0]["text"] for item in items if item["type"] == "message"),
        "reasoning": _joined(
            item["content"][0]["text"] for item in items if item["type"] == "reasoning"
        ),
        "calls": [
            item["name"] + item["arguments"] for item in items if item["type"] == "function_call"
        ],
    }
    calls = dict[int, str]()
    for call in (call for aside in asides for call in aside.delta.get("tool_calls", ())):
        function = call["function"]
        part = function.get("name", "") + function.get("arguments", "")
        calls[call["index"]] = calls.get(call["index"], "") + part
    due = {
        "text": _joined([seen.text]),
        "reasoning": _joined(aside.delta.get("reasoning_content", "") for aside in asides),
        "calls": [*calls.values()],
    }
    return "" if stored == due else f"has {stored}, its stream {due}"


def _joined(texts: Iterable[str]) -> str:
    return "".join("".join(texts).split())
