"""A worker without an engine: it answers every request with tokens at a fixed rate.

    python -m workbench.bench.streaming.token_feeder TOKENS STEP STEPS_PER_S TOTAL [text|calls]

Reads `requests` (no router), and appends through the writer of real workers
(`app/serving/chunk_writer.py`). All answers step together, as in a batching engine: TOKENS each,
STEP at a time. The text of a step begins with the time of its creation, so that readers can compute
its latency. All answers wait until TOTAL requests have arrived. With `text` the text goes
through the stop conditions, with `calls` through the parsers too, as arguments of a call. Prints
`ready` when it reads.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Sequence

import uvloop

from kvlane.app.runtime.process import ProcessContext, open_log
from kvlane.app.serving.chunk_writer import ChunkStream, ChunkWriter, FinalChunk
from kvlane.app.settings import Settings
from kvlane.app.text.parsed_stream import ParsedStream
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.codecs import decode
from kvlane.streams.ports import Partition
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Usage
from kvlane.streams.request import AnswerParsing, Request, StopConditions
from kvlane.streams.topics import REQUESTS, RESPONSES

RUN = "1"
WORD = "word "
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "'
PARSING = AnswerParsing(tools="hermes", reasoning="qwen3")


class GivenTexts:
    """A detokenizer whose tokens have the texts that are given to it."""

    def __init__(self) -> None:
        self.texts = deque[str]()

    def push(self, token_id: int) -> str:  # noqa: ARG002 - the interface of `Detokenizer`
        return self.texts.popleft()

    def end(self) -> str:
        return ""


class FedText:
    """The text of one answer in a form of the command line."""

    def __init__(self, form: str, request_id: str) -> None:
        self._given = GivenTexts()
        text = TextStream(self._given, StopConditions())
        self._stream: TextStream | ParsedStream | None = text if form else None
        if form == "calls":
            self._given.texts.append(CALL)
            self._stream = ParsedStream(text, PARSING, request_id, (0,))

    async def push(self, stream: ChunkStream, token_ids: Sequence[int]) -> None:
        """Send tokens with the current time in their text."""
        text = timestamped_text(len(token_ids))
        if self._stream is None:
            return await stream.push(token_ids, text)
        at = text.index(" ") + 1
        self._given.texts += (text[:at], *([WORD] * (len(token_ids) - 1)))
        piece = self._stream.feed(token_ids)
        return await stream.push(token_ids, piece.text, data=piece.data)


def timestamped_text(tokens: int) -> str:
    """The text of one step of this number of tokens, with the current time in it."""
    return f"@{time.monotonic():.6f} {WORD * (tokens - 1)}"


class TokenFeeder:
    def __init__(
        self,
        writer: ChunkWriter,
        tokens: int,
        step: int,
        steps_per_s: float,
        total: int,
        form: str = "",
    ) -> None:
        self._writer = writer
        self._form = form
        self._texts: dict[ChunkStream, FedText] = {}
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
        self._texts[stream] = FedText(self._form, request.id)
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
            for stream, left in list(self._open.items()):
                if left <= self._step:
                    del self._open[stream]
                    self._end(stream, left)
                else:
                    self._open[stream] = left - self._step
                    await self._texts[stream].push(stream, range(1000, 1000 + self._step))
            due += self._pause_s
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _end(self, stream: ChunkStream, left: int) -> None:
        """Send the last tokens and the final Chunk in a task."""
        self._ends.add(end := asyncio.create_task(self._last(stream, left)))
        end.add_done_callback(self._ends.discard)

    async def _last(self, stream: ChunkStream, left: int) -> None:
        await self._texts.pop(stream).push(stream, range(1000, 1000 + left))
        await stream.finish(FinalChunk("length", Usage(prompt_tokens=1, completion_tokens=left)))


async def run_feeder(
    settings: Settings, tokens: int, step: int, steps_per_s: float, total: int, form: str = ""
) -> None:
    """Until it is ended."""
    log = open_log(settings, "feeder")
    await log.start()
    ctx = ProcessContext("feeder")
    writer = ChunkWriter(RecordPublisher(log, ctx.clock), ctx, await log.partitions(RESPONSES))
    feeder = TokenFeeder(writer, tokens, step, steps_per_s, total, form)
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
        run_feeder(
            Settings(),
            int(numbers[0]),
            int(numbers[1]),
            float(numbers[2]),
            int(numbers[3]),
            *numbers[4:],
        )
    )
