"""Baseline of HTTP: FastAPI under uvicorn, without a log or an engine.

    python -m workbench.bench.streaming.baseline_http PORT TOKENS STEP STEPS_PER_S TOTAL

`POST /v1/chat/completions` streams TOKENS tokens at the rate of `token_feeder.py`, in the same
events as the gateway. `POST /prompt` renders the template of the demo model with the messages of
its body, tokenizes the text, and returns a completion of one token: the least that a server of
chats does for a request.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from kvlane.app.http.openai.event_encoder import DONE, MEDIA_TYPE, encode_event
from kvlane.app.http.openai.openai_responses import Choice, ChunkEncoder, ResponseHeader
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import Chunk
from workbench.bench.streaming.token_feeder import timestamped_text


class StepClock:
    """A common clock of all answers; it starts when `total` have begun."""

    def __init__(self, tokens: int, step: int, steps_per_s: float, total: int) -> None:
        self.tokens, self.tokens_per_step = tokens, step
        self._pause_s, self._total = 1 / steps_per_s, total
        self._waiting: list[asyncio.Future[str]] = []
        self._begun = 0
        self._all_there = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    def add_stream(self) -> None:
        self._begun += 1
        if self._begun >= self._total:
            self._all_there.set()
        if self._clock is None:
            self._clock = asyncio.create_task(self._run())

    async def next_text(self) -> str:
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return await turn

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        await self._all_there.wait()
        due = loop.time()
        while True:
            waiting, self._waiting = self._waiting, []
            text = timestamped_text(self.tokens_per_step)
            for turn in waiting:
                if not turn.done():
                    turn.set_result(text)
            due += self._pause_s
            await asyncio.sleep(max(0.0, due - loop.time()))


async def completion_events(step_clock: StepClock) -> AsyncIterator[bytes]:
    choice, heading = Choice(keep=False), ResponseHeader("chat", "id-1", "bench", 1700000000)
    words = ChunkEncoder(heading, 0, with_usage=False)
    step_clock.add_stream()
    for index in range(0, step_clock.tokens, step_clock.tokens_per_step):
        tokens = tuple(range(min(step_clock.tokens_per_step, step_clock.tokens - index)))
        last = "length" if index + len(tokens) == step_clock.tokens else None
        piece = Chunk(
            id="", attempt=0, run="", seq=0, index=index, token_ids=tokens,
            text=await step_clock.next_text(), finish_reason=last,
        )  # fmt: skip
        choice.add(piece)
        yield encode_event(words.encode(choice, piece) or b"", choice.shown_tokens)
    yield DONE


def create_app(step_clock: StepClock) -> FastAPI:
    api = FastAPI()

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        await request.body()
        return StreamingResponse(completion_events(step_clock), media_type=MEDIA_TYPE)

    files = read_folder(DEMO_MODEL_FOLDER)
    assert files.template is not None, "the demo model has a template"
    template = ChatTemplate(files.template, SystemClock(), files.special_tokens)
    tokenizer = Tokenizer(files.tokenizer, InlinePool())

    @api.post("/prompt")
    async def prompt(request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        tokens = tokenizer.encode_now(template.render(body["messages"]))
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        message = {"role": "assistant", "content": "word"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        answer = {"object": "chat.completion", "model": body["model"], "choices": [choice]}
        return Response(msgspec.json.encode({**answer, "usage": usage}))

    return api


if __name__ == "__main__":
    _, port, *numbers = sys.argv
    own = StepClock(int(numbers[0]), int(numbers[1]), float(numbers[2]), int(numbers[3]))
    uvicorn.run(
        create_app(own), port=int(port), http="httptools", loop="uvloop", log_level="warning"
    )
