"""Reading a stretch of one partition once: what it holds now, from an offset to another.

For questions that are asked now and then (a snapshot, a file, a record of the registry). Whoever
wants to know what is appended later follows the log (`streams/follow.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from streams.clock import Clock
from streams.ports import Log, Partition, Record

POLL_S = 1.0


async def stretch(
    log: Log,
    clock: Clock,
    source: Partition,
    start: int,
    end: int,
    *,
    timeout_s: float,
    at_once: int = 500,
) -> AsyncGenerator[Record, None]:
    """The records of a partition from `start` to before `end`, as far as they are kept.

    Other tasks run after every `at_once` records. Close it (`aclosing`) when leaving it early.
    Raises TimeoutError, PositionLost, and what a reader's poll raises.
    """
    deadline = clock.now() + timeout_s
    reader = log.reader()
    try:
        reader.assign({source: start})
        while reader.position(source) < end:
            for record in (await reader.poll(POLL_S, at_once)).get(source, ()):
                if record.offset < end:
                    yield record
            if clock.now() > deadline:
                raise TimeoutError(
                    f"{source.topic}[{source.partition}]: reading to {end} took longer than "
                    f"{timeout_s:g} s"
                )
            await clock.sleep(0)
    finally:
        await reader.close()
