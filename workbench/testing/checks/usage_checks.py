"""Checks of the usage that collectors have written, once the world has drained.

A reader that reads committed gets one record for each request that has ended in the ledger. Its
tokens of a whole answer are those that readers of the stream have, and its tenant is that of the
request. Tokens may be unknown in a lane whose answers were lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvlane.streams.ports import Partition
from kvlane.streams.records import RequestUsage
from kvlane.streams.request import Request
from kvlane.streams.responses.transcript import Transcript
from kvlane.streams.topics import LEDGER, REQUESTS, RESPONSES, USAGE
from workbench.testing.checks.stream_checks import decode_or_none, shown_streams
from workbench.testing.simulated_world import SimulatedWorld


def usage_violations(world: SimulatedWorld) -> Iterator[str]:
    """Violations, as texts."""
    if not world.parameters.collectors:
        return
    shown = shown_streams(world, None)
    for lane in range(world.parameters.lanes):
        written: dict[str, list[RequestUsage]] = defaultdict(list)
        for raw in world.broker.records(USAGE, lane):
            if isinstance(record := decode_or_none(raw), RequestUsage):
                written[record.id].append(record)
        asked = {
            record.id: record
            for raw in world.all_records(REQUESTS, lane)
            if isinstance(record := decode_or_none(raw), Request)
        }
        is_cut = Partition(LEDGER, lane) in world.truncated
        may_lack_tokens = Partition(RESPONSES, lane) in world.truncated
        for request_id in sorted(asked.keys() | written.keys()):
            found, is_over = written[request_id], shown[request_id].is_over
            if len(found) != int(is_over) and not is_cut:
                yield f"usage: {request_id} has {len(found)} records, not {int(is_over)}"
            for usage in found:
                if (request := asked.get(request_id)) is not None:
                    yield from _differences(
                        usage, request, shown[request_id], may_lack_tokens=may_lack_tokens
                    )


def _differences(
    usage: RequestUsage, request: Request, stream: Transcript, *, may_lack_tokens: bool
) -> Iterator[str]:
    if usage.tenant != request.tenant:
        yield f"usage: {usage.id} is of {usage.tenant!r}, not {request.tenant!r}"
    is_whole = stream.finish_reason in ("stop", "length") and request.body is None
    if may_lack_tokens and "output_tokens" in usage.unknown:
        return
    if is_whole and usage.output_tokens != stream.shown_tokens:
        yield f"usage: {usage.id} has {usage.output_tokens} tokens, not {stream.shown_tokens}"
