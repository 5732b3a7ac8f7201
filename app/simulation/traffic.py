"""What comes in: the requests of a trace, as the router and the engines need them.

Chunks of the trace are the blocks of the caches, so a block has CHUNK_TOKENS tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.routing.prompt import Prompt
from app.trace import CHUNK_TOKENS, TraceRow
from indexer.keys import LOOPBACK_SECRET, derive, prompt_keys
from streams.records import NO_HINTS, Hints, Request, SessionControl

SECRET = derive(LOOPBACK_SECRET)

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Makes of small numbers ones that look like hashes; odd, so no two become the same."""


class Traced(NamedTuple):
    """A request of a trace. `chunks`: its whole ones; `keys`: theirs in the index."""

    prompt: Prompt
    output_tokens: int
    chunks: list[int]
    keys: tuple[int, ...]


class Arrival(NamedTuple):
    """A request, and when it comes, in ms since the beginning."""

    at_ms: float
    request: Traced


class Pace(NamedTuple):
    """How a trace is played. `speed`: how many times faster than it was recorded.

    `jitter_s`: each arrival is put off by up to so many seconds of the trace, at random. Recorded
    arrivals may stand on ticks of a clock (every 3 s in Mooncake's), and come in bursts then.
    """

    speed: float = 1.0
    jitter_s: float = 0.0


def asks_for_sessions(policy: str) -> bool:
    """Whether a policy looks at sessions. The others get requests without: no session has a home
    here, and many requests without one are planned at once, which is faster and comes to the same.
    """
    return policy == "session_hash"


def traced(rows: Sequence[TraceRow], *, in_sessions: bool = False) -> list[Traced]:
    """The requests of a trace, in its order. `in_sessions`: each says of which one it is."""
    return [_traced(number, row, in_session=in_sessions) for number, row in enumerate(rows)]


def _traced(number: int, row: TraceRow, *, in_session: bool) -> Traced:
    chunks = row.whole_chunks
    local: NDArray[np.uint64] = np.array(chunks, np.uint64) * _SPREAD
    hints = NO_HINTS
    if in_session:
        hints = Hints(session_control=SessionControl(session_id=_session(row)))
    return Traced(
        Prompt.hashed(
            Request(id=f"{number:06}", hints=hints),
            row.input_length, local, CHUNK_TOKENS,
        ),
        max(row.output_length, 1),
        chunks,
        tuple(prompt_keys(local, SECRET).tolist()),
    )  # fmt: skip


def _session(row: TraceRow) -> str:
    """The conversation: what shares its second chunk, since the first is often the system's."""
    return str(row.hash_ids[min(1, len(row.hash_ids) - 1)])


def arrivals(
    rows: Sequence[TraceRow], requests: Sequence[Traced], pace: Pace, seed: int
) -> list[Arrival]:
    """The requests in the order in which they come."""
    at_ms = np.array([row.timestamp for row in rows], np.float64)
    if pace.jitter_s:
        at_ms += np.random.default_rng(seed).uniform(0, pace.jitter_s * 1000, len(at_ms))
    order = np.argsort(at_ms, kind="stable").tolist()
    return [Arrival(float(at_ms[i]) / pace.speed, requests[i]) for i in order]
