"""The least that HTTP can be here: FastAPI under uvicorn, with no log and no model behind it.

    python -m app.bench.bare PORT TOKENS STEP STEPS_PER_S TOTAL

`POST /v1/chat/completions` streams TOKENS tokens at the pace of `feeder.py`, in the same events as
the gateway's, made on the spot. `POST /echo` gives back the JSON it was sent.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from app.bench.feeder import stamped
from app.http import sse
from app.http.answers import Choice, Heading, Words
from streams.records import Chunk


class Steps:
    """One pace for all answers; it begins when so many as `total` are there."""

    def __init__(self, tokens: int, step: int, steps_per_s: float, total: int) -> None:
        self.tokens, self.step = tokens, step
        self._pause_s, self._total = 1 / steps_per_s, total
        self._waiting: list[asyncio.Future[str]] = []
        self._begun = 0
        self._all_there = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    def enter(self) -> None:
        """One more answer."""
        self._begun += 1
        if self._begun >= self._total:
            self._all_there.set()
        if self._clock is None:
            self._clock = asyncio.create_task(self._run())

    async def next(self) -> str:
        """The text of the next step."""
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return await turn

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await self._all_there.wait()
        due = loop.time()
        while True:
            waiting, self._waiting = self._waiting, []
            text = stamped(self.step)
            for turn in waiting:
                if not turn.done():
                    turn.set_result(text)
            due += self._pause_s
            await asyncio.sleep(max(0.0, due - loop.time()))


async def told(steps: Steps) -> AsyncIterator[bytes]:
    """The events of one answer."""
    choice, heading = Choice(keep=False), Heading("chat", "id-1", "bench", 1700000000)
    words = Words(heading, 0, with_usage=False)
    steps.enter()
    for index in range(0, steps.tokens, steps.step):
        tokens = tuple(range(min(steps.step, steps.tokens - index)))
        last = "length" if index + len(tokens) == steps.tokens else None
        piece = Chunk(
            id="", attempt=0, run="", seq=0, index=index, token_ids=tokens,
            text=await steps.next(), finish_reason=last,
        )  # fmt: skip
        choice.take(piece)
        yield sse.event(words.encode(choice, piece) or b"", choice.tokens)
    yield sse.DONE


def build(steps: Steps) -> FastAPI:
    """The application."""
    api = FastAPI()

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        await request.body()
        return StreamingResponse(told(steps), media_type=sse.MEDIA_TYPE)

    @api.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(msgspec.json.encode(msgspec.json.decode(await request.body())))

    return api


if __name__ == "__main__":
    _, port, *numbers = sys.argv
    own = Steps(int(numbers[0]), int(numbers[1]), float(numbers[2]), int(numbers[3]))
    uvicorn.run(build(own), port=int(port), http="httptools", loop="uvloop", log_level="warning")
