"""Tests of the memory of processes: after many requests as after few, once every window has
passed."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from kvlane.app.routing.state import change_log, ended_prompts, performance, routed_prefixes
from kvlane.streams.responses.reply_reader import ReplyReader
from kvlane.streams.responses.reply_stream import Reply
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, run_scenario

OURS = ("kvlane.",)
SHARED = ("kvlane.streams.memory.", "workbench.testing.")
"""The log itself, which keeps all records, and the clock."""
FEW = 40
MANY = int(os.environ.get("KVLANE_TEST_REQUESTS", "240"))
"""10000 takes minutes (`pytest --timeout 1200`)."""
FORGOTTEN_S = 2500.0
"""Longer than any window in which something of a request is remembered."""
REMEMBERED = 8
"""Changes that a log of changes keeps here, ids of a block, half of the runs of a worker, and the
blocks whose keys are kept, so that they are full after FEW requests."""
GROWN = 50
"""More than counters and caches of fixed size waver; less than one entry for each request."""


def sizes(roots: Mapping[str, object]) -> Counter[str]:
    """The entries of all containers that can be reached from objects, by path; [] is any entry."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    queue = deque(roots.items())
    while queue:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            found[path] += len(value)
            queue.extend((f"{path}[]", each) for pair in value.items() for each in pair)
        elif isinstance(value, set | frozenset | list | deque | tuple):
            found[path] += len(value)
            queue.extend((f"{path}[]", each) for each in value)
        elif is_ours(value):
            queue.extend((f"{path}.{name}", each) for name, each in attributes(value))
    return found


def is_ours(value: object) -> bool:
    module = type(value).__module__
    return module.startswith(OURS) and not module.startswith(SHARED)


def attributes(value: object) -> Iterator[tuple[str, Any]]:
    slots: Iterable[str] = (
        name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
    )
    for name in {**getattr(value, "__dict__", {}), **dict.fromkeys(slots)}:
        if hasattr(value, name):
            yield name, getattr(value, name)


def grown() -> dict[str, int]:
    """By path, how many more entries there are after MANY requests than after FEW."""
    found: dict[str, int] = {}

    async def scenario(world: MemoryWorld) -> None:
        harness = await GatewayHarness.open(world)
        router = await harness.start_router()
        worker = await harness.start_worker("w1")
        processes = {"gateway": harness.gateway, "router": router, "worker": worker}
        counts = []
        for requests in (FEW, MANY):
            for _ in range(requests):
                answer = await harness.chat("hello", stream=True).wait_done()
                url = f"/v1/streams/{answer.headers['x-kvlane-id']}"
                await harness.send("GET", url).wait_done()
            await world.sleep(FORGOTTEN_S)
            # A lane forgets what is old when something new comes to it.
            for _ in range(16):
                await harness.chat("hello", stream=True).wait_done()
                await world.sleep(5)
            counts.append(sizes(processes))
        found.update({p: n - counts[0][p] for p, n in counts[1].items() if n - counts[0][p] > 0})

    run_scenario(scenario)
    return found


@pytest.fixture(autouse=True)
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "MIN_REMEMBERED_CHANGES", REMEMBERED)
    monkeypatch.setattr(ended_prompts, "BLOCK_IDS", REMEMBERED)
    monkeypatch.setattr(performance, "RUN_WINDOW", REMEMBERED)
    monkeypatch.setattr(routed_prefixes, "MAX_BLOCKS", REMEMBERED)


@pytest.mark.slow
def test_containers_do_not_grow_with_finished_requests() -> None:
    assert {path: more for path, more in grown().items() if more > GROWN} == {}


@pytest.mark.slow
def test_leak_of_finished_replies_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if replies that are over were kept."""
    leave = ReplyReader.detach

    def keep(replies: ReplyReader, reply: Reply) -> None:
        vars(replies).setdefault("_kept", []).append(reply)
        leave(replies, reply)

    monkeypatch.setattr(ReplyReader, "detach", keep)
    assert any(path.endswith("._kept") and more > GROWN for path, more in grown().items())
