"""State of the engine model: its limits, its sequences, and the result of a step.

The rules are in `app/engine/simulated/step.py`, the only module that changes this state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvlane.app.engine.simulated.block_cache import BlockCache
from kvlane.app.perf_curves import PerfCurves

WAITING, PREFILL, DECODE, HELD, FINISHED = range(5)
"""The phases of a sequence. HELD: its prompt is computed, its blocks wait for their transfer."""

NO_STEP = -1


class EngineLimits(NamedTuple):
    block_size: int
    cache_blocks: int
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    curves: PerfCurves = PerfCurves()

    @property
    def capacity_tokens(self) -> int:
        return self.block_size * self.cache_blocks


@dataclass(slots=True, eq=False, repr=False)
class BatchSequence:
    """A request in the model. `key` belongs to the caller; lower `priority` numbers go first.

    `block_ids`: of its leading whole blocks. The caller may append identities of blocks that the
    output fills, each before the step that follows; a block without one, and those after it, match
    no prompt.
    """

    key: object
    prompt_tokens: int
    max_tokens: int
    block_ids: list[int] = field(default_factory=list)
    priority: int = 0
    caches_output: bool = False
    """Whether identities of output blocks will be appended; if not, filled blocks need no step."""
    is_received: bool = False
    """Whether another engine has computed its prompt, so that it begins with decode."""
    is_handed_over: bool = False
    """Whether its blocks are kept after prefill, until `release_held`; `max_tokens` is 1."""

    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the cache at its first admission."""
    preemptions: int = field(default=0, init=False)
    phase: int = field(default=WAITING, init=False)
    arrival: int = field(default=0, init=False)
    """Position in the order of arrival, from 1."""
    prefill_target: int = field(init=False)
    """Tokens to compute before decode: the prompt, and the tokens made before a preemption."""
    computed_tokens: int = field(default=0, init=False)
    """Tokens of `prefill_target` computed so far; valid in prefill only."""
    reported_blocks: int = field(default=0, init=False)
    """Leading blocks that were checked for `stored`."""
    blocks: list[int] = field(default_factory=list, init=False)
    offset: int = field(default=0, init=False)
    """In decode: its number of tokens minus the number of engine steps."""
    needs_block_at: int = field(default=NO_STEP, init=False)
    fills_block_at: int = field(default=NO_STEP, init=False)
    ends_at: int = field(default=NO_STEP, init=False)

    def __post_init__(self) -> None:
        self.prefill_target = self.prompt_tokens

    def __repr__(self) -> str:
        return f"Sequence({self.key!r}, {self.prompt_tokens}+{self.max_tokens})"


class PrefillChunk(NamedTuple):
    """Prompt tokens of one sequence computed by a step; `is_last`: the prompt is now complete."""

    sequence: BatchSequence
    tokens: int
    is_last: bool


class StoredBlocks(NamedTuple):
    """Blocks `start` to `end` of a sequence that a step added to the cache."""

    sequence: BatchSequence
    start: int
    end: int


class StepResult(msgspec.Struct, frozen=True, gc=False):
    """Result of a step. `decoded` and the sequences of last chunks have one more token each.
    `received`: those of `decoded` whose prompts came from another engine, in their first step."""

    duration_ms: float
    decoded: tuple[BatchSequence, ...]
    chunks: tuple[PrefillChunk, ...]
    finished: tuple[BatchSequence, ...]
    preempted: tuple[BatchSequence, ...]
    removed: tuple[int, ...]
    stored: tuple[StoredBlocks, ...]
    received: tuple[BatchSequence, ...] = ()


@dataclass(slots=True, eq=False, repr=False)
class BatchState:
    """All sequences and the cache of one engine. Changed by `app/engine/simulated/step.py` only.

    Decode costs nothing per sequence and step: a sequence in decode has `offset + clock` tokens,
    and calendars list it under the steps at which it needs a block, fills one, or ends. Entries are
    in the order of admission without sorting.
    """

    limits: EngineLimits
    cache: BlockCache = field(init=False)
    step_count: int = field(default=0, init=False)
    """Steps so far."""
    arrivals: int = field(default=0, init=False)
    waiting: list[tuple[int, int, BatchSequence]] = field(default_factory=list, init=False)
    """A heap by priority and arrival; cancelled sequences stay until they reach the top."""
    waiting_count: int = field(default=0, init=False)
    received: deque[BatchSequence] = field(default_factory=deque, init=False)
    """Sequences that wait for blocks for their transferred prompts; finished ones stay until they
    are first."""
    partial_prefill: BatchSequence | None = field(default=None, init=False)
    """The sequence whose prompt is partly computed, if any; the last admitted one."""
    decoding: dict[BatchSequence, None] = field(default_factory=dict, init=False)
    """Sequences in decode, in the order of their admission."""
    decoding_tuple: tuple[BatchSequence, ...] | None = field(default=(), init=False)
    """`decoding` as a tuple; None if it must be rebuilt."""
    offset_sum: int = field(default=0, init=False)
    """Sum of the offsets of the sequences in decode."""
    block_calendar: dict[int, list[BatchSequence]] = field(default_factory=dict, init=False)
    fill_calendar: dict[int, list[BatchSequence]] = field(default_factory=dict, init=False)
    end_calendar: dict[int, list[BatchSequence]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.limits.max_batched_tokens < self.limits.max_sequences:
            raise ValueError("max_batched_tokens must not be below max_sequences")
        self.cache = BlockCache(self.limits.cache_blocks)

    @property
    def running_count(self) -> int:
        """Sequences that hold blocks."""
        return len(self.decoding) + (self.partial_prefill is not None)
