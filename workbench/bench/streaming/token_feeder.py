"""A worker without an engine: it answers every request with tokens at a fixed rate.

    python -m workbench.bench.streaming.token_feeder TOKENS STEP STEPS_PER_S TOTAL

Reads `requests` (no router), and appends through the writer of real workers
(`app/serving/chunk_writer.py`). All answers step together, as in a batching engine: TOKENS each,
STEP at a time. The text of a step begins with the time of its creation, so that readers can compute
its latency. All answers wait until TOTAL requests have arrived. Prints `ready` when it reads.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.serving.chunk_writer import ChunkStream, ChunkWriter, FinalChunk
from kvlane.app.settings import Settings
from kvlane.streams.codecs import decode
from kvlane.streams.ports import Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Usage
from kvlane.streams.request import Request
from kvlane.streams.topics import REQUESTS, RESPONSES

RUN = "1"
WORD = "word "


def timestamped_text(tokens: int) -> str:
    """The text of one step of this number of tokens, with the current time in it."""
    return f"@{time.monotonic():.6f} {WORD * (tokens - 1)}"


class TokenFeeder:
    def __init__(
        self, writer: ChunkWriter, tokens: int, step: int, steps_per_s: float, total: int
    ) -> None:
        self._writer = writer
        self._tokens = tokens
        self._step = step
        self._pause_s = 1 / steps_per_s
        self._total = total
        self._open: dict[ChunkStream, int] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._begun = 0
        self._all_there = asyncio.Event()

    def start_response(self, request: Request) -> None:
        """Add a request; one with a single token is answered at once."""
        stream = self._writer.open(request.id, 0, RUN, index=0, chars=0)
        stream.release()
        left = min(self._tokens, request.stop.max_tokens or self._tokens)
        if left == 1:
            self._end(stream, 1)
        else:
            self._open[stream] = left
        self._begun += 1
        if self._begun >= self._total:
            self._all_there.set()

    async def run(self) -> None:
        """Step forever, once all expected requests have arrived."""
        loop = asyncio.get_running_loop()
        await self._all_there.wait()
        due = loop.time()
        while True:
            text = timestamped_text(self._step)
            for stream, left in list(self._open.items()):
                if left <= self._step:
                    del self._open[stream]
                    self._end(stream, left)
                else:
                    self._open[stream] = left - self._step
                    await stream.push(range(1000, 1000 + self._step), text)
            due += self._pause_s
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _end(self, stream: ChunkStream, left: int) -> None:
        """Send the last tokens and the final Chunk in a task."""
        self._ends.add(end := asyncio.create_task(self._last(stream, left)))
        end.add_done_callback(self._ends.discard)

    async def _last(self, stream: ChunkStream, left: int) -> None:
        await stream.push(range(1000, 1000 + left), timestamped_text(left))
        await stream.finish(FinalChunk("length", Usage(prompt_tokens=1, completion_tokens=left)))


async def run_feeder(
    settings: Settings, tokens: int, step: int, steps_per_s: float, total: int
) -> None:
    """Until it is ended."""
    log = open_log(settings, "feeder")
    await log.start()
    ctx = ProcessContext("feeder")
    writer = ChunkWriter(RecordPublisher(log, ctx.clock), ctx, await log.partitions(RESPONSES))
    feeder = TokenFeeder(writer, tokens, step, steps_per_s, total)
    ctx.spawn("steps", feeder.run())
    reader = log.reader(moving=False)  # as workers read their assignments
    lanes = list(range(await log.partitions(REQUESTS)))
    ends = await log.end_offsets(REQUESTS, lanes)
    reader.assign({Partition(REQUESTS, lane): ends[lane] for lane in lanes})
    await reader.poll(0.1)
    print("ready", flush=True)  # noqa: T201 - read by the parent process
    while ctx.error is None:
        for records in (await reader.poll(0.5)).values():
            for record in records:
                if isinstance(request := decode(record), Request):
                    feeder.start_response(request)
    raise ctx.error


if __name__ == "__main__":
    _, *numbers = sys.argv
    uvloop.run(
        run_feeder(Settings(), int(numbers[0]), int(numbers[1]), float(numbers[2]), int(numbers[3]))
    )
