"""A reference implementation of the engine's step model, written for clarity, not speed.

`app/engine/simulated/step.py` and `app/engine/simulated/block_cache.py` are compared with it.
Shares nothing with them but the timing curves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlane.app.engine.simulated.batch import EngineLimits


@dataclass(eq=False)
class PlainBlock:
    name: int | None = None
    users: int = 0
    released: int = 0
    """Order of the last release; the smallest number is evicted first."""
    got: bool = False
    """Whether it was reported as stored."""


class PlainCache:
    """A list of blocks, searched linearly."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[PlainBlock] = []
        self.releases = 0
        self.removed: list[int] = []

    def find(self, name: int) -> PlainBlock | None:
        return next((b for b in self.blocks if b.name == name), None)

    def idle(self) -> list[PlainBlock]:
        return sorted((b for b in self.blocks if not b.users), key=lambda b: b.released)

    def available(self) -> int:
        return self.capacity - sum(1 for b in self.blocks if b.users)

    def new(self, name: int | None) -> PlainBlock:
        if len(self.blocks) == self.capacity:
            oldest = self.idle()[0]
            self.blocks.remove(oldest)
            if oldest.got:
                assert oldest.name is not None
                self.removed.append(oldest.name)
        block = PlainBlock(name)
        self.blocks.append(block)
        return block

    def use(self, name: int | None) -> PlainBlock:
        block = None if name is None else self.find(name)
        block = block or self.new(name)
        block.users += 1
        return block

    def release(self, blocks: list[PlainBlock], computed: int) -> None:
        for index, block in reversed(list(enumerate(blocks))):
            block.users -= 1
            if block.users:
                continue
            if index < computed or block.got:
                self.releases += 1
                block.released = self.releases
            else:
                self.blocks.remove(block)


@dataclass(eq=False)
class ReferenceSequence:
    """A request; the names of its blocks are all known beforehand."""

    key: int
    prompt: int
    limit: int
    names: list[int]
    priority: int = 0
    received: bool = False
    handed_over: bool = False
    made: int = 0
    computed: int = 0
    target: int = 0
    cached: int | None = None
    blocks: list[PlainBlock] = field(default_factory=list)
    over: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.made

    def known(self, size: int) -> list[int]:
        """Names of the blocks that its present tokens fill."""
        return self.names[: self.tokens // size]


@dataclass
class ReferenceStep:
    """What a step did, by keys."""

    duration_ms: float
    decoded: list[int]
    chunks: list[tuple[int, int, bool]]
    finished: list[int]
    preempted: list[int]
    removed: list[int]
    stored: list[int]
    received: list[int] = field(default_factory=list)


class ReferenceEngine:
    """The rules of `app/engine/simulated/step.py`, one loop each."""

    def __init__(self, shape: EngineLimits) -> None:
        self.shape = shape
        self.cache = PlainCache(shape.cache_blocks)
        self.waiting: list[ReferenceSequence] = []
        self.received: list[ReferenceSequence] = []
        self.held: list[ReferenceSequence] = []
        self.running: list[ReferenceSequence] = []

    def admit(self, sequence: ReferenceSequence) -> None:
        sequence.target = sequence.tokens
        if sequence.received and not sequence.made:
            self.received.append(sequence)
            return
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: (s.priority, s.key))

    def cancel(self, sequence: ReferenceSequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.received:
            self.received.remove(sequence)
        elif sequence in self.held:
            self.held.remove(sequence)
            self.cache.release(sequence.blocks, sequence.prompt // self.shape.block_size)
        elif sequence in self.running:
            self.running.remove(sequence)
            decodes = sequence.computed >= sequence.target
            computed = sequence.tokens - 1 if decodes else sequence.computed
            self.cache.release(sequence.blocks, computed // self.shape.block_size)
        sequence.over = True

    def step(self) -> ReferenceStep | None:
        if not self.running and not self.waiting and not self.received:
            return None
        preempted: list[int] = []
        decoding = [s for s in self.running if s.computed >= s.target]
        for sequence in decoding:
            self._find_blocks(sequence, preempted)
        decoding = [s for s in decoding if s in self.running]
        for sequence in decoding:
            self._share_filled(sequence)
        received = [] if preempted else self._begin_received()
        decoding += received
        chunks = self._fill_batch(len(decoding), admits=not preempted)
        if not decoding and not chunks:
            return None
        curves = self.shape.curves
        duration_ms = curves.prefill_ms(sum(n for _, n in chunks))
        if decoding:
            held = sum(s.tokens for s in decoding)
            duration_ms += curves.decode_ms(held / self.shape.capacity_tokens)
        removed, self.cache.removed = self.cache.removed, []
        stored: list[int] = []
        for sequence in decoding:
            self._tell(sequence, sequence.tokens, stored)
        done = ReferenceStep(
            duration_ms, [s.key for s in decoding], [], [], preempted, removed, stored,
            [s.key for s in received],
        )  # fmt: skip
        for sequence in decoding:
            self._made(sequence, done)
        for sequence, tokens in chunks:
            sequence.computed += tokens
            last = sequence.computed == sequence.target
            done.chunks.append((sequence.key, tokens, last))
            self._tell(sequence, sequence.computed, stored)
            if last:
                self._made(sequence, done)
        return done

    def _made(self, sequence: ReferenceSequence, done: ReferenceStep) -> None:
        sequence.made += 1
        if sequence.made == sequence.limit:
            if sequence.handed_over:
                self.running.remove(sequence)
                self.held.append(sequence)
            else:
                self.cancel(sequence)
            done.finished.append(sequence.key)

    def _find_blocks(self, sequence: ReferenceSequence, preempted: list[int]) -> None:
        while sequence in self.running:
            if len(sequence.blocks) * self.shape.block_size >= sequence.tokens:
                return
            if self.cache.available():
                sequence.blocks.append(self.cache.use(None))
                continue
            victim = max(self.running, key=lambda s: (s.priority, s.key))
            self.cancel(victim)
            victim.over, victim.computed, victim.blocks = False, 0, []
            preempted.append(victim.key)
            self.admit(victim)

    def _share_filled(self, sequence: ReferenceSequence) -> None:
        size = self.shape.block_size
        index = sequence.tokens // size - 1
        if sequence.tokens % size or index >= len(sequence.names):
            return
        if index and sequence.blocks[index - 1].name is None:
            return
        self.cache.release([sequence.blocks[index]], 0)
        sequence.blocks[index] = self.cache.use(sequence.names[index])

    def _begin_received(self) -> list[ReferenceSequence]:
        begun: list[ReferenceSequence] = []
        while self.received and len(self.running) < self.shape.max_sequences:
            sequence = self.received[0]
            if not self._begin(sequence, sequence.target):
                break
            sequence.computed, sequence.cached = sequence.target, 0
            begun.append(self.received.pop(0))
            # one whose prompt is partly computed decodes after it
            partial = [s for s in self.running if s.computed < s.target]
            self.running.insert(len(self.running) - len(partial), sequence)
        return begun

    def _fill_batch(self, room: int, *, admits: bool) -> list[tuple[ReferenceSequence, int]]:
        room = self.shape.max_batched_tokens - room
        chunks = []
        for sequence in self.running:
            if sequence.computed < sequence.target:
                tokens = min(sequence.target - sequence.computed, room)
                chunks.append((sequence, tokens))
                room -= tokens
        while admits and self.waiting and room and len(self.running) < self.shape.max_sequences:
            sequence = self.waiting[0]
            if not self._begin(sequence, sequence.target - 1):
                break
            self.running.append(self.waiting.pop(0))
            tokens = min(sequence.target - sequence.computed, room)
            chunks.append((sequence, tokens))
            room -= tokens
        return chunks

    def _begin(self, sequence: ReferenceSequence, shareable: int) -> bool:
        size = self.shape.block_size
        named = sequence.known(size)
        found: list[PlainBlock] = []
        for name in named[: shareable // size]:
            block = self.cache.find(name)
            if block is None:
                break
            found.append(block)
        total = -(-sequence.target // size)
        idle = sum(1 for block in found if not block.users)
        if total - len(found) > self.cache.available() - idle:
            return False
        for block in found:
            block.users += 1
        rest: list[int | None] = [*named, *[None] * (total - len(named))]
        sequence.blocks = found + [self.cache.use(name) for name in rest[len(found) :]]
        sequence.computed = len(found) * size
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return True

    def _tell(self, sequence: ReferenceSequence, computed: int, stored: list[int]) -> None:
        for block in sequence.blocks[: computed // self.shape.block_size]:
            if block.name is not None and not block.got:
                block.got = True
                stored.append(block.name)
