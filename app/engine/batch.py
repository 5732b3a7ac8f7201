"""What a step of a batching engine works on: its limits, its sequences, and what it reports.

The rules stand in `app/engine/step.py`, which is all that changes what is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from app.engine.block_cache import BlockCache
from app.engine.curves import Curves

WAITING, PREFILL, DECODE, OVER = range(4)
"""The phases of a sequence."""

NEVER = -1


class Shape(NamedTuple):
    """The limits of an engine."""

    block_size: int
    blocks: int
    max_batched_tokens: int = 8192
    max_sequences: int = 256
    curves: Curves = Curves()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the cache."""
        return self.block_size * self.blocks


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A request in the model. `key` is the caller's own, `priority`: lower numbers go first.

    `identities` names its leading whole blocks. The caller may append names of blocks that the
    output fills, each before the next step after the output filled it; a block whose name is
    missing then matches nothing later, nor do those after it.
    """

    key: object
    prompt_tokens: int
    max_tokens: int
    identities: list[int] = field(default_factory=list)
    priority: int = 0
    shares_output: bool = False
    """Whether identities of output blocks will come; saves the work of looking where not."""

    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens that its first admission found in the cache."""
    preemptions: int = field(default=0, init=False)
    phase: int = field(default=WAITING, init=False)
    number: int = field(default=0, init=False)
    """Its place in the order of arrival, from 1."""
    target: int = field(init=False)
    """Tokens to compute before it decodes: the prompt, with what it had made when preempted."""
    computed: int = field(default=0, init=False)
    """Of those, the computed ones; counts in prefill only."""
    told: int = field(default=0, init=False)
    """Leading blocks that were looked at for `stored`."""
    blocks: list[int] = field(default_factory=list, init=False)
    offset: int = field(default=0, init=False)
    """In decode: its tokens, less the steps of the engine."""
    needs_at: int = field(default=NEVER, init=False)
    fill_at: int = field(default=NEVER, init=False)
    ends_at: int = field(default=NEVER, init=False)

    def __post_init__(self) -> None:
        self.target = self.prompt_tokens

    def __repr__(self) -> str:
        return f"Sequence({self.key!r}, {self.prompt_tokens}+{self.max_tokens})"


class Chunk(NamedTuple):
    """Prompt tokens of one sequence that a step computed; `last`: its prompt is complete now."""

    sequence: Sequence
    tokens: int
    last: bool


class StoredRun(NamedTuple):
    """Blocks `start` to `end` of a sequence, which the cache has from now on."""

    sequence: Sequence
    start: int
    end: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """What a step did. `decoded` and the sequences of last chunks have one token more each."""

    duration_ms: float
    decoded: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]
    finished: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    removed: tuple[int, ...]
    stored: tuple[StoredRun, ...]


@dataclass(slots=True, eq=False, repr=False)
class EngineState:
    """All sequences and the cache of one engine. Changed by `app/engine/step.py` only.

    Decode costs nothing per sequence and step: a sequence in decode has `offset + clock` tokens,
    and stands in a calendar under the steps at which something happens to it: it needs a block,
    fills one, or ends. Sequences stand there in the order of their admission, without being
    sorted: an entry is made one block ahead, in that order, or on joining the decode, and who
    joins was admitted after everybody in decode.
    """

    shape: Shape
    cache: BlockCache = field(init=False)
    clock: int = field(default=0, init=False)
    """Steps so far."""
    arrivals: int = field(default=0, init=False)
    waiting: list[tuple[int, int, Sequence]] = field(default_factory=list, init=False)
    """A heap by priority and arrival; cancelled sequences lie in it until they come up."""
    waiting_count: int = field(default=0, init=False)
    partial: Sequence | None = field(default=None, init=False)
    """The one sequence whose prompt is computed in part; the last admitted one."""
    decoding: dict[Sequence, None] = field(default_factory=dict, init=False)
    """Sequences in decode, in the order of their admission."""
    decoding_now: tuple[Sequence, ...] | None = field(default=(), init=False)
    """The same as a tuple; None when it has to be made anew."""
    offsets: int = field(default=0, init=False)
    """Sum over the sequences in decode."""
    needs: dict[int, list[Sequence]] = field(default_factory=dict, init=False)
    fills: dict[int, list[Sequence]] = field(default_factory=dict, init=False)
    ends: dict[int, list[Sequence]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.shape.max_batched_tokens < self.shape.max_sequences:
            raise ValueError("max_batched_tokens must have room for max_sequences")
        self.cache = BlockCache(self.shape.blocks)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.decoding) + (self.partial is not None)
