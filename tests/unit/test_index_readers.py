"""Readers in other threads, while one writer changes everything but what they look at."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from indexer.events import CLEARED, Event, Kind, Tier
from indexer.lives import Holder, Overlap
from tests.indexes import FastIndex, ScanningIndex, local_of

STEADY = [Holder(f"steady-{n}", 0) for n in range(3)]
BLOCKS = 600
ROUNDS = 400


def steady_index(kind: type[FastIndex], rng: random.Random) -> tuple[FastIndex, list[int]]:
    """Three caches hold the prompt, each one to another depth, and will go on to."""
    index, prompt = kind(), [rng.randrange(1, 1 << 64) for _ in range(BLOCKS)]
    for n, holder in enumerate(STEADY):
        events = [CLEARED, Event(Kind.STORED, keys=tuple(prompt[: BLOCKS // (n + 1)]))]
        index.apply(0, holder, 1, 0, events)
    return index, prompt


class Churn:
    """Caches that come and go: they share the prompt's beginning; much else grows and shrinks."""

    def __init__(self, index: FastIndex, prompt: list[int], rng: random.Random) -> None:
        self.index, self.prompt, self.rng = index, prompt, rng
        self.ids: dict[Holder, int] = {}

    def add(self, holder: Holder, *events: Event) -> None:
        first = self.ids.get(holder, 0)
        self.ids[holder] = first + len(events)
        self.index.apply(1, holder, 1, first, events)

    def round(self, number: int) -> None:
        holder = Holder(f"churning-{number % 150}", 0)
        shared = self.prompt[: self.rng.randrange(BLOCKS)]
        own = [self.rng.randrange(1, 1 << 64) for _ in range(self.rng.choice([10, 2000]))]
        self.add(holder, CLEARED, Event(Kind.STORED, keys=(*shared, *own)))
        if number % 2:
            self.add(holder, Event(Kind.REMOVED, keys=tuple(reversed(own))))
        if number % 3 == 0:
            self.add(holder, Event(Kind.REMOVED, keys=tuple(reversed(shared))))


def read(
    ask: Callable[[], dict[Holder, Overlap]], stop: threading.Event, wrong: list[object]
) -> None:
    """Look the prompt up again and again; what is steady must look so each time."""
    expected = {holder: Overlap(BLOCKS // (n + 1)) for n, holder in enumerate(STEADY)}
    reads = 0
    try:
        while not stop.is_set() and not wrong:
            found = ask()
            seen = {holder: found.get(holder) for holder in STEADY}
            if seen != expected or any(overlap.blocks > BLOCKS for overlap in found.values()):
                wrong.append(found)
            reads += 1
    except BaseException as e:  # noqa: BLE001 - the test tells
        wrong.append(e)
    if not reads:
        wrong.append("nothing was read")


@pytest.mark.parametrize("kind", [FastIndex, ScanningIndex])
def test_readers_beside_a_writer_see_what_does_not_change_unchanged(kind: type[FastIndex]) -> None:
    rng = random.Random(1)
    index, prompt = steady_index(kind, rng)
    local, stop, wrong = local_of(prompt), threading.Event(), list[object]()

    def ask() -> dict[Holder, Overlap]:
        return super(FastIndex, index).match(local)

    readers = [threading.Thread(target=read, args=(ask, stop, wrong)) for _ in range(2)]
    churn = Churn(index, prompt, rng)
    for reader in readers:
        reader.start()
    try:
        for number in range(ROUNDS):
            churn.round(number)
    finally:
        stop.set()
        for reader in readers:
            reader.join(30)
    assert not wrong
    while index.tidy(1 << 10):
        pass
    assert index.entries(STEADY[0], Tier.DEVICE).keys() == set(prompt)
