"""From one engine's cache events to canonical ones, beside the engine that gives them.

    engine events ─► feed ─► mirror ─► pending rows, coalesced ─► take ─► batches with event ids

Engines name blocks by hashes of their own. The bridge sees a block's tokens once, when it is
stored, computes its key, and remembers the engine's hash for what continues or removes it. An
engine may store a block several times and removes it as often: references are counted, and only the
first and the last change anything for others. Many engine hashes can stand for one key.

The *mirror* (`indexer/mirror.py`) is what the index ends up with when it has applied every batch.
It can be announced again at any time, with or without `cleared` before it; what changes in the
meantime goes out in between, in order. One bridge serves one rank of one worker. Owns no queue
to the log and no clock: its owner feeds it, asks when a batch is due, and takes it.

Overload: when more than `max_pending` blocks wait to be taken, they are dropped, and the mirror is
announced from `cleared` on instead. It never costs more than the cache holds.

When events of the engine were lost on their way here, any block may be among those that they
removed. All are taken back with `cleared`, and only *remembered*: one that the engine continues is
there, with all that comes before it, and is told again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from indexer.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    EventsLost,
    concerns_prefixes,
    is_remote,
    tier_of,
)
from indexer.events import Event, Kind, Tier
from indexer.hashing import BASE_SEED, local_hashes
from indexer.keys import KeySecret, prefix_sums
from indexer.mirror import REMOVED, ROOT, Facts, Mirror

PROMPT_BLOCKS = 128
"""Blocks that make a batch due at once; fewer wait for company."""
PATIENCE_S = 0.005
"""How long they wait."""
BATCH_BLOCKS = 1 << 16
"""The most blocks of one batch: half a MiB, far below what a record may hold."""
MAX_PENDING = 1 << 20


class Batch(NamedTuple):
    """Canonical events for one record, with contiguous ids from `first_event_id` on."""

    first_event_id: int
    events: tuple[Event, ...]


@dataclass
class Counters:
    """What was not passed on as it came, since the bridge was made."""

    placeholders: int = 0
    """Stored without tokens: the engine knows what it is, nobody else can."""
    other_caches: int = 0
    """Of sliding windows, states, other places: no business of a prefix index."""
    orphans: int = 0
    """Continued a block that was never seen; refused, with all that continues them."""
    malformed: int = 0
    """Tokens that do not fill the blocks, or another block size than the model's."""
    unknown_removed: int = 0
    overflows: int = 0
    gaps: int = 0
    """How often events of the engine were lost."""


class _Row:
    """An event that may still grow."""

    __slots__ = ("keys", "kind", "position", "tier")

    def __init__(self, kind: Kind, tier: Tier, position: int, keys: list[int]) -> None:
        self.kind = kind
        self.tier = tier
        self.position = position
        self.keys = keys

    def takes(self, kind: Kind, tier: Tier, position: int) -> bool:
        """Whether one more key goes into this row."""
        if kind is not self.kind or tier is not self.tier:
            return False
        return kind is REMOVED or position == self.position + len(self.keys)

    def first(self, keys: int) -> Event:
        """Cut off its first keys as an event."""
        taken, self.keys = self.keys[:keys], self.keys[keys:]
        event = Event(self.kind, self.tier, self.position, tuple(taken))
        self.position += len(taken) if self.kind is not REMOVED else 0
        return event


class _Remembered(NamedTuple):
    """A block that was there when events were lost: its sum, and the name of the one before it."""

    total: int
    facts: Facts
    before: EngineHash | None


class Bridge:
    """See the module. `block_size` is the model's; `wrong_block_size` another one that was seen."""

    def __init__(
        self,
        block_size: int,
        secret: KeySecret,
        *,
        seed: int = BASE_SEED,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.counters = Counters()
        self.wrong_block_size: int | None = None
        self.next_event_id = 0
        self._block_size = block_size
        self._secret = secret
        self._seed = seed
        self._max_pending = max_pending
        self._other_groups: set[int] = set()
        self._forget_all()
        self._pending: deque[_Row] = deque()
        self._pending_blocks = 0
        self._pending_since = 0.0

    @property
    def held(self) -> int:
        """Keys in the mirror, over all tiers."""
        return self._mirror.blocks

    @property
    def announcing(self) -> bool:
        """Whether `announce` has to be followed by more of `announce_some`."""
        return self._mirror.announcing

    def feed(self, events: Iterable[EngineEvent], now: float) -> None:
        """Take events of the engine, in its order. `now`: seconds on a clock that never goes back.

        Never raises for what an engine may say: it is counted.
        """
        idle = not self._pending
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                self._remove(event)
            elif isinstance(event, AllCleared):
                self._forget_all()
                self.announce(now, clear=True)
            else:
                assert isinstance(event, EventsLost)
                self.counters.gaps += 1
                self._doubt_all()
                self.announce(now, clear=True)
        if idle:
            self._pending_since = now
        if self._pending_blocks > self._max_pending:
            self.counters.overflows += 1
            self.announce(now, clear=True)

    def due_at(self) -> float | None:
        """When a batch is to be taken: None for not at all, in the past for at once."""
        if not self._pending:
            return None
        hurry = self._pending_blocks >= PROMPT_BLOCKS
        return self._pending_since + (0.0 if hurry else PATIENCE_S)

    def take(self, max_blocks: int = BATCH_BLOCKS) -> Batch | None:
        """The next batch, which its owner has to get into the log; None when nothing is pending."""
        if not self._pending:
            return None
        events = []
        room = max_blocks
        while self._pending and room > 0:
            row = self._pending[0]
            events.append(row.first(room))
            room -= len(events[-1].keys)
            if not row.keys:
                self._pending.popleft()
        self._pending_blocks -= max_blocks - room
        batch = Batch(self.next_event_id, tuple(events))
        self.next_event_id += len(events)
        return batch

    def begin_epoch(self, now: float) -> None:
        """Another life of the worker around the same engine: ids from 0, everything from new."""
        self.next_event_id = 0
        self.announce(now, clear=True)

    def announce(self, now: float, *, clear: bool) -> None:
        """Prepare to announce the whole mirror again, piece by piece with `announce_some`.

        With `clear`, what is pending is dropped and `cleared` takes its place.
        """
        if clear:
            self._pending.clear()
            self._pending_blocks = 0
            self._pending_since = now
            self._put(Kind.CLEARED, Tier.DEVICE, 0, [])
        self._mirror.announce(clear=clear)

    def announce_some(self, blocks: int, now: float) -> None:
        """Put up to so many announcements among the pending events; gone blocks count, too."""
        if not self._pending:
            self._pending_since = now
        self._mirror.announce_some(blocks)

    # --- what engines say ------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> None:
        if not self._accepts(event):
            return
        tiers = self._names.setdefault(event.group, [{} for _ in Tier])
        before, position, lora_name, cache_salt = 0, 0, event.lora_name, event.cache_salt
        if event.parent is not None:
            lies_in = next((t for t in Tier if event.parent in tiers[t]), None)
            if lies_in is None and self._recall(event.group, event.parent):
                lies_in = Tier.DEVICE
            if lies_in is None:
                self.counters.orphans += 1
                if not self.announcing:
                    self._mirror.announce(clear=False)
                return
            before = tiers[lies_in][event.parent]
            _, position, inherited_name, inherited_salt = self._mirror.facts(lies_in, before)
            position += 1
            lora_name, cache_salt = lora_name or inherited_name, cache_salt or inherited_salt
        try:
            local = local_hashes(
                event.token_ids, self._block_size, lora_name=lora_name, cache_salt=cache_salt,
                mm_hashes=event.mm_hashes, seed=self._seed,
            )  # fmt: skip
        except (ValueError, OverflowError):  # numbers that are no tokens, or no hashes
            self.counters.malformed += 1
            return
        sums = prefix_sums(local, self._secret, position=position, before=before).tolist()
        befores = [before if position else ROOT, *sums[:-1]]
        facts = list(
            zip(befores, range(position, position + len(sums)), repeat(lora_name),
                repeat(cache_salt), strict=False)
        )  # fmt: skip
        tier = tier_of(event.medium)
        names = tiers[tier]
        new = set(event.block_hashes)
        if len(new) == len(sums) and names.keys().isdisjoint(new):
            names.update(zip(event.block_hashes, sums, strict=True))
            self._mirror.add(tier, sums, facts)
            return
        for name, total, fact in zip(event.block_hashes, sums, facts, strict=True):
            if name in names:
                copies = (event.group, tier, name)
                self._copies[copies] = self._copies.get(copies, 1) + 1
            else:
                names[name] = total
                self._mirror.add(tier, [total], [fact])

    def _accepts(self, event: BlocksStored) -> bool:
        blocks = len(event.block_hashes)
        if not concerns_prefixes(event):
            self.counters.other_caches += 1
            self._other_groups.add(event.group)
        elif not len(event.token_ids) or not event.block_size:
            self.counters.placeholders += 1
        elif event.block_size != self._block_size:
            self.wrong_block_size = event.block_size
            self.counters.malformed += 1
        elif len(event.token_ids) != blocks * self._block_size:
            self.counters.malformed += 1
        else:
            return True
        return False

    def _remove(self, event: BlocksRemoved) -> None:
        if event.group in self._other_groups or is_remote(event):
            self.counters.other_caches += 1
            return
        tier = tier_of(event.medium)
        tiers = self._names.get(event.group)
        names = tiers[tier] if tiers else {}
        gone = []
        for name in event.block_hashes:
            if name not in names:
                if self._remembered.pop((event.group, name), None) is None:
                    self.counters.unknown_removed += 1
                continue
            if self._copies and (copies := self._copies.pop((event.group, tier, name), 1)) > 1:
                if copies > 2:
                    self._copies[event.group, tier, name] = copies - 1
                continue
            gone.append(names.pop(name))
        self._mirror.remove(tier, gone)

    def _forget_all(self) -> None:
        self._mirror = Mirror(self._put)
        self._names: dict[int, list[dict[EngineHash, int]]] = {}
        """The sum of each block by group, tier, and its engine's name for it."""
        self._copies: dict[tuple[int, Tier, EngineHash], int] = {}
        """How many the engine has of a block under one name, where it is more than one."""
        self._remembered: dict[tuple[int, EngineHash], _Remembered] = {}

    def _doubt_all(self) -> None:
        """Nothing is known to be there any more; the device's blocks are remembered once."""
        remembered: dict[tuple[int, EngineHash], _Remembered] = {}
        for group, tiers in self._names.items():
            names = tiers[Tier.DEVICE]
            by_sum = {total: name for name, total in names.items()}
            for name, total in names.items():
                facts = self._mirror.facts(Tier.DEVICE, total)
                remembered[group, name] = _Remembered(total, facts, by_sum.get(facts[0]))
        self._forget_all()
        self._remembered = remembered

    def _recall(self, group: int, name: EngineHash) -> bool:
        """The engine continues this block: it and all before it are there, if they are known."""
        chain: list[tuple[EngineHash, _Remembered]] = []
        names = self._names[group][Tier.DEVICE]
        at: EngineHash | None = name
        while at is not None and at not in names:
            block = self._remembered.get((group, at))
            if block is None:
                return False
            chain.append((at, block))
            at = block.before
            if at is None and block.facts[0] != ROOT:
                return False
        for known, block in reversed(chain):
            del self._remembered[group, known]
            names[known] = block.total
            self._mirror.add(Tier.DEVICE, [block.total], [block.facts])
        return bool(chain)

    def _put(self, kind: Kind, tier: Tier, position: int, sums: list[int]) -> None:
        """Append to the pending events, to the last row if it takes one more key."""
        keys = [total or 1 for total in sums] if 0 in sums else sums  # see `indexer.keys.keys_of`
        self._pending_blocks += len(keys)
        if self._pending and self._pending[-1].takes(kind, tier, position):
            self._pending[-1].keys += keys
        else:
            self._pending.append(_Row(kind, tier, position, keys))
