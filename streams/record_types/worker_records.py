"""Records of `assignments`, `kv-events` and `capacity`: commands to workers, their heartbeats and
cache changes, the free capacity of routers, and shares of gateways in tenants' limits.
"""

# ruff: noqa: RUF012 - msgspec gives each struct its own copy of an empty default

from __future__ import annotations

from typing import Any, Literal

from kvlane.streams.record_base import InternalRecord, Phase
from kvlane.streams.record_types.ledger_records import RequestOffset
from kvlane.streams.request import Request

WorkerState = Literal["ready", "draining", "unhealthy"]


class Assignment(InternalRecord, frozen=True):
    """Run this.

    `taken`: tokens the reader has (u32, little endian), to continue from, with `taken_chars` of
    text and `taken_data_chars` in the strings of `Chunk.data`; -1: unknown. `taken_data`: only for
    earlier versions. `handoff_until_ms`: in phase decode, when the blocks of its prefill may be
    gone, 0: never; with `Request.bootstrap_info` the time until which the run may wait for their
    transfer. Past it the worker refuses the run.
    """

    worker: str
    epoch: int
    attempt: int
    phase: Phase
    request: Request
    origin: RequestOffset
    responses_from: int
    deadline_ms: int
    budget_s: float
    rank: int = 0
    taken: bytes = b""
    taken_chars: int = 0
    handoff_until_ms: int = 0
    taken_data: int = -1
    taken_data_chars: int = -1


class CancelRun(InternalRecord, frozen=True):
    """Stop this run; the reader no longer needs it."""

    worker: str
    epoch: int
    id: str
    attempt: int
    phase: Phase
    reason: str = ""


class Lost(InternalRecord, frozen=True):
    """This epoch of the worker counts as dead, whether it still runs or not."""

    worker: str
    epoch: int
    by: str = ""
    silent_ms: int = 0


class Blocks(InternalRecord, frozen=True):
    """Cache changes of one worker, as columns: a row per event, keys of all rows end to end.

    kinds u8 (0 stored, 1 removed, 2 cleared), tiers u8, positions u32 (of the first block), counts
    u32, keys u64; little endian. stored: `count` keys at consecutive positions.
    """

    worker: str
    epoch: int
    first_event_id: int
    rank: int = 0
    model: str = ""
    hash_fingerprint: str = ""
    kinds: bytes = b""
    tiers: bytes = b""
    positions: bytes = b""
    counts: bytes = b""
    keys: bytes = b""


class RunProgress(InternalRecord, frozen=True):
    """An open run, as its worker reports it. `expected_output_tokens`: by its request; 0:
    unsaid."""

    id: str
    attempt: int
    phase: Phase
    output_tokens: int = 0
    expected_output_tokens: int = 0


class EngineStats(InternalRecord, frozen=True):
    """Current figures of an engine; `steps` since its start."""

    running: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    steps: int = 0


class Heartbeat(InternalRecord, frozen=True):
    """The worker is alive. `slot_offset`: the next offset of its assignments. `last_event_ids`: by
    rank the last cache event of this epoch, -1: none. `waiting`: runs outside the engine, `engine`:
    inside."""

    worker: str
    epoch: int
    slot_offset: int
    state: WorkerState = "ready"
    reason: str = ""
    running: tuple[RunProgress, ...] = ()
    waiting: int = 0
    last_event_ids: tuple[int, ...] = ()
    engine: EngineStats | None = None


class Probe(InternalRecord, frozen=True):
    """A router's probe record: tests whether the broker still accepts appends."""

    by: str


class ReportedWaits(InternalRecord, frozen=True):
    """The requests that have waited longest in a router: id, broker time since when, position of
    the reason in `reasons` (none is malformed). `left_out`: how many more wait."""

    reasons: tuple[str, ...] = ()
    requests: tuple[tuple[str, int, int], ...] = ()
    left_out: int = 0

    def __post_init__(self) -> None:
        if not all(0 <= number < len(self.reasons) for _, _, number in self.requests):
            raise ValueError(f"a request has none of the {len(self.reasons)} reasons")


class RoutingReport(InternalRecord, frozen=True):
    """How a router routes. `own`: its own settings that an order may replace. `order`: offset of
    the `RoutingOrder` that it has read, None without one; `problem`: why it does not use that."""

    own: dict[str, Any] = {}
    order: int | None = None
    problem: str = ""


class RouterCapacity(InternalRecord, frozen=True):
    """Remaining capacity of a router: requests, and tokens and bytes of their prompts.

    `positions`: its lanes, each with the offset up to which it had read `requests`.
    `batch_requests`: its room for class batch, apart. `waits`, `routing`: None in most records.
    """

    router: str
    requests: int = 0
    tokens: int = 0
    bytes: int = 0
    positions: dict[int, int] = {}
    batch_requests: int = 0
    waits: ReportedWaits | None = None
    routing: RoutingReport | None = None


class LimitClaims(InternalRecord, frozen=True):
    """A gateway's shares of the limits of some tenants, held and wanted: requests, readers, tokens,
    requests a minute, tokens a minute, a day, a month. `number` rises with each record; a lower one
    has no effect. `usage_offsets`: by lane, the offset after the last record of `usage` that the
    gateway had read; () if it reads none."""

    gateway: str
    number: int
    held: dict[str, tuple[int, ...]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    usage_offsets: tuple[int, ...] = ()
