"""Time to first text of clients that attach to streams in a lane with many Chunks.

    writer ──► responses, one lane: Chunks of streams ──► ReplyReader ──► clients, open loop

All clients attach in the same lane, at a fixed rate, and leave after the first text, as after the
death of their gateway. Streams are drawn at random from the whole lane; meanwhile the event loop
delay is measured, since other streams of a gateway share the loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from kvlane.app.settings import Settings
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import encode
from kvlane.streams.ids import RequestIds
from kvlane.streams.ports import Log
from kvlane.streams.records import Chunk
from kvlane.streams.responses.reply_reader import ReplyReader
from kvlane.streams.topics import RESPONSES
from workbench.bench.bench_environment import PrintLine, bench_environment
from workbench.bench.report import Report, at_most, none_of
from workbench.bench.statistics import percentile

STREAM_CHUNKS = 50
BATCH = 1000
FIRST_TEXT_LIMIT_S = 5.0
WAIT_S = 60.0
LOOP_PROBE_INTERVAL_S = 0.005


class AttachScale(NamedTuple):
    """Amount of work: Chunks in the lane, attaches per second, and duration in seconds."""

    chunks: int
    attaches_per_s: float
    seconds: float


QUICK = AttachScale(chunks=100_000, attaches_per_s=20.0, seconds=5.0)
FULL = AttachScale(chunks=400_000, attaches_per_s=20.0, seconds=25.0)


class AttachTimes(NamedTuple):
    """Seconds to the first text of each attach (None without one), and event loop delays."""

    waits_s: list[float | None]
    loop_delays_s: list[float]


async def bench_attach(
    settings: Settings, scale: AttachScale, print_line: PrintLine, progress: Callable[[float], None]
) -> Report:
    """Run it; `progress` gets shares of the whole. Raises BrokerUnavailable."""
    async with bench_environment(settings.model_copy(update={"lanes": 1}), print_line) as on:
        ids = await fill_lane(on.log, on.clock, scale.chunks, lambda share: progress(share / 2))
        print_line(f"{scale.chunks} Chunks of {len(ids)} streams are in one lane")
        replies = ReplyReader(on.log, on.clock, 1)
        replies.start()
        try:
            found = await measure_attaches(
                on.clock, replies, ids, scale, lambda share: progress(share / 2)
            )
        finally:
            await replies.close()
    return attach_report(found, scale)


async def fill_lane(
    log: Log, clock: Clock, chunks: int, progress: Callable[[float], None]
) -> list[str]:
    """Write streams sequentially; their ids."""
    drawn = RequestIds(clock, random.Random(1))
    ids: list[str] = []
    while len(ids) * STREAM_CHUNKS < chunks:
        batch = []
        for _ in range(BATCH // STREAM_CHUNKS):
            ids.append(request_id := drawn.new())
            batch += [encode(_chunk(request_id, seq), request_id) for seq in range(STREAM_CHUNKS)]
        await log.append_batch(RESPONSES, 0, batch)
        progress(len(batch) / chunks)
    return ids


def _chunk(request_id: str, seq: int) -> Chunk:
    return Chunk(
        id=request_id,
        attempt=0,
        run="1",
        seq=seq,
        index=seq,
        token_ids=(seq,),
        text="word ",
        chars=5 * seq + 5,
    )


async def measure_attaches(
    clock: Clock,
    replies: ReplyReader,
    ids: list[str],
    scale: AttachScale,
    progress: Callable[[float], None],
) -> AttachTimes:
    """Attach at a fixed rate, and wait for the first text of each."""
    rng = random.Random(2)
    delays: list[float] = []
    watch = asyncio.create_task(_watch(clock, delays))
    began = clock.now()
    waits = []
    async with asyncio.TaskGroup() as clients:
        for number in range(int(scale.attaches_per_s * scale.seconds)):
            await clock.sleep(began + number / scale.attaches_per_s - clock.now())
            waits.append(clients.create_task(_first_text_s(clock, replies, rng.choice(ids))))
            progress(1 / (scale.attaches_per_s * scale.seconds))
    watch.cancel()
    return AttachTimes([wait.result() for wait in waits], delays)


async def _first_text_s(clock: Clock, replies: ReplyReader, request_id: str) -> float | None:
    began = clock.now()
    reply = await replies.attach(request_id)
    try:
        await reply.next_pieces(WAIT_S)
    except TimeoutError:
        return None
    finally:
        replies.detach(reply)
    return clock.now() - began


async def _watch(clock: Clock, delays: list[float]) -> None:
    while True:
        due = clock.now() + LOOP_PROBE_INTERVAL_S
        await clock.sleep(LOOP_PROBE_INTERVAL_S)
        delays.append(max(0.0, clock.now() - due))


def attach_report(times: AttachTimes, scale: AttachScale) -> Report:
    """The report, with a limit for the slowest first text."""
    waits = sorted(wait for wait in times.waits_s if wait is not None)
    last = waits[-1] if waits else WAIT_S
    without = len(times.waits_s) - len(waits)
    row = {
        "chunks": scale.chunks,
        "attaches/s": scale.attaches_per_s,
        "attaches": len(times.waits_s),
        "p50 s": round(percentile(waits, 0.5), 2) if waits else "-",
        "p99 s": round(percentile(waits, 0.99), 2) if waits else "-",
        "max s": round(last, 2),
        "loop p99 ms": round(1000 * percentile(times.loop_delays_s, 0.99), 1),
    }
    thresholds = [
        none_of("without text", without),
        at_most("last first text", last, "s", FIRST_TEXT_LIMIT_S),
    ]
    return Report("attach", [row], thresholds)
