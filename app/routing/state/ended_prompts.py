"""Ids of prompts that have ended, for as long as a copy of one may still be read from Kafka.

A prompt is a copy if it was appended before the end of its id, or within the dedup window after it,
and may wait in `batch` for a week. The owner of each lane appends ended ids to `ended-ids`
(`app/lanes/periodic_records.py`), and this view has those ids; later ones come from the ledger
(`LedgerState`). An id takes 12 bytes. The only copies of a request over HTTP are repeated appends,
whose ids the ledger has (`EndIds`). Two ids with one digest: among 10 million ids, a new one meets
one in 10^12.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvlane.streams.ports import Partition
from kvlane.streams.records import EndedIds, LogRecord
from kvlane.streams.topics import PROMPT_READABLE_MS

BLOCK_IDS = 8192
"""Ids that are sorted together; a look-up searches each block that is young enough."""
MAX_SAVED_IDS = 50_000
"""Ids in one record: 600 kB."""
MAX_UNSAVED_OFFSETS = 10_000
"""Offsets of the ledger without a record, also if no prompt has ended: a starting router reads
them."""
NEVER = -1


class _Block(NamedTuple):
    """Ids that ended at about the same time, by rising digest."""

    digests: array[int]
    ended_s: array[int]
    last_s: int

    def ended_after(self, digest: int, since_s: int) -> bool:
        at = bisect_left(self.digests, digest)
        found = at < len(self.digests) and self.digests[at] == digest
        return found and self.ended_s[at] >= since_s


class _UnsavedEnd(NamedTuple):
    offset: int
    digest: int
    ended_s: int


class EndIds:
    """Ids with the seconds of their ends, for `kept_s` at least."""

    def __init__(self, kept_s: int) -> None:
        self.recent: dict[int, int] = {}
        self._kept_s = kept_s
        self._blocks: deque[_Block] = deque()

    def add(self, digest: int, ended_s: int) -> None:
        self.recent[digest] = max(ended_s, self.recent.get(digest, NEVER))
        if len(self.recent) >= BLOCK_IDS:
            self._close_block()

    def ended_after(self, digest: int, since_s: int) -> bool:
        """True if the id ended at this second or later."""
        ended_s = self.recent.get(digest)
        if ended_s is not None and ended_s >= since_s:
            return True
        blocks = (block for block in self._blocks if block.last_s >= since_s)
        return any(block.ended_after(digest, since_s) for block in blocks)

    def _close_block(self) -> None:
        """Sort the recent ids into a block, and drop blocks that are too old."""
        ends = sorted(self.recent.items())
        last_s = max(self.recent.values())
        self._blocks.append(
            _Block(array("Q", (d for d, _ in ends)), array("I", (s for _, s in ends)), last_s)
        )
        self.recent.clear()
        self.expire(last_s - self._kept_s)

    def expire(self, before_s: int) -> None:
        while self._blocks and self._blocks[0].last_s < before_s:
            self._blocks.popleft()


class _LaneEnds:
    def __init__(self, kept_s: int) -> None:
        self.ids = EndIds(kept_s)
        self.until = NEVER
        self.unsaved: deque[_UnsavedEnd] = deque()
        self.restarts = False


class EndedPrompts:
    name = "ended ids"

    def __init__(self, dedup_window_ms: int) -> None:
        self._window_ms = dedup_window_ms
        self._kept_s = (PROMPT_READABLE_MS + dedup_window_ms) // 1000
        self._lanes: dict[int, _LaneEnds] = {}
        self._position: int | None = None

    def is_repetition(self, lane: int, request_id: str, appended_ms: int) -> bool:
        """True if a prompt, by its append time, repeats one that has ended."""
        ends = self._lanes.get(lane)
        since_s = (appended_ms - self._window_ms) // 1000
        return ends is not None and ends.ids.ended_after(id_digest(request_id), since_s)

    def add(self, lane: int, offset: int, request_id: str, ended_ms: int) -> None:
        ends = self._of(lane)
        digest, ended_s = id_digest(request_id), -(-ended_ms // 1000)
        if offset >= ends.until:
            ends.unsaved.append(_UnsavedEnd(offset, digest, ended_s))
        ends.ids.add(digest, ended_s)

    # --- the topic ---

    def saved_until(self, lane: int) -> int | None:
        """The offset of the ledger up to which the ids of a lane are in the topic."""
        ends = self._lanes.get(lane)
        return None if ends is None or ends.until == NEVER else ends.until

    def restart(self, lane: int) -> None:
        """The ledger of a lane was made anew: its offsets begin again, below those of the topic.
        The next record has the ids since, which are among the recent ones."""
        ends = self._of(lane)
        ends.until, ends.restarts = NEVER, True
        ends.unsaved = deque(_UnsavedEnd(NEVER, *end) for end in ends.ids.recent.items())

    def unsaved(self, lane: int, position: int) -> EndedIds | None:
        """The next record for the topic, if one is due. `position`: that of the ledger's view."""
        ends = self._of(lane)
        is_due = ends.unsaved or ends.until == NEVER or position - ends.until > MAX_UNSAVED_OFFSETS
        if not is_due or position <= ends.until:
            return None
        saved = [each for _, each in zip(range(MAX_SAVED_IDS), ends.unsaved, strict=False)]
        until = saved[-1].offset + 1 if len(saved) < len(ends.unsaved) else position
        return EndedIds(
            lane=lane,
            until=until,
            digests=struct.pack(f"<{len(saved)}Q", *(each.digest for each in saved)),
            ended_s=struct.pack(f"<{len(saved)}I", *(each.ended_s for each in saved)),
            restarts=ends.restarts,
        )

    def apply(self, source: Partition, log_records: Sequence[LogRecord], position: int) -> None:  # noqa: ARG002
        self._position = position
        for log_record in log_records:
            record = log_record.record
            if not isinstance(record, EndedIds):
                continue
            ends = self._of(record.lane)
            count = min(len(record.digests) // 8, len(record.ended_s) // 4)
            digests = struct.unpack_from(f"<{count}Q", record.digests)
            for digest, ended_s in zip(
                digests, struct.unpack_from(f"<{count}I", record.ended_s), strict=True
            ):
                ends.ids.add(digest, ended_s)
            ends.until = record.until if record.restarts else max(ends.until, record.until)
            ends.restarts = False
            while ends.unsaved and ends.unsaved[0].offset < ends.until:
                ends.unsaved.popleft()

    def _of(self, lane: int) -> _LaneEnds:
        ends = self._lanes.get(lane)
        if ends is None:
            ends = self._lanes[lane] = _LaneEnds(self._kept_s)
        return ends

    # --- the rest of a view ---

    def position(self, source: Partition) -> int | None:  # noqa: ARG002
        return self._position

    def forget(self, source: Partition) -> None:  # noqa: ARG002
        """Read the topic from its start again; the ids that were read are right."""
        self._position = None

    def snapshot(self, source: Partition) -> bytes:  # noqa: ARG002
        """Empty: the topic is one."""
        return b""

    def restore(self, source: Partition, data: bytes, position: int) -> None:  # noqa: ARG002
        self._position = position

    def state_hash(self, source: Partition) -> str:  # noqa: ARG002
        """Constant: the state depends on the ledger, too."""
        return ""


def id_digest(request_id: str) -> int:
    digest = hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
