"""Checks of a tenant's limits, once the world has drained: never more at a time than they allow,
over all gateways, and nothing is counted that has ended."""

# ruff: noqa: SLF001 - checks the private state of gateways

from __future__ import annotations

from collections.abc import Iterator

from kvlane.app.gateway import Gateway
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.topics import BATCH_JOBS
from workbench.testing.api_keys import FILE_BYTES, HOARDER, LIMITED, LIMITS
from workbench.testing.checks.stream_checks import decode_or_none
from workbench.testing.clients.all_clients import Clients
from workbench.testing.simulated_world import SimulatedWorld


def limit_violations(world: SimulatedWorld, clients: Clients) -> Iterator[str]:
    """Violations, as texts."""
    if "limits" not in world.parameters.scenarios:
        return
    assert LIMITS.requests is not None
    assert LIMITS.batches is not None
    if waiting := clients.limited.waiting:
        yield f"limits: {sorted(waiting)} are still refused"
    if (most := clients.limited.most) > LIMITS.requests:
        yield f"limits: {most} requests of {LIMITED} at a time"
    if (batches := _most_batches(world, clients)) > LIMITS.batches:
        yield f"limits: {batches} batches of {LIMITED} at a time"
    if (most := clients.limited.most_file_bytes) > FILE_BYTES:
        yield f"limits: {most} bytes of files of {HOARDER} at a time"
    for node in world.running("gateway"):
        if node.state == "up" and isinstance(node.process, Gateway):
            store = node.process._access.store
            if store is not None and not (quota := store.quota(LIMITED)).is_idle:
                yield f"limits: {node.label} counts {quota.used} of {LIMITED}"


def _most_batches(world: SimulatedWorld, clients: Clients) -> int:
    """The most batches at a time of those that clients were given, in the order of appends."""
    given = {client.job["id"] for client in clients.jobs if client.is_limited and client.job}
    opened: set[str] = set()
    most = 0
    for raw in world.history.appended(BATCH_JOBS):
        job = decode_or_none(raw)
        if isinstance(job, BatchJob) and job.id in given:
            if job.has_ended:
                opened.discard(job.id)
                given.discard(job.id)
            else:
                opened.add(job.id)
                most = max(most, len(opened))
    return most
