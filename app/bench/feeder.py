"""A worker that is nothing but its output: it answers every request with tokens at a fixed pace.

    python -m app.bench.feeder TOKENS STEP STEPS_PER_S TOTAL

Reads `requests` (no router), registers as one worker, and appends through the writers that real
workers have (`app/serving/chunks.py`). All answers step together, as in a batching engine: TOKENS
each, STEP at a time. The text of a step begins with the time of its making, so that whoever reads
it knows how long it was under way. All answers wait until TOTAL are asked for.
Prints `ready` when it reads.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from app.lifetime import Lifetime
from app.serving.chunks import ChunkStream, ChunkWriters, Last
from app.settings import Settings
from streams.codecs import decode
from streams.kafka.log import KafkaLog
from streams.outbox import Outbox
from streams.ports import Partition
from streams.records import Request, Usage
from streams.topics import REQUESTS, RESPONSES

RUN = "1"
WORD = "word "


def stamped(step: int) -> str:
    """The text of one step of so many tokens, with the time of this moment in it."""
    return f"@{time.monotonic():.6f} {WORD * (step - 1)}"


class Feeder:
    """Answers under way."""

    def __init__(
        self, writers: ChunkWriters, tokens: int, step: int, steps_per_s: float, total: int
    ) -> None:
        self._writers = writers
        self._tokens = tokens
        self._step = step
        self._pause_s = 1 / steps_per_s
        self._total = total
        self._open: dict[ChunkStream, int] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._begun = 0
        self._all_there = asyncio.Event()

    def begin(self, request: Request) -> None:
        """Answer this one, too: at once where one token is asked for."""
        stream = self._writers.open(request.id, 0, RUN, index=0, chars=0)
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
        """Step for ever; not before all that are expected were asked for."""
        loop = asyncio.get_running_loop()
        await self._all_there.wait()
        due = loop.time()
        while True:
            text = stamped(self._step)
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
        """Send the last tokens, and what follows them."""
        self._ends.add(end := asyncio.create_task(self._last(stream, left)))
        end.add_done_callback(self._ends.discard)

    async def _last(self, stream: ChunkStream, left: int) -> None:
        await stream.push(range(1000, 1000 + left), stamped(left))
        await stream.finish(Last("length", Usage(prompt_tokens=1, completion_tokens=left)))


async def feed(settings: Settings, tokens: int, step: int, steps_per_s: float, total: int) -> None:
    """Until it is ended."""
    log = KafkaLog(settings.connection("feeder"), prefix=settings.topic_prefix)
    await log.start()
    life = Lifetime("feeder")
    writers = ChunkWriters(Outbox(log, life.clock), life, await log.partitions(RESPONSES))
    feeder = Feeder(writers, tokens, step, steps_per_s, total)
    life.spawn("steps", feeder.run())
    reader = log.reader()
    lanes = list(range(await log.partitions(REQUESTS)))
    ends = await log.end_offsets(REQUESTS, lanes)
    reader.assign({Partition(REQUESTS, lane): ends[lane] for lane in lanes})
    await reader.poll(0.1)
    print("ready", flush=True)  # noqa: T201 - read by who started it
    while life.failed is None:
        for records in (await reader.poll(0.5)).values():
            for record in records:
                if isinstance(request := decode(record), Request):
                    feeder.begin(request)
    raise life.failed


if __name__ == "__main__":
    _, *numbers = sys.argv
    uvloop.run(
        feed(
            Settings(),
            int(numbers[0]),
            int(numbers[1]),
            float(numbers[2]),
            int(numbers[3]),
        )
    )
