"""From one engine's cache events to canonical ones, beside the engine that gives them.

    engine events ─► feed ─► mirror ─► pending rows, coalesced ─► take ─► batches with event ids

Engines name blocks by hashes of their own. The bridge sees a block's tokens once, when it is
stored, computes its key, and remembers the engine's hash for what continues or removes it. An
engine may store a block several times and removes it as often: references are counted, and only the
first and the last change anything for others. Many engine hashes can stand for one key.

The *mirror* is all keys with a reference: what the index ends up with when it has applied every
batch. It can be announced again at any time, with or without `cleared` before it; what changes in
the meantime goes out in between, in order. One bridge serves one rank of one worker. Owns no queue
to the log and no clock: its owner feeds it, asks when a batch is due, and takes it.

Overload: when more than `max_pending` blocks wait to be taken, they are dropped, and the mirror is
announced from `cleared` on instead. It never costs more than the cache holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from indexer.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    concerns_prefixes,
    is_remote,
    tier_of,
)
from indexer.events import Event, Kind, Tier
from indexer.hashing import BASE_SEED, local_hashes
from indexer.keys import KeySecret, keys_of, prefix_sums

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


@dataclass(slots=True)
class _Block:
    """A block under its engine's name. `total` is the sum behind its key, for what continues it."""

    total: int
    key: int
    position: int
    lora_name: str
    cache_salt: str
    copies: list[int] = field(default_factory=lambda: [0] * len(Tier))
    """References by tier."""


@dataclass(slots=True)
class _Held:
    """A key in a tier of the mirror."""

    position: int
    references: int = 0


@dataclass(slots=True)
class _Row:
    """An event that may still grow."""

    kind: Kind
    tier: Tier
    position: int
    keys: list[int]

    def takes(self, kind: Kind, tier: Tier, position: int) -> bool:
        """Whether one more key goes into this row."""
        if (kind, tier) != (self.kind, self.tier):
            return False
        return kind == Kind.REMOVED or position == self.position + len(self.keys)

    def first(self, keys: int) -> Event:
        """Cut off its first keys as an event."""
        taken, self.keys = self.keys[:keys], self.keys[keys:]
        event = Event(self.kind, self.tier, self.position, tuple(taken))
        self.position += len(taken) if self.kind == Kind.STORED else 0
        return event


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
        self._blocks: dict[tuple[int, EngineHash], _Block] = {}
        self._mirror: list[dict[int, _Held]] = [{} for _ in Tier]
        self._pending: deque[_Row] = deque()
        self._pending_blocks = 0
        self._pending_since = 0.0
        self._to_announce: deque[tuple[Tier, int]] = deque()

    @property
    def held(self) -> int:
        """Keys in the mirror, over all tiers."""
        return sum(len(tier) for tier in self._mirror)

    @property
    def to_announce(self) -> int:
        """Keys whose announcement was asked for and has not been put among the pending ones."""
        return len(self._to_announce)

    def feed(self, events: Iterable[EngineEvent], now: float) -> None:
        """Take events of the engine, in its order. `now`: seconds on a clock that never goes back.

        Never raises for what an engine may say: it is counted.
        """
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event, now)
            elif isinstance(event, BlocksRemoved):
                self._remove(event, now)
            else:
                assert isinstance(event, AllCleared)
                self._clear(now)
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

        With `clear`, what is pending is dropped and `cleared` takes its place; call it so when
        events of the engine were lost, too.
        """
        if clear:
            self._pending.clear()
            self._pending_blocks = 0
            self._put(Kind.CLEARED, Tier.DEVICE, 0, [], now)
        self._to_announce = deque((tier, key) for tier in Tier for key in self._mirror[tier])

    def announce_some(self, blocks: int, now: float) -> None:
        """Put up to so many announcements among the pending events; gone blocks count, too."""
        for _ in range(min(blocks, len(self._to_announce))):
            tier, key = self._to_announce.popleft()
            held = self._mirror[tier].get(key)
            if held is not None:
                self._put(Kind.STORED, tier, held.position, [key], now)

    # --- what engines say ------------------------------------------------------------------------

    def _store(self, event: BlocksStored, now: float) -> None:
        if not self._accepts(event):
            return
        parent = None
        if event.parent is not None:
            parent = self._blocks.get((event.group, event.parent))
            if parent is None:
                self.counters.orphans += 1
                if not self._to_announce:
                    self.announce(now, clear=False)
                return
        lora_name = event.lora_name or (parent.lora_name if parent else "")
        cache_salt = event.cache_salt or (parent.cache_salt if parent else "")
        position = parent.position + 1 if parent else 0
        try:
            local = local_hashes(
                event.token_ids, self._block_size, lora_name=lora_name, cache_salt=cache_salt,
                mm_hashes=event.mm_hashes, seed=self._seed,
            )  # fmt: skip
        except (ValueError, OverflowError):  # numbers that are no tokens, or no hashes
            self.counters.malformed += 1
            return
        before = parent.total if parent else 0
        sums = prefix_sums(local, self._secret, position=position, before=before)
        pairs = zip(event.block_hashes, sums.tolist(), keys_of(sums).tolist(), strict=True)
        tier = tier_of(event.medium)
        for index, (engine_hash, total, key) in enumerate(pairs):
            block = self._blocks.setdefault(
                (event.group, engine_hash),
                _Block(total, key, position + index, lora_name, cache_salt),
            )
            self._refer(block, tier, now)

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

    def _refer(self, block: _Block, tier: Tier, now: float) -> None:
        block.copies[tier] += 1
        held = self._mirror[tier].setdefault(block.key, _Held(block.position))
        held.references += 1
        if held.references == 1:
            self._put(Kind.STORED, tier, held.position, [block.key], now)

    def _remove(self, event: BlocksRemoved, now: float) -> None:
        if event.group in self._other_groups or is_remote(event):
            self.counters.other_caches += 1
            return
        tier = tier_of(event.medium)
        for engine_hash in event.block_hashes:
            block = self._blocks.get((event.group, engine_hash))
            if block is None or not block.copies[tier]:
                self.counters.unknown_removed += 1
                continue
            block.copies[tier] -= 1
            if not any(block.copies):
                del self._blocks[event.group, engine_hash]
            held = self._mirror[tier][block.key]
            held.references -= 1
            if not held.references:
                del self._mirror[tier][block.key]
                self._put(Kind.REMOVED, tier, 0, [block.key], now)

    def _clear(self, now: float) -> None:
        self._blocks.clear()
        for tier in self._mirror:
            tier.clear()
        self.announce(now, clear=True)

    def _put(self, kind: Kind, tier: Tier, position: int, keys: list[int], now: float) -> None:
        """Append to the pending events, to the last row if it takes one more key."""
        if not self._pending:
            self._pending_since = now
        self._pending_blocks += len(keys)
        if self._pending and self._pending[-1].takes(kind, tier, position):
            self._pending[-1].keys += keys
        else:
            self._pending.append(_Row(kind, tier, position, keys))
