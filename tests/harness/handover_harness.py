"""A prefill and a decode worker, and a request that is handed over between them."""

from __future__ import annotations

from typing import Any

from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import Assignment
from kvlane.streams.request import Request, StopConditions
from tests.harness.fake_worker import FakeWorker, wait_for_items
from tests.harness.memory_world import MemoryWorld

LONG = Request(
    id="a", model="demo", token_ids=pack_tokens(list(range(3000))), deadline_s=100,
    stop=StopConditions(max_tokens=50, min_tokens=2),
)  # fmt: skip
PARAMS = b'{"kv_transfer_params":{"remote_block_ids":[1,2]}}'


def workers(world: MemoryWorld, **over: Any) -> tuple[FakeWorker, FakeWorker]:
    prefill = FakeWorker(world, "p", role="prefill", **over)
    return prefill, FakeWorker(world, "d", role="decode", **over)


async def assigned(world: MemoryWorld, worker: FakeWorker, count: int = 1) -> Assignment:
    """The assignment of a worker with this number, from 1."""
    return (await wait_for_items(world, lambda: worker.received(Assignment), count))[count - 1]
