"""One step of a continuously batching engine, as a pure model: what it costs and what comes out.

    admit ─► waiting ─► prefill, in chunks ─► decode, a token a step ─► over
                ▲                                │
                └─────────── preempted ◄─────────┘

`step` takes an `EngineState` from the beginning of a step to its end and says in a `Step` how long
that took and what it produced. The caller owns the time: it lets `duration_ms` pass, then hands the
results on and calls `step` again. Whatever is admitted or cancelled meanwhile counts from the next
step on, as in an engine that is busy. No clock, no randomness, no tokens: the content of a sequence
is a list of block identities (`app/engine/block_cache.py`), so the same model drives the simulated
engine and the replay of traces that have nothing but hashes.

A step, in this order; L is the number of tokens of a sequence, prompt and output, B the block size:

 1. Sequences in decode, in the order of their admission, need ceil(L / B) blocks. One that finds
    none free or evictable makes the last one go (highest priority number, then latest arrival,
    itself included) until there is one. Who goes gives up all blocks and waits again in its old
    place; it will compute its tokens anew as far as the cache does not have them by then.
 2. A block that L fills becomes shareable if its identity is known, and the one before it is
    shareable too.
 3. The batch has room for `max_batched_tokens`: one for each sequence in decode; then as many as
    fit of a prompt that was begun before; then, if nobody was preempted in this step, of waiting
    sequences by priority and arrival, up to `max_sequences` in all. The first that does not fit
    keeps those behind it waiting.
 4. Admission needs blocks for the whole prompt at once. Leading whole blocks that the cache has are
    shared and not computed, but at least one token is: of a prompt of n tokens at most
    (n - 1) // B blocks. All its whole blocks can be shared from here on.
 5. duration = prefill_ms(new prompt tokens of all chunks) + decode_ms(sum of L over sequences in
    decode / capacity in tokens), each only if there is such work. Shared blocks count as often as
    they are used.
 6. At the end every sequence in decode has one token more, and so has each whose last chunk was
    computed. Those with `max_tokens` are over and give up their blocks, those in decode first.

A sequence's last token is never computed, so p + g - 1 of p + g tokens are in the cache. `removed`
are the blocks that were evicted at the beginning of the step, `stored` those that it computed: what
is in both was removed first.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from app.engine.batch import (
    DECODE,
    NEVER,
    OVER,
    PREFILL,
    WAITING,
    Chunk,
    EngineState,
    Sequence,
    Step,
    StoredRun,
)

IDLE_PLACES = 64
"""Places of cancelled sequences that the heap of waiting ones may hold, besides one for each."""


def admit(state: EngineState, sequence: Sequence) -> None:
    """Let a new sequence wait for its turn. Raises ValueError for one that could never run."""
    tokens = sequence.prompt_tokens + sequence.max_tokens - 1
    if sequence.prompt_tokens < 1 or sequence.max_tokens < 1:
        raise ValueError("a sequence has at least one token of prompt and one of output")
    if tokens > state.shape.capacity_tokens:
        raise ValueError(f"{tokens} tokens, but the cache has {state.shape.capacity_tokens}")
    assert not sequence.number, "a sequence is admitted once"
    state.arrivals += 1
    sequence.number = state.arrivals
    _wait(state, sequence)


def cancel(state: EngineState, sequence: Sequence) -> None:
    """Take a sequence out, whatever it is doing; nothing happens when it is over."""
    if sequence.phase == WAITING:
        state.waiting_count -= 1
        sequence.phase = OVER  # its place in the heap is dropped when it comes up, or here
        if len(state.waiting) > 2 * state.waiting_count + IDLE_PLACES:
            state.waiting[:] = [place for place in state.waiting if place[2].phase != OVER]
            heapify(state.waiting)
    elif sequence.phase != OVER:
        _withdraw(state, sequence)
    sequence.phase = OVER


def clear(state: EngineState) -> bool:
    """Empty the cache; False, and nothing done, while sequences hold blocks of it."""
    return state.cache.clear()


def tokens_of(state: EngineState, sequence: Sequence) -> int:
    """Tokens that a sequence has now, prompt and output; one that runs or waits."""
    return sequence.offset + state.clock + 1 if sequence.phase == DECODE else sequence.target


def step(state: EngineState) -> Step | None:
    """Take the engine through one step; None, and nothing done, when there is no work."""
    if not state.decoding and state.partial is None and not state.waiting_count:
        return None
    shape = state.shape
    state.clock = clock = state.clock + 1
    preempted = _find_blocks(state, clock) if clock in state.needs else ()
    filled = _share_filled(state, clock) if clock in state.fills else ()
    decoded = state.decoding_now
    if decoded is None:
        decoded = state.decoding_now = tuple(state.decoding)
    lengths = state.offsets + len(decoded) * clock
    chunks: list[Chunk] = []
    if state.partial is not None or state.waiting_count:
        _fill_batch(state, chunks, shape.max_batched_tokens - len(decoded), admits=not preempted)
    duration_ms = shape.curves.prefill_ms(sum([chunk.tokens for chunk in chunks]))
    if decoded:
        duration_ms += shape.curves.decode_ms(lengths / shape.capacity_tokens)
    removed: tuple[int, ...] = ()
    if state.cache.removed:
        removed = tuple(state.cache.removed)
        state.cache.removed.clear()
    stored: list[StoredRun] = []
    for sequence in filled:
        _tell(state, sequence, sequence.offset + clock, stored)
    finished = _end(state, clock) if clock in state.ends else []
    if chunks:
        _complete(state, clock, chunks, stored, finished)
    return Step(
        duration_ms, decoded, tuple(chunks), tuple(finished), preempted, removed, tuple(stored)
    )


# --- the beginning of a step ---------------------------------------------------------------------


def _find_blocks(state: EngineState, clock: int) -> tuple[Sequence, ...]:
    """Rule 1; returns who was preempted."""
    needy = state.needs.pop(clock)
    preempted: list[Sequence] = []
    for sequence in needy:
        while sequence.needs_at == clock and not state.cache.take(sequence.blocks):
            victim = _last(state)
            _preempt(state, victim)
            preempted.append(victim)
        if sequence.needs_at == clock:
            _plan_need(state, sequence)
    return tuple(preempted)


def _share_filled(state: EngineState, clock: int) -> list[Sequence]:
    """Rule 2; returns whose blocks became full and still are in decode."""
    filled = state.fills.pop(clock)
    for sequence in filled:
        index = (sequence.offset + clock) // state.shape.block_size - 1
        blocks, names = sequence.blocks, sequence.identities
        if index < len(names) and (index == 0 or blocks[index - 1] >= 0):
            state.cache.share(blocks, index, names[index])
        _plan_fill(state, sequence)
    return filled


def _fill_batch(state: EngineState, chunks: list[Chunk], room: int, *, admits: bool) -> None:
    """Rules 3 and 4; the chunks of this step."""
    partial = state.partial
    if partial is not None:
        room -= _chunk(partial, room, chunks)
    slots = state.shape.max_sequences - state.running
    while admits and room > 0 and slots > 0 and state.waiting_count:
        sequence = state.waiting[0][2]
        if sequence.phase == OVER:
            heappop(state.waiting)
            continue
        if not _begin(state, sequence):
            return
        heappop(state.waiting)
        state.waiting_count -= 1
        slots -= 1
        room -= _chunk(sequence, room, chunks)


def _begin(state: EngineState, sequence: Sequence) -> bool:
    """Give a sequence the blocks of its whole prompt; False, and nothing done, if there are not."""
    cache, size = state.cache, state.shape.block_size
    matched, inactive = cache.match(sequence.identities, (sequence.target - 1) // size)
    total = -(-sequence.target // size)
    if total - matched > cache.available - inactive:
        return False
    sequence.blocks = cache.acquire(sequence.identities[: sequence.target // size], total)
    sequence.computed = matched * size
    if not sequence.preemptions:
        sequence.cached_tokens = sequence.computed
    sequence.phase = PREFILL
    return True


def _chunk(sequence: Sequence, room: int, chunks: list[Chunk]) -> int:
    left = sequence.target - sequence.computed
    tokens = min(left, room)
    chunks.append(Chunk(sequence, tokens, tokens == left))
    return tokens


# --- its end -------------------------------------------------------------------------------------


def _end(state: EngineState, clock: int) -> list[Sequence]:
    """Rule 6 for sequences in decode; returns who is over."""
    finished = state.ends.pop(clock)
    for sequence in finished:
        _withdraw(state, sequence)
        sequence.phase = OVER
    return finished


def _complete(
    state: EngineState,
    clock: int,
    chunks: list[Chunk],
    stored: list[StoredRun],
    finished: list[Sequence],
) -> None:
    """Rule 6 for sequences in prefill."""
    state.partial = None
    for sequence, tokens, last in chunks:
        sequence.computed += tokens
        _tell(state, sequence, sequence.computed, stored)
        if not last:
            state.partial = sequence
        elif sequence.target + 1 - sequence.prompt_tokens >= sequence.max_tokens:
            state.cache.release(sequence.blocks, sequence.target // state.shape.block_size)
            sequence.phase = OVER
            finished.append(sequence)
        else:
            _join(state, sequence, clock)


def _join(state: EngineState, sequence: Sequence, clock: int) -> None:
    """From prefill to decode, with the first token made."""
    sequence.phase = DECODE
    sequence.offset = sequence.target - clock
    state.offsets += sequence.offset
    state.decoding[sequence] = None
    state.decoding_now = None
    sequence.ends_at = sequence.prompt_tokens + sequence.max_tokens - 1 - sequence.offset
    state.ends.setdefault(sequence.ends_at, []).append(sequence)
    _plan_need(state, sequence)
    if sequence.shares_output:
        _plan_fill(state, sequence)


def _plan_need(state: EngineState, sequence: Sequence) -> None:
    at = len(sequence.blocks) * state.shape.block_size + 1 - sequence.offset
    sequence.needs_at = at
    state.needs.setdefault(at, []).append(sequence)


def _plan_fill(state: EngineState, sequence: Sequence) -> None:
    """The step at which its next output block is full; one after the prompt's at least."""
    size = state.shape.block_size
    now = sequence.offset + state.clock
    at = (now // size + 1) * size - sequence.offset
    sequence.fill_at = at
    state.fills.setdefault(at, []).append(sequence)


def _tell(state: EngineState, sequence: Sequence, computed: int, stored: list[StoredRun]) -> None:
    """Note what of a sequence's blocks the cache has now and has not told of before."""
    full = computed // state.shape.block_size
    for start, end in state.cache.tell(sequence.blocks, sequence.told, full):
        stored.append(StoredRun(sequence, start, end))
    sequence.told = full


# --- preemption ----------------------------------------------------------------------------------


def _last(state: EngineState) -> Sequence:
    """Who has to go first."""
    if state.partial is not None:
        return max([state.partial, *state.decoding], key=_by_rank)
    return max(state.decoding, key=_by_rank)


def _preempt(state: EngineState, sequence: Sequence) -> None:
    tokens = sequence.offset + state.clock if sequence.phase == DECODE else sequence.target
    _withdraw(state, sequence)
    sequence.target = tokens
    sequence.preemptions += 1
    _wait(state, sequence)


def _wait(state: EngineState, sequence: Sequence) -> None:
    sequence.phase = WAITING
    sequence.computed = sequence.told = 0
    state.waiting_count += 1
    heappush(state.waiting, (sequence.priority, sequence.number, sequence))


def _withdraw(state: EngineState, sequence: Sequence) -> None:
    """Take a running sequence out of the batch and the calendar, and release its blocks.

    All its tokens but the last are computed. Within a step, when it is preempted, so is not the one
    before; a block that counts as computed for it has no name then, and is the next one to be taken
    whether it is free or the oldest of all, since preemption begins when there is no other.
    """
    computed = sequence.computed
    if sequence.phase == DECODE:
        computed = sequence.offset + state.clock
        del state.decoding[sequence]
        state.decoding_now = None
        state.offsets -= sequence.offset
        for calendar, at in (
            (state.needs, sequence.needs_at),
            (state.fills, sequence.fill_at),
            (state.ends, sequence.ends_at),
        ):
            if at in calendar:
                calendar[at].remove(sequence)
        sequence.needs_at = sequence.fill_at = sequence.ends_at = NEVER
    elif state.partial is sequence:
        state.partial = None
    state.cache.release(sequence.blocks, computed // state.shape.block_size)


def _by_rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.number
