"""A model server without a model: OpenAI's chat completions at a fixed rate, as plain ASGI.

    python -m workbench.bench.streaming.mock_server PORT STEPS_PER_S

All streams step together, as in a batching engine: one token each, with the time of its creation in
its text. An answer that is not streamed is sent at once. The server behind both sides of
`peer_router.py`, so it does as little as possible.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import uvicorn

from workbench.bench.streaming.token_feeder import timestamped_text

MODEL = "bench"
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[_Scope], Awaitable[None]]
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131_072}]}
_HEAD = {"id": "mock", "created": 1700000000, "model": MODEL}


class MockServer:
    def __init__(self, steps_per_s: float) -> None:
        self._pause_s = 1 / steps_per_s
        self._waiting: list[asyncio.Future[str]] = []
        self._clock: asyncio.Task[None] | None = None

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/v1/chat/completions":
            await self._complete(await _body(receive), send)
        elif path == "/v1/models":
            await _reply(send, 200, _MODELS)
        else:
            await _reply(send, 200 if path == "/health" else 404, {})

    async def _complete(self, body: dict[str, Any], send: _Send) -> None:
        # SGLang's router forwards it under the newer name.
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 1
        if not body.get("stream"):
            message = {"role": "assistant", "content": "word " * count}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            whole = {**_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage}
            await _reply(send, 200, whole)
            return
        await send(_start(200, b"text/event-stream"))
        for number in range(count):
            delta = {"role": "assistant", "content": await self._next_text()}
            last = "length" if number == count - 1 else None
            choice = {"index": 0, "delta": delta, "finish_reason": last}
            event = {**_HEAD, "object": "chat.completion.chunk", "choices": [choice]}
            await send(_data(b"data: " + msgspec.json.encode(event) + b"\n\n", more=True))
        await send(_data(b"data: [DONE]\n\n"))

    async def _next_text(self) -> str:
        if self._clock is None:
            self._clock = asyncio.create_task(self._run())
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return await turn

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            waiting, self._waiting = self._waiting, []
            text = timestamped_text(1)
            for turn in waiting:
                if not turn.done():
                    turn.set_result(text)
            due = max(due + self._pause_s, loop.time() - 1)
            await asyncio.sleep(max(0.0, due - loop.time()))


async def _body(receive: _Receive) -> dict[str, Any]:
    data, more = b"", True
    while more:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return msgspec.json.decode(data, type=dict[str, Any])


async def _reply(send: _Send, status: int, content: object) -> None:
    await send(_start(status, b"application/json", encoded := msgspec.json.encode(content)))
    await send(_data(encoded))


def _start(status: int, kind: bytes, content: bytes | None = None) -> _Scope:
    headers = [(b"content-type", kind)]
    if content is not None:
        headers.append((b"content-length", b"%d" % len(content)))
    return {"type": "http.response.start", "status": status, "headers": headers}


def _data(content: bytes, *, more: bool = False) -> _Scope:
    return {"type": "http.response.body", "body": content, "more_body": more}


if __name__ == "__main__":
    port, steps_per_s = sys.argv[1:]
    uvicorn.run(
        MockServer(float(steps_per_s)), port=int(port), http="httptools", loop="uvloop",
        log_level="warning",
    )  # fmt: skip
