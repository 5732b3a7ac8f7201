"""Costs of places, option by option: the loops of policies predictive and dynamo.

The formulas, with the meaning of their letters, are in `predictive.py` and `dynamo.py`. Each number
is made of its own option's alone, so it is the same to the bit among other options.

`spots`: f64 (options, FEATURES), a row a place. `blocks`: f64 (options, 3), leading blocks of the
prompt by tier. `found`: f64 (options, RESULTS), the output. A call of a kernel takes about 0.3 us,
and 0.05 for each array: so there are few, with few arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlane.indexer.kernels import inlined, kernel

(
    RUNS, TOKENS, OPEN_TOKENS, PREFILL_TOKENS, PREFILL_RUNS, ARRIVED_MS, LAST_FIRST_TOKEN_MS,
    JOINING_TOKENS, JOINING_RUNS, JOINED_MS, USUAL_SUM, USUAL_AT_MS,
    BUSY_MS, JOINING_MS, USUAL_TOKENS,
    STAGGER_MS, PLANNED_MS, PREFILL_SHARE, BATCH_MS, SHARING, SLOWDOWN, CHUNK_TOKENS_COLUMN,
    CAPACITY_TOKENS_COLUMN, CURVE,
) = range(24)  # fmt: skip
"""Columns of `spots`. `TOKENS` of prompts, `OPEN_TOKENS` with answers; `ARRIVED_MS`: when the runs
without a first token came, in the mean; `JOINING_TOKENS`, `JOINING_RUNS`, `JOINED_MS`: the part of
them that came after the last first token there, and when; `BUSY_MS`: for how long the place is at
the other prompts; `JOINING_MS`: for how long these wait; `USUAL_TOKENS`: its usual load now
(`PerformanceModel.usual_load`), and at `USUAL_AT_MS` `USUAL_SUM`; `SHARING`: 1, but 0 in decisions
of versions that had no shared steps; `PLANNED_MS`: in decisions that are recomputed, the wait
for reservations that were recorded as one sum; `PREFILL_SHARE`: the part of its time that a worker
lately had prefill in its steps, 0 in fleets without transfers; `BATCH_MS`: the delay by its batch
runs; from `CURVE` on the seven numbers of a curve (`PerfCurves.coefficients`)."""
FEATURES = CURVE + 7
(
    WAIT, PREFILL, DECODE_STALL, DECODE_SLOWDOWN, DECODE, REPLICATION, DELAY, USUAL, STANDALONE,
    HOLD, CACHED, PLANNED,
) = range(12)  # fmt: skip
"""Columns of the output in ms; `STANDALONE` and `HOLD` as in `Prediction`, but `HOLD` falls below 0
when more time has passed than was expected. `DELAY`: that of the prompts whose step the
request shares. `USUAL`: time of later requests' decode that is due to the usual load. `CACHED`:
tokens of the prompt that need not be computed. `PLANNED`: the part of `WAIT` for reservations."""
RESULTS = 12

WHOLE, PREFILL_PART, DECODE_PART, COMPARED = range(4)
"""The part of a request that is planned. `COMPARED`: all of it, with the cost of prefill during its
decode. That is no reason to go elsewhere as a whole: which worker has prefill next does not follow
from which had it last."""

REQUEST_TOKENS, REQUEST_BLOCK, REQUEST_OUTPUT, REQUEST_TTFT, REQUEST_ITL = range(5)
"""Columns of `requests`: tokens of its prompt, of a block, of its answer; its targets in ms."""
REQUEST_COLUMNS = 5
RECORD_COLUMNS, TIMED_RECORD_COLUMNS, JOINING_COLUMNS = 7, 16, 3
"""Columns of a recorded option; of one with the inputs of policy predictive, and of the runs that
join a step there."""

HOST_SHARE, DISK_SHARE = 0.75, 0.25
"""The share of the prefill of a block that is saved by loading it; as in `DynamoWeights`."""
FULL_CACHE_WAIT = 1.5
"""Answers' times until enough of a full cache is free; 1 would be if all had just begun."""
FOLLOWUP_STEPS = 1.5
"""Steps of decode in the time to a first token: half of the one under way, and one beside it."""
SECOND_COPY = 0.5
"""Share of the prefill that is computed again elsewhere for the room of a handed over prompt, which
both workers have cached."""
JOIN_STEPS = 1.5
"""Steps of prefill until the first token of a decode that comes to a worker which is at a prompt:
half of the one under way, and one beside it."""
BALANCE_SHARE = 0.5
"""Share of a step by which a place may cost more than one with more runs, and get the request: when
a step ends is not known more exactly. Without it, the place whose step ends first gets all requests
until then, and those of equal workers differ by a factor of three."""
LASTING_FOLLOWUPS = 2.0
"""Requests, itself included, that find the load which a request leaves; later ones find another."""
STALL_SHARE = 0.7
"""Share of the others' stall that a prompt counts as its own: some other prompts share its steps.
In bursts of 50 prompts, 400 a second, on four workers, all of it makes the mean TTFT 54 ms, not
48; with half, E2E of single ones is 6 % longer than by the least loaded worker."""
MISSED_TARGET_MS = 1e9
"""The cost of a missed target of the request: more than all others, so an option that misses one
comes after all that meet them."""

UNKNOWN = -1.0
"""How much of a prompt is held where most is, if that is to be found among the options."""

MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


@inlined
def _step_ms(spot: Floats, tokens: float) -> float:
    """Prefill in one step, of a place at the pace of its curve."""
    return (spot[CURVE] * tokens + spot[CURVE + 1]) * tokens + spot[CURVE + 2]


@inlined
def _prefill_ms(spot: Floats, tokens: float, decode_ms: float) -> float:
    """As `EngineProfile.prefill_ms`."""
    chunk, slowness = spot[CHUNK_TOKENS_COLUMN], spot[SLOWDOWN]
    whole = np.floor(tokens / chunk)
    rest = tokens - whole * chunk
    time_ms = whole * (slowness * _step_ms(spot, chunk) + decode_ms)
    if rest > 0:
        time_ms += slowness * _step_ms(spot, rest) + decode_ms
    return time_ms


@inlined
def _decode_ms(spot: Floats, tokens: float) -> float:
    """As `EngineProfile.decode_ms`."""
    usage = 0.0
    if spot[CAPACITY_TOKENS_COLUMN] > 0:
        usage = min(tokens / spot[CAPACITY_TOKENS_COLUMN], 1.0)
    step_ms = (spot[CURVE + 3] * usage + spot[CURVE + 4]) * usage + spot[CURVE + 5]
    return spot[SLOWDOWN] * max(step_ms, spot[CURVE + 6])


@inlined
def _free_share(spot: Floats, part: int) -> float:
    """The part of its time that a place has no prefill in its steps, as it counts for a part."""
    return 1.0 if part == WHOLE else 1.0 - spot[PREFILL_SHARE]


@inlined
def _join_ms(spot: Floats) -> float:
    """Time that prefill takes until the first token of a decode that comes to a place."""
    chunk_ms = spot[SLOWDOWN] * _step_ms(spot, spot[CHUNK_TOKENS_COLUMN])
    return JOIN_STEPS * spot[PREFILL_SHARE] * chunk_ms


class StepWait(NamedTuple):
    """The steps at a place before and with a prompt, in ms.

    `wait_ms`: until the first one of its own begins, and what others take of that; `left_ms`: until
    all prompts there are computed, below 0 when more time has passed than was expected. `added_ms`:
    by how much it makes the steps there longer; `delay_ms`: the sum of that for the prompts in its
    step.
    """

    wait_ms: float
    left_ms: float
    added_ms: float
    delay_ms: float


@inlined
def _wait_after(
    spot: Floats,
    tokens: float,
    alone_ms: float,
    step_ms: float,
    shares: bool,  # noqa: FBT001 - kernels have no named arguments
    begun_ms: float,
    joining: float,
    joining_runs: float,
) -> StepWait:
    """The steps with a prompt after the step under way, which takes `begun_ms` more, and with the
    `joining` tokens of other prompts."""
    if joining_runs <= 0:
        return StepWait(begun_ms, begun_ms, alone_ms, 0.0)
    joining_ms = _prefill_ms(spot, joining, step_ms)
    left_ms = begun_ms + joining_ms
    if not shares:
        return StepWait(left_ms, left_ms, alone_ms, 0.0)
    joint_ms = _prefill_ms(spot, joining + tokens, step_ms)
    chunk = spot[CHUNK_TOKENS_COLUMN]
    last = joining - np.floor(joining / chunk) * chunk
    delay_ms = 0.0
    if last > 0:  # of the prompts in the last step, which it fills
        longer_ms = _step_ms(spot, min(last + tokens, chunk)) - _step_ms(spot, last)
        delay_ms = joining_runs * (last / joining) * (spot[SLOWDOWN] * longer_ms)
    wait_ms = begun_ms + (joint_ms - _prefill_ms(spot, tokens, step_ms))
    return StepWait(wait_ms, left_ms, joint_ms - joining_ms, delay_ms)


@inlined
def _wait_for_steps(
    spot: Floats,
    tokens: float,
    alone_ms: float,
    step_ms: float,
    shares: bool,  # noqa: FBT001 - kernels have no named arguments
) -> StepWait:
    """The steps at a place before and with `tokens` of a prompt, beside decode of `step_ms`.

    Prompts there are in the step under way, or came later and join the next one. Without a first
    token since they came, a step with them began at once, or after that of decode which they found:
    at any time of that step alike. `shares`: whether the prompt joins them, or has steps of its own
    after theirs.
    """
    joining, joining_runs = spot[JOINING_TOKENS], spot[JOINING_RUNS]
    begun, begun_runs = spot[PREFILL_TOKENS] - joining, spot[PREFILL_RUNS] - joining_runs
    rest_ms = step_ms / 2 if spot[RUNS] > spot[PREFILL_RUNS] else 0.0
    if begun_runs > 0:
        left_ms = _prefill_ms(spot, begun, step_ms) - spot[BUSY_MS]
        steps = _wait_after(
            spot, tokens, alone_ms, step_ms, shares, max(left_ms, step_ms / 2), joining,
            joining_runs,
        )  # fmt: skip
        if joining_runs <= 0:
            return StepWait(steps.wait_ms, left_ms, alone_ms, 0.0)
        return steps
    if joining_runs <= 0:
        return StepWait(rest_ms, 0.0, alone_ms, 0.0)
    age_ms, found_ms = spot[JOINING_MS], 2 * rest_ms
    if age_ms <= 0:
        return _wait_after(spot, tokens, alone_ms, step_ms, shares, rest_ms, joining, joining_runs)
    has_begun = min(age_ms / found_ms, 1.0) if found_ms > 0 else 1.0
    since_ms = age_ms - found_ms / 2 if has_begun >= 1 else age_ms / 2
    left_ms = _prefill_ms(spot, joining, step_ms) - since_ms
    wait_ms = max(left_ms, step_ms / 2)
    if has_begun >= 1:
        return StepWait(wait_ms, left_ms, alone_ms, 0.0)
    rest_ms = (found_ms - age_ms) / 2
    later = _wait_after(spot, tokens, alone_ms, step_ms, shares, rest_ms, joining, joining_runs)
    waits = 1.0 - has_begun
    return StepWait(
        has_begun * wait_ms + waits * later.wait_ms,
        has_begun * left_ms + waits * later.left_ms,
        has_begun * alone_ms + waits * later.added_ms,
        waits * later.delay_ms,
    )


@kernel()
def update_times(spots: Floats, now_ms: float, usual_load_ms: float) -> None:
    """Set for how long each place has been at the prompts that are there, and its usual load, which
    fades with `usual_load_ms`."""
    for i in range(len(spots)):
        spot = spots[i]
        busy_ms = 0.0
        if spot[PREFILL_RUNS] > 0:  # since the last one before them was done
            busy_ms = max(now_ms - max(spot[ARRIVED_MS], spot[LAST_FIRST_TOKEN_MS]), 0.0)
        spot[BUSY_MS] = busy_ms
        spot[JOINING_MS] = 0.0
        if spot[JOINING_RUNS] > 0:
            spot[JOINING_MS] = np.floor(max(now_ms - spot[JOINED_MS], 0.0))
            if spot[JOINING_RUNS] < spot[PREFILL_RUNS]:  # the others began then
                spot[BUSY_MS] = max(now_ms - spot[LAST_FIRST_TOKEN_MS], 0.0)
        spot[USUAL_TOKENS] = 0.0
        if spot[USUAL_SUM] > 0:
            since_ms = max(now_ms - spot[USUAL_AT_MS], 0.0)
            spot[USUAL_TOKENS] = spot[USUAL_SUM] * np.exp(-since_ms / usual_load_ms)


@kernel()
def scatter_overlap(columns: Ints, depths: Ints, rows: Ints, blocks: Floats) -> None:
    """Matches of the index, by column, moved to the rows of places; -1 for columns of no place."""
    for i in range(len(blocks)):
        for tier in range(3):
            blocks[i, tier] = 0.0
    for n in range(len(columns)):
        if columns[n] < len(rows):
            row = rows[columns[n]]
            if row >= 0:
                for tier in range(3):
                    blocks[row, tier] = depths[n, tier]


@inlined
def _mixed(x: int) -> int:
    """SplitMix64."""
    x = (x ^ (x >> SHIFT_1)) * MIX_1
    x = (x ^ (x >> SHIFT_2)) * MIX_2
    return x ^ (x >> SHIFT_3)


@kernel()
def argmin(costs: Floats, usual: Floats, start: int, tags: Words) -> int:
    """The option with the least cost, of equal ones that with the least usual load, if that is not
    empty, then that with the least draw; -1 for none."""
    at, best = -1, np.inf
    for i in range(len(costs)):
        if costs[i] < best:
            at, best = i, costs[i]
    if at < 0:
        return at
    start = _mixed(start)
    for i in range(at + 1, len(costs)):
        if costs[i] == best:
            more = usual[i] - usual[at] if len(usual) else 0.0
            if more < 0 or (more == 0 and _mixed(start ^ tags[i]) < _mixed(start ^ tags[at])):
                at = i
    return at


@kernel()
def _settle(
    spots: Floats,
    blocks: Floats,
    others_at: Ints,
    others_ms: Floats,
    block_size: float,
    prompt_tokens: float,
    weight: float,
    found: Floats,
) -> float:
    """Cached tokens of the prompt, prefill of the rest alone, and wait for others, of each option.
    Returns the largest number of cached tokens."""
    most = 0.0
    for i in range(len(spots)):
        worth = blocks[i, 0] + (HOST_SHARE * blocks[i, 1] + DISK_SHARE * blocks[i, 2])
        held = min(worth * block_size, prompt_tokens)
        most = max(most, held)
        found[i, CACHED] = held
        found[i, PLANNED] = spots[i, PLANNED_MS]
        found[i, STANDALONE] = _prefill_ms(spots[i], max(prompt_tokens - held, 1.0), 0.0)
    for j in range(len(others_at)):
        i = others_at[j]
        if i >= 0:
            own_ms, other_ms = found[i, STANDALONE], others_ms[j]
            delay_ms = min(own_ms, other_ms) + weight * max(own_ms, other_ms)
            if spots[i, SHARING] > 0:  # in one step, if that is less
                fixed_ms = spots[i, SLOWDOWN] * spots[i, CURVE + 2]
                delay_ms = min(delay_ms, own_ms - fixed_ms + max(other_ms - fixed_ms, 0.0))
            found[i, PLANNED] += delay_ms
    return most


@inlined
def _wait_for_room(
    spot: Floats, context: float, added: float, mean_output: float, step_ms: float
) -> float:
    """The wait until answers have ended in a cache without room for a prompt and its answer."""
    excess = context + added + mean_output - spot[CAPACITY_TOKENS_COLUMN]
    if excess <= 0:
        return 0.0
    return excess / max(context, 1.0) * mean_output * FULL_CACHE_WAIT * step_ms


@inlined
def _slower_ms(
    spot: Floats, output_tokens: float, mean_output: float, lasting: float, longer_ms: float
) -> float:
    """The time of the others' decode by steps that take `longer_ms` more: as many as there are now,
    since others come where runs end."""
    if spot[SHARING] > 0:
        return lasting * (spot[RUNS] * output_tokens) * longer_ms
    return spot[RUNS] * mean_output / 2 * longer_ms


@inlined
def _usual_ms(
    spot: Floats, part: int, prompt_tokens: float, output_tokens: float, followups: float
) -> float:
    """The time by which the usual load makes the decode of later requests longer. The choice of one
    worker or two compares the present alone."""
    if part != WHOLE or followups <= 0 or spot[USUAL_TOKENS] <= 0:
        return 0.0
    own = prompt_tokens + output_tokens / 2
    longer_ms = _decode_ms(spot, spot[USUAL_TOKENS] + own) - _decode_ms(spot, own)
    return followups * (output_tokens * longer_ms)


@inlined
def _least_runs(spots: Floats) -> float:
    least = np.inf
    for i in range(len(spots)):
        least = min(least, spots[i, RUNS])
    return least


@inlined
def _balance_ms(spot: Floats, least_runs: float, step_ms: float) -> float:
    """The cost of more runs than there are at another place: all of it from a tenth more on."""
    excess = min((spot[RUNS] - least_runs) / (1.0 + least_runs / 10.0), 1.0)
    return BALANCE_SHARE * excess * (spot[SLOWDOWN] * spot[CURVE + 2] + step_ms)


@kernel()
def predict_costs(
    spots: Floats,
    blocks: Floats,
    liking: Floats,
    others_at: Ints,
    others_ms: Floats,
    block_size: float,
    prompt_tokens: float,
    output_tokens: float,
    mean_output: float,
    most_held: float,
    least_runs: float,
    leads_to: float,
    weight: float,
    part: int,
    transfer_ms: float,
    ttft_target: float,
    itl_target: float,
    start: int,
    tags: Words,
    found: Floats,
    costs: Floats,
) -> tuple[int, float, float]:
    """The forecast of a request at each option. Returns the option with the least cost, -1 for
    none, the largest number of cached tokens of its prompt, and the least number of runs.

    `others_at` and `others_ms`: options for which other requests are planned, and their prefill
    there, alone; -1 for those that are planned for none of these. `liking`: empty if costs stay as
    they are. `most_held` and `least_runs` may be UNKNOWN. `part`: of the request; only that of
    decode has a `transfer_ms`, until the blocks of the prompt are there.
    """
    most = _settle(spots, blocks, others_at, others_ms, block_size, prompt_tokens, weight, found)
    if most_held != UNKNOWN:
        most = most_held
    if least_runs == UNKNOWN:
        least_runs = _least_runs(spots)
    for i in range(len(spots)):
        spot = spots[i]
        runs, prompts, capacity = spot[RUNS], spot[TOKENS], spot[CAPACITY_TOKENS_COLUMN]
        held = found[i, CACHED]
        tokens = max(prompt_tokens - held, 1.0)
        context = prompts + runs * mean_output / 2
        step_ms = _decode_ms(spot, context) if runs > 0 else 0.0
        alone_ms, planned_ms = found[i, STANDALONE], found[i, PLANNED]
        shares = spot[SLOWDOWN] * (spot[CURVE + 1] * tokens - spot[CURVE + 2]) <= step_ms
        steps = _wait_for_steps(spot, tokens, alone_ms, step_ms, shares)
        bounded = runs > 0 and capacity > 0
        wait_ms = steps.wait_ms + spot[STAGGER_MS] + spot[BATCH_MS]
        added = prompt_tokens - min(blocks[i, 0] * block_size, prompt_tokens)
        if bounded:
            wait_ms += _wait_for_room(spot, context, added, mean_output, step_ms)
        wait_ms += planned_ms
        later_ms = _decode_ms(spot, context + prompt_tokens + output_tokens / 2)
        per_token_ms = (
            spot[SLOWDOWN] * _step_ms(spot, spot[CHUNK_TOKENS_COLUMN]) / spot[CHUNK_TOKENS_COLUMN]
        )
        prefill_ms = _prefill_ms(spot, tokens, step_ms)
        stall_ms = runs * steps.added_ms * (STALL_SHARE if spot[SHARING] > 0 else 1.0)
        lasting = min(leads_to, LASTING_FOLLOWUPS) if spot[SHARING] > 0 else leads_to
        slower_ms = _slower_ms(spot, output_tokens, mean_output, lasting, later_ms - step_ms)
        decode_ms = output_tokens * later_ms / _free_share(spot, part)
        replication_ms = (most - held) * per_token_ms
        followups, delay_ms = leads_to - 1.0, steps.delay_ms
        usual_ms = _usual_ms(spot, part, prompt_tokens, output_tokens, followups)
        if part == PREFILL_PART:  # no decode follows there
            slower_ms = decode_ms = 0.0
        elif part == DECODE_PART:  # the first token comes with the first step
            prefill_ms, stall_ms = transfer_ms + later_ms + _join_ms(spot), 0.0
            replication_ms = SECOND_COPY * followups * prompt_tokens * per_token_ms
            followups = delay_ms = 0.0  # they come to the prefill worker
        ttft_ms = wait_ms + prefill_ms
        next_ms = followups * FOLLOWUP_STEPS * later_ms + replication_ms / leads_to
        cost_ms = (
            ttft_ms
            + weight * (stall_ms + slower_ms + lasting * decode_ms + usual_ms)
            + next_ms
            + delay_ms
        )
        if part == WHOLE and runs > least_runs:
            cost_ms += _balance_ms(spot, least_runs, step_ms)
        cost_ms *= liking[i] if len(liking) else 1.0
        cost_ms += MISSED_TARGET_MS * (ttft_ms > ttft_target or later_ms > itl_target)
        is_full = bounded and prompts + added + output_tokens > capacity
        hold_ms = np.inf if is_full else (0.0 if shares else steps.left_ms)
        found[i, WAIT], found[i, PREFILL], found[i, HOLD] = wait_ms, prefill_ms, hold_ms
        found[i, DECODE_STALL], found[i, DECODE_SLOWDOWN] = stall_ms, slower_ms
        found[i, DECODE], found[i, REPLICATION], found[i, DELAY], found[i, USUAL] = (
            decode_ms, replication_ms, delay_ms, usual_ms,
        )  # fmt: skip
        costs[i] = cost_ms
    return argmin(costs, spots[:, USUAL_TOKENS], start, tags), most, least_runs


@kernel()
def dynamo_costs(
    spots: Floats,
    blocks: Floats,
    prompt_tokens: int,
    block_size: int,
    scale: float,
    per_run: float,
    worth: Floats,
    decay: float,
    least_prefill: float,
    costs: Floats,
) -> None:
    """As in `dynamo.py`. `worth`: of a block on the device, the host and the disk."""
    for i in range(len(spots)):
        spot = spots[i]
        device = worth[0] * blocks[i, 0]
        if decay > 0:
            device /= 1.0 + decay * (spot[PREFILL_TOKENS] - least_prefill)
        credit = device + worth[1] * blocks[i, 1] + worth[2] * blocks[i, 2]
        prefill = (spot[PREFILL_TOKENS] + prompt_tokens) / block_size
        open_blocks = -(-int(spot[OPEN_TOKENS]) // block_size)
        costs[i] = scale * max(prefill - credit, 0.0) + open_blocks + per_run * spot[RUNS]


@kernel()
def draw_random(start: int, tags: Words, drawn: Words) -> None:
    """A number for each tag, as if at random, by a seed."""
    start = _mixed(start)
    for i in range(len(tags)):
        drawn[i] = _mixed(start ^ tags[i])


@kernel()
def plan_uniform_batch(
    spots: Floats,
    tags: Words,
    starts: Ints,
    columns: Ints,
    depths: Ints,
    rows: Ints,
    requests: Floats,
    seeds: Words,
    entries: Ints,
    others_at: Ints,
    others_ms: Floats,
    mean_output: float,
    leads_to: float,
    weight: float,
    part: int,
    liking: Floats,
    blocks: Floats,
    costs: Floats,
    found: Floats,
    best: Floats,
) -> None:
    """Plan requests one after the other, each with the reservations of all other queued requests.

    `requests`: f64 (requests, 5), see `REQUEST_COLUMNS`. The index found `columns` and `depths` of
    each, from one of `starts` to the next. `others_at` and `others_ms`: the reservations of all
    queued requests and of these, by arrival; `entries`: the index of each request among them.
    `best`: f64 (requests, RESULTS), the `found` of the chosen option. `blocks`, `costs`
    and `found` are scratch memory.
    """
    for n in range(len(requests)):
        first, end, entry = starts[n], starts[n + 1], entries[n]
        others_at[entry] = -1  # its own reservation
        scatter_overlap(columns[first:end], depths[first:end], rows, blocks)
        chosen, _, _ = predict_costs(
            spots, blocks, liking, others_at, others_ms, requests[n, REQUEST_BLOCK],
            requests[n, REQUEST_TOKENS], requests[n, REQUEST_OUTPUT], mean_output, UNKNOWN,
            UNKNOWN, leads_to, weight, part, 0.0,
            requests[n, REQUEST_TTFT], requests[n, REQUEST_ITL], seeds[n], tags, found, costs,
        )  # fmt: skip
        others_at[entry], others_ms[entry] = chosen, found[chosen, STANDALONE]
        for k in range(RESULTS):
            best[n, k] = found[chosen, k]


@inlined
def _bits(x: float) -> int:
    return np.float64(x).view(np.int64)


@kernel()
def record_candidates(
    costs: Floats,
    chosen: int,
    spots: Floats,
    blocks: Floats,
    numbers: Ints,
    rows: Ints,
    joining: Ints,
    usual: Floats,
) -> tuple[int, bool, bool]:
    """The options with the least costs in that order, and the chosen one; how many they are, and
    whether runs join a step at any of them, and any has a usual load.

    Their numbers go into `numbers`, the record of each into a row of `rows`; with the inputs of
    policy predictive one goes into a row of `joining`, and the usual load into `usual`. See
    `TIMED_ROW` and `JOINING_ROW` in streams/record_types/candidate_records.py. In `rows` the values
    at 0 and from 11 on are floats, bit by bit.
    """
    size, most, is_joined, has_usual = 0, len(numbers) - 1, False, False
    for i in range(len(costs)):
        if costs[i] < np.inf and (size < most or costs[i] < costs[numbers[size - 1]]):
            at = size if size < most else size - 1
            size = at + 1
            while at > 0 and costs[i] < costs[numbers[at - 1]]:
                numbers[at] = numbers[at - 1]
                at -= 1
            numbers[at] = i
    is_among = False
    for k in range(size):
        is_among |= numbers[k] == chosen
    if not is_among:
        numbers[size] = chosen
        size += 1
    for k in range(size):
        i, row = numbers[k], rows[k]
        spot = spots[i]
        row[0] = _bits(costs[i])
        row[1], row[2] = int(spot[RUNS]), int(spot[OPEN_TOKENS])
        for tier in range(3):
            row[3 + tier] = int(blocks[i, tier])
        row[6] = int(spot[PREFILL_TOKENS])
        if len(row) > RECORD_COLUMNS:
            row[7], row[8] = int(spot[TOKENS]), int(spot[PREFILL_RUNS])
            row[9] = int(spot[CHUNK_TOKENS_COLUMN])
            row[10] = int(spot[CAPACITY_TOKENS_COLUMN])
            row[11], row[12] = _bits(spot[BUSY_MS]), _bits(spot[SLOWDOWN])
            row[13], row[14] = _bits(spot[STAGGER_MS]), _bits(spot[PREFILL_SHARE])
            row[15] = _bits(spot[BATCH_MS])
            is_joined |= spot[JOINING_RUNS] > 0
            joining[k, 0], joining[k, 1] = int(spot[JOINING_TOKENS]), int(spot[JOINING_RUNS])
            joining[k, 2] = int(spot[JOINING_MS])
            usual[k] = spot[USUAL_TOKENS]
            has_usual |= usual[k] > 0
    return size, is_joined, has_usual


@kernel()
def record_reservations(
    numbers: Ints, others_at: Ints, others_ms: Floats, positions: Ints, ahead: Floats
) -> None:
    """The reservations at recorded options, as many as there is room for.

    `numbers`: of these options. `positions`: i64 (options,), all -1. `ahead`: f64 (size, 1 + room),
    a row for each recorded option: how many there are, then their prefill.
    """
    for k in range(len(numbers)):
        positions[numbers[k]] = k
        ahead[k, 0] = 0.0
    for j in range(len(others_at)):
        i = others_at[j]
        if i >= 0 and positions[i] >= 0:
            k = positions[i]
            ahead[k, 0] += 1.0
            n = int(ahead[k, 0])
            if n < ahead.shape[1]:
                ahead[k, n] = others_ms[j]


def warm_up() -> None:
    """Call every kernel once, with the types of its later arguments."""
    spots, blocks, costs = np.ones((1, FEATURES)), np.zeros((1, 3)), np.zeros(1)
    found, tags, none = np.zeros((1, RESULTS)), np.zeros(1, np.uint64), np.zeros(1, np.int64)
    update_times(spots, 1.0, 1.0)
    scatter_overlap(none, np.zeros((1, 4), np.int64), none, blocks)
    predict_costs(
        spots, blocks, np.ones(1), none, np.zeros(1), 16.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.01,
        WHOLE, 0.0, np.inf, np.inf, np.uint64(0), tags, found, costs,
    )  # fmt: skip
    dynamo_costs(spots, blocks, 1, 16, 1.0, 0.0, np.ones(3), 0.0, 0.0, costs)
    draw_random(np.uint64(0), tags, tags.copy())
    argmin(costs, costs, np.uint64(0), tags)
    numbers = np.zeros(2, np.int64)
    rows, joining = np.zeros((2, RECORD_COLUMNS), np.int64), np.zeros((2, 3), np.int64)
    record_candidates(costs, 0, spots, blocks, numbers, rows, joining, np.zeros(2))
    record_reservations(numbers, none, np.zeros(1), none.copy(), np.zeros((2, 2)))
    plan_uniform_batch(
        spots, tags, np.zeros(2, np.int64), none, np.zeros((1, 4), np.int64), none,
        np.ones((1, REQUEST_COLUMNS)), tags, np.zeros(1, np.int64), np.zeros(1, np.int64),
        np.zeros(1), 1.0,
        1.0, 0.01, WHOLE, np.ones(1), blocks, costs, found, found.copy(),
    )  # fmt: skip
