"""Normalizer of one engine's cache events: engine hashes in, canonical events with keys out.

    engine events ─► feed ─► mirror ─► pending rows, coalesced ─► take ─► batches with event ids

One cache event has a representation per step of its way from the engine to the index:

    what                module                                  blocks are identified by
    vLLM's wire format  app/engine/kv_events.py                 engine hashes, per group and medium
    `BlocksStored`, ... indexer/cache_events/engine_events.py   engine hashes, of any engine
    `MirrorChange`      indexer/cache_events/cache_mirror.py    sums, only changes for readers
    `CacheEvent`        indexer/events.py                       keys (canonical), in rows
    `EventColumns`      indexer/events.py                       keys, encoded by column
    `Blocks`            streams/record_types/worker_records.py  the columns as a Kafka record
    `EventRows`         indexer/events.py                       keys, columns decoded as arrays

The normalizer computes the key of a block when it is stored, with its tokens, and keeps the
engine's hash for later events. Many engine hashes can map to one key, and an engine may store a
block several times and removes it as often: only the first and the last change anything for
readers.

The *mirror* equals the state of the index after every batch, and can be announced again at any
time, with changes in between, in order. One normalizer serves one rank of one worker; its owner
feeds it, asks when a batch is due, and takes it. Overload: more than `max_pending` blocks are
dropped, and the mirror is announced again after a `cleared` instead.

When events of the engine were lost, any block may have been removed. All are retracted with
`cleared` and kept as *suspects*: one that the engine continues still exists, as do all its
ancestors, and is published again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from kvlane.indexer.block_hashes import BASE_SEED, KeySecret, local_hashes, prefix_sums
from kvlane.indexer.cache_events.cache_mirror import (
    REMOVED,
    ROOT,
    BlockMeta,
    CacheMirror,
    MirrorChange,
)
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    EventsLost,
    is_remote,
    serves_prefixes,
    tier_of,
)
from kvlane.indexer.events import CacheEvent, EventKind, Tier

EAGER_BATCH_BLOCKS = 128
"""Pending blocks at which a batch is due at once; fewer wait for MAX_BATCH_DELAY_S."""
MAX_BATCH_DELAY_S = 0.005
"""Maximum delay of a pending event."""
MAX_BATCH_BLOCKS = 1 << 16
"""Maximum blocks of a batch: half a MiB, far below the maximum size of a record."""
MAX_PENDING_BLOCKS = 1 << 20


class EventBatch(NamedTuple):
    """Canonical events of one record, with contiguous ids starting at `first_event_id`."""

    first_event_id: int
    events: tuple[CacheEvent, ...]


@dataclass
class NormalizerCounters:
    """Engine events that were not passed on unchanged, since the normalizer was made."""

    placeholders: int = 0
    """Blocks stored without tokens, so that no key can be computed."""
    other_caches: int = 0
    """Events of sliding windows, state caches or remote caches: not part of a prefix index."""
    orphans: int = 0
    """Blocks whose parent was never seen; rejected together with their descendants."""
    malformed: int = 0
    """Events that cannot be decoded, whose tokens do not fill the blocks, or whose block size is
    not the model's."""
    unknown_types: int = 0
    """Events of a type that this version does not read."""
    unknown_removed: int = 0
    """Removed blocks that were never seen."""
    overflows: int = 0
    """Times when too many events waited, so that all blocks were announced again."""
    gaps: int = 0
    """Reported losses of engine events."""


class _Row:
    """A pending event, to which keys can still be appended."""

    __slots__ = ("keys", "kind", "position", "tier")

    def __init__(self, kind: EventKind, tier: Tier, position: int, keys: list[int]) -> None:
        self.kind = kind
        self.tier = tier
        self.position = position
        self.keys = keys

    def accepts(self, kind: EventKind, tier: Tier, position: int) -> bool:
        """Whether keys of this kind, tier and position can be appended."""
        if kind is not self.kind or tier is not self.tier:
            return False
        return kind is REMOVED or position == self.position + len(self.keys)

    def split_off(self, count: int) -> CacheEvent:
        """Remove the first `count` keys and return them as an event."""
        keys, self.keys = self.keys[:count], self.keys[count:]
        event = CacheEvent(self.kind, self.tier, self.position, tuple(keys))
        self.position += len(keys) if self.kind is not REMOVED else 0
        return event


class _SuspectBlock(NamedTuple):
    """A block that existed when events were lost: its sum, and its parent's engine hash."""

    total: int
    facts: BlockMeta
    parent: EngineHash | None


class EventNormalizer:
    """Normalizer for one rank. `mismatched_block_size`: an engine's block size other than the
    model's `block_size`, if one was seen."""

    def __init__(
        self,
        block_size: int,
        secret: KeySecret,
        *,
        seed: int = BASE_SEED,
        max_pending: int = MAX_PENDING_BLOCKS,
    ) -> None:
        self.counters = NormalizerCounters()
        self.mismatched_block_size: int | None = None
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
    def held_blocks(self) -> int:
        return self._mirror.block_count

    @property
    def is_announcing(self) -> bool:
        """Whether `continue_announcement` must be called again."""
        return self._mirror.is_announcing

    def on_events(self, events: Iterable[EngineEvent], now: float) -> None:
        """Apply events of the engine, in its order. `now`: seconds of a monotonic clock. Invalid
        events raise nothing: they are counted."""
        idle = not self._pending
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                self._remove(event)
            elif isinstance(event, AllCleared):
                self._forget_all()
                self.start_announcement(now, clear=True)
            elif isinstance(event, EventsLost):
                self.counters.gaps += 1
                self._invalidate_all()
                self.start_announcement(now, clear=True)
            elif event.is_known:
                self.counters.malformed += 1
            else:
                self.counters.unknown_types += 1
        if idle:
            self._pending_since = now
        if self._pending_blocks > self._max_pending:
            self.counters.overflows += 1
            self.start_announcement(now, clear=True)

    def batch_due_at(self) -> float | None:
        """When a batch must be taken: None if nothing is pending, a past time for at once."""
        if not self._pending:
            return None
        is_due = self._pending_blocks >= EAGER_BATCH_BLOCKS
        return self._pending_since + (0.0 if is_due else MAX_BATCH_DELAY_S)

    def take_batch(self, max_blocks: int = MAX_BATCH_BLOCKS) -> EventBatch | None:
        """Remove and return the next batch, which the caller must publish; None without any."""
        if not self._pending:
            return None
        events = []
        room = max_blocks
        while self._pending and room > 0:
            row = self._pending[0]
            events.append(row.split_off(room))
            room -= len(events[-1].keys)
            if not row.keys:
                self._pending.popleft()
        self._pending_blocks -= max_blocks - room
        batch = EventBatch(self.next_event_id, tuple(events))
        self.next_event_id += len(events)
        return batch

    def start_epoch(self, now: float) -> None:
        """Start a new epoch of the worker with the same engine: ids from 0, all blocks again."""
        self.next_event_id = 0
        self.start_announcement(now, clear=True)

    def start_announcement(self, now: float, *, clear: bool) -> None:
        """Start announcing the whole mirror again, piece by piece with `continue_announcement`.
        With `clear`, a `cleared` event replaces all pending events."""
        if clear:
            self._pending.clear()
            self._pending_blocks = 0
            self._pending_since = now
            self._append([MirrorChange(EventKind.CLEARED, Tier.DEVICE, 0, [])])
        self._mirror.start_announcement(clear=clear)

    def continue_announcement(self, blocks: int, now: float) -> None:
        """Append up to `blocks` blocks of the announcement to the pending events; blocks that were
        removed meanwhile count too."""
        if not self._pending:
            self._pending_since = now
        self._append(self._mirror.continue_announcement(blocks))

    # --- engine events ---------------------------------------------------------------------------

    def _store(self, event: BlocksStored) -> None:
        if not self._accepts(event):
            return
        tiers = self._sums.setdefault(event.group, [{} for _ in Tier])
        before, position, lora_name, cache_salt = 0, 0, event.lora_name, event.cache_salt
        if event.parent is not None:
            parent_tier = next((t for t in Tier if event.parent in tiers[t]), None)
            if parent_tier is None and self._restore_chain(event.group, event.parent):
                parent_tier = Tier.DEVICE
            if parent_tier is None:
                self.counters.orphans += 1
                if not self.is_announcing:
                    self._mirror.start_announcement(clear=False)
                return
            before = tiers[parent_tier][event.parent]
            _, position, inherited_name, inherited_salt = self._mirror.block_meta(
                parent_tier, before
            )
            position += 1
            lora_name, cache_salt = lora_name or inherited_name, cache_salt or inherited_salt
        try:
            local = local_hashes(
                event.token_ids, self._block_size, lora_name=lora_name, cache_salt=cache_salt,
                mm_hashes=event.mm_hashes, seed=self._seed,
            )  # fmt: skip
        except (ValueError, OverflowError):  # numbers out of the range of tokens or hashes
            self.counters.malformed += 1
            return
        sums = prefix_sums(local, self._secret, position=position, parent_sum=before).tolist()
        parents = [before if position else ROOT, *sums[:-1]]
        facts = list(
            zip(parents, range(position, position + len(sums)), repeat(lora_name),
                repeat(cache_salt), strict=False)
        )  # fmt: skip
        tier = tier_of(event.medium)
        known = tiers[tier]
        new = set(event.block_hashes)
        if len(new) == len(sums) and known.keys().isdisjoint(new):
            known.update(zip(event.block_hashes, sums, strict=True))
            self._append(self._mirror.add_blocks(tier, sums, facts))
            return
        for engine_hash, total, fact in zip(event.block_hashes, sums, facts, strict=True):
            if engine_hash in known:
                copy = (event.group, tier, engine_hash)
                self._copies[copy] = self._copies.get(copy, 1) + 1
            else:
                known[engine_hash] = total
                self._append(self._mirror.add_blocks(tier, [total], [fact]))

    def _accepts(self, event: BlocksStored) -> bool:
        blocks = len(event.block_hashes)
        if not serves_prefixes(event):
            self.counters.other_caches += 1
            self._other_groups.add(event.group)
        elif not len(event.token_ids) or not event.block_size:
            self.counters.placeholders += 1
        elif event.block_size != self._block_size:
            self.mismatched_block_size = event.block_size
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
        tiers = self._sums.get(event.group)
        known = tiers[tier] if tiers else {}
        gone = []
        for engine_hash in event.block_hashes:
            if engine_hash not in known:
                if self._suspects.pop((event.group, engine_hash), None) is None:
                    self.counters.unknown_removed += 1
                continue
            copy = (event.group, tier, engine_hash)
            if self._copies and (copies := self._copies.pop(copy, 1)) > 1:
                if copies > 2:
                    self._copies[copy] = copies - 1
                continue
            gone.append(known.pop(engine_hash))
        self._append(self._mirror.remove_blocks(tier, gone))

    def _forget_all(self) -> None:
        self._mirror = CacheMirror()
        self._sums: dict[int, list[dict[EngineHash, int]]] = {}
        """Sum of each block by group, tier and engine hash."""
        self._copies: dict[tuple[int, Tier, EngineHash], int] = {}
        """Copies of a block under one engine hash, where there is more than one."""
        self._suspects: dict[tuple[int, EngineHash], _SuspectBlock] = {}

    def _invalidate_all(self) -> None:
        """Retract every block; those of the device tier become suspects."""
        suspects: dict[tuple[int, EngineHash], _SuspectBlock] = {}
        for group, tiers in self._sums.items():
            known = tiers[Tier.DEVICE]
            by_sum = {total: engine_hash for engine_hash, total in known.items()}
            for engine_hash, total in known.items():
                facts = self._mirror.block_meta(Tier.DEVICE, total)
                suspects[group, engine_hash] = _SuspectBlock(total, facts, by_sum.get(facts[0]))
        self._forget_all()
        self._suspects = suspects

    def _restore_chain(self, group: int, engine_hash: EngineHash) -> bool:
        """Add a suspect and its ancestors again, since the engine continues it. False, with nothing
        added, if an ancestor is unknown."""
        chain: list[tuple[EngineHash, _SuspectBlock]] = []
        known = self._sums[group][Tier.DEVICE]
        at: EngineHash | None = engine_hash
        while at is not None and at not in known:
            block = self._suspects.get((group, at))
            if block is None:
                return False
            chain.append((at, block))
            at = block.parent
            if at is None and block.facts[0] != ROOT:
                return False
        for restored, block in reversed(chain):
            del self._suspects[group, restored]
            known[restored] = block.total
            self._append(self._mirror.add_blocks(Tier.DEVICE, [block.total], [block.facts]))
        return bool(chain)

    def _append(self, changes: Iterable[MirrorChange]) -> None:
        """Append to the pending events, where possible to the last one."""
        for kind, tier, position, sums in changes:
            keys = [total or 1 for total in sums] if 0 in sums else sums  # see `keys_from_sums`
            self._pending_blocks += len(keys)
            if self._pending and self._pending[-1].accepts(kind, tier, position):
                self._pending[-1].keys += keys
            else:
                self._pending.append(_Row(kind, tier, position, keys))
