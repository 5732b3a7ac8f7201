"""One step of a continuously batching engine, as a pure model: its duration and its results.

    admit ─► waiting ─► prefill, in chunks ─┬─► decode, a token a step ─► over
                ▲                           │      │        ▲
                └─────────── preempted ◄────│──────┘     received
                                            └─► held, until another engine has the blocks

`run_step` takes a `BatchState` from the beginning of a step to its end and returns a `StepResult`.
The caller waits `duration_ms`, delivers the results and calls again; sequences admitted or
cancelled meanwhile count from the next step on. There is no clock, no randomness and no token: a
sequence is a list of block identities (`app/engine/simulated/block_cache.py`), so the model also
drives the replay of traces that contain only hashes.

A step, in this order; L is the number of tokens of a sequence, prompt and output, B the block size:

 1. Sequences in decode, in the order of their admission, need ceil(L / B) blocks. If no block is
    free or evictable, the last sequence (highest priority number, then latest arrival, possibly
    itself) is preempted until there is one. A preempted sequence releases all blocks and waits
    again at its old position; later it recomputes its tokens that are no longer cached.
 2. A block that L fills becomes shareable if its identity is known and the one before it is
    shareable.
 3. If no sequence was preempted in this step, sequences whose prompts another engine has computed
    begin with decode in the order of their arrival, up to `max_sequences` in all. Each needs
    blocks for its whole prompt, of which it shares those that are cached; the first one that does
    not fit blocks those behind it.
 4. The batch holds `max_batched_tokens`: one for each sequence in decode; then as many as fit of a
    partly computed prompt; then, if no sequence was preempted in this step, of waiting sequences by
    priority and arrival, up to `max_sequences` in all. The first one that does not fit blocks those
    behind it.
 5. Admission needs blocks for the whole prompt at once. Leading whole blocks in the cache are
    shared and not computed, but at least one token is computed: of a prompt of n tokens at most
    (n - 1) // B blocks are shared. All its whole blocks can be shared from here on.
 6. duration = prefill_ms(new prompt tokens of all chunks) + decode_ms(sum of L over sequences in
    decode / capacity in tokens), each only if there is such work. Shared blocks count as often as
    they are used.
 7. At the end every sequence in decode has one more token, and so has each whose last chunk was
    computed. Those with `max_tokens` end and release their blocks, those in decode first. A
    sequence that is handed over keeps its blocks until they are transferred.

A sequence's last token is never computed, so p + g - 1 of p + g tokens are in the cache. `evicted`
are the blocks evicted at the beginning of the step, `stored` those that it computed: a block in
both was removed first.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvlane.app.engine.simulated.batch import (
    DECODE,
    FINISHED,
    HELD,
    NO_STEP,
    PREFILL,
    WAITING,
    BatchSequence,
    BatchState,
    PrefillChunk,
    StepResult,
    StoredBlocks,
)

MAX_STALE_ENTRIES = 64
"""Entries of cancelled sequences that the heap may hold besides one per waiting sequence."""


def add_sequence(state: BatchState, sequence: BatchSequence) -> None:
    """Queue a new sequence. Raises ValueError for one that could never run."""
    tokens = sequence.prompt_tokens + sequence.max_tokens - 1
    if sequence.prompt_tokens < 1 or sequence.max_tokens < 1:
        raise ValueError("a sequence needs at least one token of prompt and one of output")
    if tokens > state.limits.capacity_tokens:
        raise ValueError(f"{tokens} tokens exceed the cache of {state.limits.capacity_tokens}")
    assert not sequence.arrival, "a sequence is admitted once"
    state.arrivals += 1
    sequence.arrival = state.arrivals
    if sequence.is_received:
        state.received.append(sequence)
    else:
        _enqueue(state, sequence)


def remove_sequence(state: BatchState, sequence: BatchSequence) -> None:
    """Remove a sequence in any phase; no effect on one that has ended."""
    if sequence.phase == HELD:
        release_held(state, sequence)
    elif sequence.phase == WAITING and sequence in state.received:
        state.received.remove(sequence)
    elif sequence.phase == WAITING:
        state.waiting_count -= 1
        sequence.phase = FINISHED  # its heap entry is dropped when it reaches the top, or here
        if len(state.waiting) > 2 * state.waiting_count + MAX_STALE_ENTRIES:
            state.waiting[:] = [place for place in state.waiting if place[2].phase != FINISHED]
            heapify(state.waiting)
    elif sequence.phase != FINISHED:
        _remove_running(state, sequence)
    sequence.phase = FINISHED


def release_held(state: BatchState, sequence: BatchSequence) -> None:
    """Release the blocks of a sequence that was handed over: they were transferred, or the lease
    is over."""
    assert sequence.phase == HELD
    sequence.phase = FINISHED
    state.cache.release(sequence.blocks, sequence.prefill_target // state.limits.block_size)


def run_step(state: BatchState) -> StepResult | None:
    """Advance the engine by one step; None, without effect, if there is no work, or none that can
    begin before held blocks are released.
    """
    if not (state.decoding or state.partial_prefill or state.waiting_count or state.received):
        return None
    shape = state.limits
    state.step_count = clock = state.step_count + 1
    preempted = _allocate_blocks(state, clock) if clock in state.block_calendar else ()
    filled = _share_filled(state, clock) if clock in state.fill_calendar else ()
    received = _start_received(state, clock) if state.received and not preempted else ()
    decoded = state.decoding_tuple
    if decoded is None:
        decoded = state.decoding_tuple = tuple(state.decoding)
    lengths = state.offset_sum + len(decoded) * clock
    chunks: list[PrefillChunk] = []
    if state.partial_prefill is not None or state.waiting_count:
        _fill_batch(state, chunks, shape.max_batched_tokens - len(decoded), admits=not preempted)
    if not decoded and not chunks:
        state.step_count -= 1
        return None
    duration_ms = shape.curves.prefill_ms(sum([chunk.tokens for chunk in chunks]))
    if decoded:
        duration_ms += shape.curves.decode_ms(lengths / shape.capacity_tokens)
    removed: tuple[int, ...] = ()
    if state.cache.evicted:
        removed = tuple(state.cache.evicted)
        state.cache.evicted.clear()
    stored: list[StoredBlocks] = []
    for sequence in (*filled, *received):
        _report(state, sequence, sequence.offset + clock, stored)
    finished = _end_decoded(state, clock) if clock in state.end_calendar else []
    if chunks:
        _end_prefill(state, clock, chunks, stored, finished)
    return StepResult(
        duration_ms, decoded, tuple(chunks), tuple(finished), preempted, removed, tuple(stored),
        received,
    )  # fmt: skip


# --- the beginning of a step ---------------------------------------------------------------------


def _allocate_blocks(state: BatchState, clock: int) -> tuple[BatchSequence, ...]:
    """Rule 1; returns the preempted sequences."""
    needing = state.block_calendar.pop(clock)
    preempted: list[BatchSequence] = []
    for sequence in needing:
        while sequence.needs_block_at == clock and not state.cache.append_block(sequence.blocks):
            victim = _preemption_victim(state)
            _preempt(state, victim)
            preempted.append(victim)
        if sequence.needs_block_at == clock:
            _plan_need(state, sequence)
    return tuple(preempted)


def _share_filled(state: BatchState, clock: int) -> list[BatchSequence]:
    """Rule 2; returns the sequences in decode that filled a block."""
    filled = state.fill_calendar.pop(clock)
    for sequence in filled:
        index = (sequence.offset + clock) // state.limits.block_size - 1
        blocks, names = sequence.blocks, sequence.block_ids
        if index < len(names) and (index == 0 or blocks[index - 1] >= 0):
            state.cache.name_block(blocks, index, names[index])
        _plan_fill(state, sequence)
    return filled


def _start_received(state: BatchState, clock: int) -> tuple[BatchSequence, ...]:
    """Rule 3; returns the sequences that begin."""
    begun: list[BatchSequence] = []
    while state.received and state.running_count < state.limits.max_sequences:
        sequence = state.received[0]
        if not _acquire_blocks(state, sequence, sequence.prompt_tokens):
            break
        state.received.popleft()
        _enter_decode(state, sequence, sequence.prompt_tokens - clock)
        begun.append(sequence)
    return tuple(begun)


def _fill_batch(state: BatchState, chunks: list[PrefillChunk], room: int, *, admits: bool) -> None:
    """Rules 4 and 5; appends the chunks of this step."""
    partial = state.partial_prefill
    if partial is not None:
        room -= _add_chunk(partial, room, chunks)
    sequences_left = state.limits.max_sequences - state.running_count
    while admits and room > 0 and sequences_left > 0 and state.waiting_count:
        sequence = state.waiting[0][2]
        if sequence.phase == FINISHED:
            heappop(state.waiting)
            continue
        if not _start_prefill(state, sequence):
            return
        heappop(state.waiting)
        state.waiting_count -= 1
        sequences_left -= 1
        room -= _add_chunk(sequence, room, chunks)


def _start_prefill(state: BatchState, sequence: BatchSequence) -> bool:
    """Begin with a prompt; False, without effect, if there are too few blocks for all of it."""
    if not _acquire_blocks(state, sequence, sequence.prefill_target - 1):
        return False
    if not sequence.preemptions:
        sequence.cached_tokens = sequence.computed_tokens
    sequence.phase = PREFILL
    return True


def _acquire_blocks(state: BatchState, sequence: BatchSequence, shareable_tokens: int) -> bool:
    """Allocate the blocks of `prefill_target`, of which those of the first `shareable_tokens` may
    come from the cache; False, without effect, if there are too few."""
    cache, size = state.cache, state.limits.block_size
    matched, inactive = cache.match(sequence.block_ids, shareable_tokens // size)
    total = -(-sequence.prefill_target // size)
    if total - matched > cache.available_blocks - inactive:
        return False
    sequence.blocks = cache.acquire(sequence.block_ids[: sequence.prefill_target // size], total)
    sequence.computed_tokens = matched * size
    return True


def _add_chunk(sequence: BatchSequence, room: int, chunks: list[PrefillChunk]) -> int:
    left = sequence.prefill_target - sequence.computed_tokens
    tokens = min(left, room)
    chunks.append(PrefillChunk(sequence, tokens, tokens == left))
    return tokens


# --- the end of a step ----------------------------------------------------------------------------


def _end_decoded(state: BatchState, clock: int) -> list[BatchSequence]:
    """Rule 7 for sequences in decode; returns those that ended."""
    finished = state.end_calendar.pop(clock)
    for sequence in finished:
        _remove_running(state, sequence)
        sequence.phase = FINISHED
    return finished


def _end_prefill(
    state: BatchState,
    clock: int,
    chunks: list[PrefillChunk],
    stored: list[StoredBlocks],
    finished: list[BatchSequence],
) -> None:
    """Rule 7 for sequences in prefill."""
    state.partial_prefill = None
    for sequence, tokens, last in chunks:
        sequence.computed_tokens += tokens
        _report(state, sequence, sequence.computed_tokens, stored)
        if not last:
            state.partial_prefill = sequence
        elif sequence.is_handed_over:
            sequence.phase = HELD
            finished.append(sequence)
        elif sequence.prefill_target + 1 - sequence.prompt_tokens >= sequence.max_tokens:
            state.cache.release(sequence.blocks, sequence.prefill_target // state.limits.block_size)
            sequence.phase = FINISHED
            finished.append(sequence)
        else:
            _enter_decode(state, sequence, sequence.prefill_target - clock)


def _enter_decode(state: BatchState, sequence: BatchSequence, offset: int) -> None:
    sequence.phase = DECODE
    sequence.offset = offset
    state.offset_sum += sequence.offset
    state.decoding[sequence] = None
    state.decoding_tuple = None
    sequence.ends_at = sequence.prompt_tokens + sequence.max_tokens - 1 - sequence.offset
    state.end_calendar.setdefault(sequence.ends_at, []).append(sequence)
    _plan_need(state, sequence)
    if sequence.caches_output:
        _plan_fill(state, sequence)


def _plan_need(state: BatchState, sequence: BatchSequence) -> None:
    at = len(sequence.blocks) * state.limits.block_size + 1 - sequence.offset
    sequence.needs_block_at = at
    state.block_calendar.setdefault(at, []).append(sequence)


def _plan_fill(state: BatchState, sequence: BatchSequence) -> None:
    """Schedule the step that fills its next block; at least one after those of the prompt."""
    size = state.limits.block_size
    now = sequence.offset + state.step_count
    at = (now // size + 1) * size - sequence.offset
    sequence.fills_block_at = at
    state.fill_calendar.setdefault(at, []).append(sequence)


def _report(
    state: BatchState, sequence: BatchSequence, computed: int, stored: list[StoredBlocks]
) -> None:
    full = computed // state.limits.block_size
    for start, end in state.cache.mark_reported(sequence.blocks, sequence.reported_blocks, full):
        stored.append(StoredBlocks(sequence, start, end))
    sequence.reported_blocks = full


# --- preemption ----------------------------------------------------------------------------------


def _preemption_victim(state: BatchState) -> BatchSequence:
    if state.partial_prefill is not None:
        return max([state.partial_prefill, *state.decoding], key=_by_rank)
    return max(state.decoding, key=_by_rank)


def _preempt(state: BatchState, sequence: BatchSequence) -> None:
    tokens = (
        sequence.offset + state.step_count if sequence.phase == DECODE else sequence.prefill_target
    )
    _remove_running(state, sequence)
    sequence.prefill_target = tokens
    sequence.preemptions += 1
    _enqueue(state, sequence)


def _enqueue(state: BatchState, sequence: BatchSequence) -> None:
    sequence.phase = WAITING
    sequence.computed_tokens = sequence.reported_blocks = 0
    state.waiting_count += 1
    heappush(state.waiting, (sequence.priority, sequence.arrival, sequence))


def _remove_running(state: BatchState, sequence: BatchSequence) -> None:
    """Remove a running sequence from the batch and the calendars, and release its blocks.

    All its tokens but the last count as computed. If it is preempted within a step, the one before
    the last is not; the block that counts by mistake has no identity and is allocated next.
    """
    computed = sequence.computed_tokens
    if sequence.phase == DECODE:
        computed = sequence.offset + state.step_count
        del state.decoding[sequence]
        state.decoding_tuple = None
        state.offset_sum -= sequence.offset
        for calendar, at in (
            (state.block_calendar, sequence.needs_block_at),
            (state.fill_calendar, sequence.fills_block_at),
            (state.end_calendar, sequence.ends_at),
        ):
            if at in calendar:
                calendar[at].remove(sequence)
        sequence.needs_block_at = sequence.fills_block_at = sequence.ends_at = NO_STEP
    elif state.partial_prefill is sequence:
        state.partial_prefill = None
    state.cache.release(sequence.blocks, computed // state.limits.block_size)


def _by_rank(sequence: BatchSequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival
