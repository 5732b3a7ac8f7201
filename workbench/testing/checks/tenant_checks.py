"""Checks of tenants, once the world has drained: their equal names of sessions, and their equal
prompts, do not meet. Keys and the ids of streams are checked by the clients themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS
from workbench.testing.api_keys import TENANTS
from workbench.testing.checks.stream_checks import decode_or_none
from workbench.testing.simulated_world import SimulatedWorld


def tenant_violations(world: SimulatedWorld) -> Iterator[str]:
    """Violations, as texts."""
    if world.keys is None:
        return
    tenants: dict[str, set[str]] = defaultdict(set)
    for lane in range(world.parameters.lanes):
        for raw in world.all_records(REQUESTS, lane):
            record = decode_or_none(raw)
            if isinstance(record, Request) and record.tenant in TENANTS:
                session = record.hints.session_control
                tenants[f"cache {record.cache_salt}"].add(record.tenant)
                if session is not None:
                    tenants[f"session {session.session_id}"].add(record.tenant)
    for name, found in tenants.items():
        if len(found) > 1:
            yield f"tenants: {sorted(found)} share {name!r}"
