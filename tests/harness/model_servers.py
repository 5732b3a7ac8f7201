"""A server that speaks as vLLM's does, around any engine, and one that speaks as its test says.

Bytes on a socket, no framework: what a client must survive is mostly what a framework would not
send. `EventPublisher` is the other half: cache events on ZMQ, with a replay socket, as vLLM has
them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from kvlane.app.engine.interface import Engine, EngineError, GenerateContext
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.indexer.cache_events.engine_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
)
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import PrefillResult, Request, SamplingOptions, StopConditions

TOKENIZER = Tokenizer(read_folder(DEMO_MODEL_FOLDER).tokenizer, InlinePool())
EOS = read_folder(DEMO_MODEL_FOLDER).eos_token_ids


class ServerExchange:
    """One request of a client, and its response."""

    def __init__(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self.path, self.body = path, body
        self.fields: dict[str, str] = {}
        self._reader, self._writer = reader, writer
        self.left = False
        """Whether the client disconnected before it was served."""

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int = 200, kind: str = "text/event-stream") -> None:
        lines = (f"HTTP/1.1 {status} -", f"content-type: {kind}", "transfer-encoding: chunked")
        await self.send("\r\n".join((*lines, "", "")).encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, event: Any) -> None:
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        await self.chunk(b"data: " + data + b"\n\n")

    async def end(self) -> None:
        await self.chunk(b"")

    async def answer(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n"
        await self.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    async def wait_closed(self) -> None:
        """Wait until the client closes the connection."""
        # Reading would take the next request away from who serves this connection.
        while not self._reader.at_eof():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self.left = True


Handler = Callable[[ServerExchange], Awaitable[None]]


class HttpServer:
    """An HTTP server on loopback. `handlers` by path; a handler may be put in at any time."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.exchanges: list[ServerExchange] = []
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def received_bodies(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        return [exchange.body for exchange in self.exchanges if exchange.path == path]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                path = head[0].split(" ")[1]
                exchange = ServerExchange(path, json.loads(body) if body else {}, reader, writer)
                exchange.fields = fields
                self.exchanges.append(exchange)
                handler = self.handlers.get(path)
                if handler is None:
                    await exchange.answer({"detail": "Not Found"}, 404)
                else:
                    await handler(exchange)
        except (asyncio.IncompleteReadError, ConnectionError, CloseConnection):
            pass
        finally:
            writer.close()


class CloseConnection(Exception):
    """Raised by a handler: the connection is closed."""


class ModelServer(HttpServer):
    """Serves an engine as vLLM would. `kind`: vllm, llamacpp (tokens in log probabilities only),
    text (completes tokens, gives text), words (completes text only)."""

    def __init__(self, engine: Engine, kind: str = "vllm", *, block_size: int = 16) -> None:
        super().__init__()
        self.engine, self.kind = engine, kind
        self.started_at = 1.0
        self.running = 0
        self._block_size = block_size
        self.handlers |= {
            "/health": self.health,
            "/v1/models": self.models,
            "/tokenize": self.tokenize,
            "/v1/completions": self.complete,
        }
        if kind == "vllm":
            self.handlers |= {"/metrics": self.metrics, "/version": self.version}

    async def health(self, exchange: ServerExchange) -> None:
        await exchange.answer({})

    async def models(self, exchange: ServerExchange) -> None:
        owner = self.kind if self.kind in ("vllm", "sglang", "llamacpp") else "somebody"
        base = {"id": "tiny", "owned_by": owner, "max_model_len": 512}
        adapter = {"id": "ada", "owned_by": owner, "parent": "tiny"}
        await exchange.answer({"object": "list", "data": [base, adapter]})

    async def version(self, exchange: ServerExchange) -> None:
        await exchange.answer({"version": "0.32.1"})

    async def tokenize(self, exchange: ServerExchange) -> None:
        await exchange.answer({"tokens": list(TOKENIZER.encode_now(exchange.body["prompt"]))})

    async def metrics(self, exchange: ServerExchange) -> None:
        lines = (
            f'vllm:num_requests_running{{engine="0"}} {self.running}.0',
            'vllm:num_requests_waiting{engine="0"} 0.0',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            f'vllm:iteration_tokens_total_count{{engine="0"}} {len(self.exchanges)}.0',
            f'vllm:cache_config_info{{block_size="{self._block_size}",num_gpu_blocks="41"}} 1.0',
            f"process_start_time_seconds {self.started_at}",
        )
        await exchange.answer("\n".join(lines).encode())

    async def complete(self, exchange: ServerExchange) -> None:
        body = exchange.body
        prompt = self._prompt(body)
        if self.kind == "words" and not isinstance(body.get("prompt", ""), str):
            await exchange.answer({"error": {"message": "prompt: give a string"}}, 400)
            return
        if body["model"] not in ("tiny", "ada"):
            await exchange.answer({"error": {"message": "no such model"}}, 404)
            return
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_decode"):
            await self._prefill(exchange, prompt)
            return
        context = GenerateContext("at the server", phase="decode" if transfer else "aggregated")
        watching = asyncio.get_running_loop().create_task(self._watch(exchange, context))
        self.running += 1
        try:
            await exchange.head()
            await self._answer(exchange, prompt, context)
            await exchange.end()
        finally:
            self.running -= 1
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if exchange.left:
            raise CloseConnection

    async def _prefill(self, exchange: ServerExchange, prompt: Sequence[int]) -> None:
        """A whole response, with what another server needs to fetch the blocks, if they are
        held."""
        assert not exchange.body.get("stream"), "events have no transfer parameters"
        request = self._request(exchange.body, prompt)
        context = GenerateContext("at the server", phase="prefill")
        async with aclosing(self.engine.generate(request, context)) as outputs:
            *_, last = [output async for output in outputs]
        params = None if last.transfer is None else json.loads(last.transfer)
        await exchange.answer({"choices": [], "kv_transfer_params": params})

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        prompt = body["prompt"]
        return list(TOKENIZER.encode_now(prompt) if isinstance(prompt, str) else prompt)

    async def _watch(self, exchange: ServerExchange, context: GenerateContext) -> None:
        await exchange.wait_closed()
        context.cancel()

    async def _answer(
        self, exchange: ServerExchange, prompt: Sequence[int], context: GenerateContext
    ) -> None:
        body, made, cached = exchange.body, 0, 0
        request = self._request(body, prompt)
        try:
            async with aclosing(self.engine.generate(request, context)) as outputs:
                async for output in outputs:
                    made += len(output.token_ids)
                    if output.usage is not None:
                        cached = output.usage.cached_tokens
                    choice = self._choice(body, output.token_ids)
                    choice["finish_reason"] = output.finish_reason
                    if made == len(output.token_ids) and body.get("return_token_ids"):
                        choice["prompt_token_ids"] = list(prompt)
                    await exchange.event({"choices": [choice]})
        except EngineError as e:
            await exchange.event({"error": {"message": str(e), "code": 500}})
        counts = {"prompt_tokens": len(prompt), "completion_tokens": made}
        await exchange.event(
            {"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}}
        )
        await exchange.event(b"[DONE]")

    def _request(self, body: dict[str, Any], prompt: Sequence[int]) -> Request:
        stop = StopConditions(
            max_tokens=body["max_tokens"],
            min_tokens=body.get("min_tokens", 0),
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
            ignore_eos=body.get("ignore_eos", False),
        )
        transfer, handed = body.get("kv_transfer_params"), None
        if transfer and not transfer.get("do_remote_decode"):
            handed = PrefillResult(disaggregated_params=msgspec.json.encode(transfer))
        return Request(
            id="-", token_ids=pack_tokens(prompt), stop=stop, eos_token_ids=EOS,
            sampling=SamplingOptions(), cache_salt=body.get("cache_salt", ""),
            prefill_result=handed,
        )  # fmt: skip

    def _choice(self, body: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": TOKENIZER.decode(token_ids)}
        if self.kind in ("vllm", "sglang") and body.get("return_token_ids"):
            choice["token_ids"] = list(token_ids)
        if body.get("logprobs") is not None:
            if self.kind == "vllm":
                names = [f"token_id:{token}" for token in token_ids]
                choice["logprobs"] = {
                    "tokens": names,
                    "token_logprobs": [-0.5] * len(names),
                    "top_logprobs": [{name: -0.5, "token_id:7": -2.0} for name in names],
                }
            elif self.kind == "llamacpp":
                at = [{"id": token, "token": "-", "logprob": -0.5} for token in token_ids]
                choice["logprobs"] = {"content": at}
        return choice


class TextServer(ModelServer):
    """Serves an engine without token ids: one kind of request, in characters.

    Each character of a prompt is a token, and each token a character of the answer.
    """

    def __init__(self, engine: Engine, kind: str = "chat") -> None:
        super().__init__(engine, "words")
        self.is_chat = kind == "chat"
        del self.handlers["/tokenize"], self.handlers["/v1/completions"]
        self.path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        self.handlers[self.path] = self.answer

    async def answer(self, exchange: ServerExchange) -> None:
        if exchange.body.get("stream"):
            await self.complete(exchange)
        else:
            await exchange.answer({"choices": [{"index": 0}]})

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        text = body["messages"][0]["content"] if self.is_chat else body["prompt"]
        return list(map(ord, text))

    def _choice(self, body: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        text = "".join(chr(0x4E00 + token % 5000) for token in token_ids)
        return {"index": 0} | ({"delta": {"content": text}} if self.is_chat else {"text": text})


class ScriptedServer(HttpServer):
    """Says what its test says, to one kind of request. `events` are said as they are, and then that
    this is all; what is no dict is awaited."""

    def __init__(self, kind: str = "chat") -> None:
        super().__init__()
        paths = {"chat": "chat/completions", "completion": "completions"}
        self.path = f"/v1/{paths.get(kind, 'embeddings')}"
        self.events: list[Any] = []
        self.handlers |= {"/v1/models": self.models, self.path: self.answer}

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The received bodies, without the workers' own requests."""
        return [b for b in self.received_bodies(self.path) if b.get("max_tokens") != 1]

    async def models(self, exchange: ServerExchange) -> None:
        await exchange.answer({"data": [{"id": "theirs", "max_model_len": 4096}]})

    async def answer(self, exchange: ServerExchange) -> None:
        if exchange.body.get("max_tokens") == 1:  # a worker tries it out, or probes it
            if not exchange.body.get("stream"):
                await exchange.answer({"choices": [{"index": 0}]})
                return
            events: list[Any] = [chat_event(finish_reason="stop")]
        else:
            events = self.events
        await exchange.head()
        for event in events:
            await (exchange.event(event) if isinstance(event, dict) else event(exchange))
        await exchange.event(b"[DONE]")
        await exchange.end()


def chat_event(delta: dict[str, Any] | None = None, **choice: Any) -> dict[str, Any]:
    """An event of a chat; without a delta of a completion."""
    fields = choice if delta is None else {"delta": delta} | choice
    return {
        "id": "theirs-1", "object": "chat.completion.chunk", "created": 1, "model": "theirs",
        "choices": [{"index": 0, "finish_reason": None} | fields],
    }  # fmt: skip


def stream_of(kind: str, *parts: Any) -> list[Any]:
    """The events of an answer, for a server of chats or of tokens, from the parts that servers
    have in common: a text with or without a finish reason, a reason, an event or bytes as they are.

    Each character of a text is a token.
    """
    return [_stream_event(kind, part) for part in parts]


def _stream_event(kind: str, part: Any) -> Any:
    if not isinstance(part, str | tuple):
        return part
    text, reason = (part, None) if isinstance(part, str) else part
    if kind == "chat":
        return chat_event({"content": text}, finish_reason=reason)
    fields = {"text": text, "token_ids": list(map(ord, text)), "finish_reason": reason}
    return {"id": "theirs-1", "choices": [{"index": 0} | fields]}


def usage_event(prompt: int, answer: int, **more: Any) -> dict[str, Any]:
    """The usage event after the last chunk."""
    counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return {"choices": [], "usage": counts | more}


class EventPublisher:
    """Cache events as vLLM publishes them. `dropped`: numbers that never leave by the first socket,
    `forgotten`: those that replays lack, too."""

    def __init__(self, port: int = 0, replay_port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._pub, self._router = (self._context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER))
        self.dropped: set[int] = set()
        self.forgotten: set[int] = set()
        self.sent: list[bytes] = []
        self.replays: list[int] = []
        self.answers = True
        for socket, wanted in ((self._pub, port), (self._router, replay_port)):
            socket.linger = 0
            socket.bind(f"tcp://127.0.0.1:{wanted or '*'}")
        self.endpoint, self.replay = (
            socket.get_string(zmq.LAST_ENDPOINT) for socket in (self._pub, self._router)
        )
        self._replaying = asyncio.get_running_loop().create_task(self._replay())

    def publish(self, events: Sequence[EngineEvent]) -> None:
        """Publish a step's events; usable as an engine's listener."""
        number, payload = len(self.sent), batch_of(events)
        self.sent.append(payload)
        if number not in self.dropped:
            self._pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def wait_subscribed(self) -> None:
        """Wait for a subscriber: earlier events do not reach it."""
        await self._pub.recv_multipart()

    async def close(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _replay(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            for number in range(self.replays[-1], len(self.sent)):
                if number not in self.forgotten:
                    frames = [client, b"", b"kv", number.to_bytes(8, "big"), self.sent[number]]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])


def batch_of(events: Sequence[EngineEvent]) -> bytes:
    return msgspec.msgpack.encode([0.0, [_event(event) for event in events], 0])


def _event(event: EngineEvent) -> dict[str, Any]:
    if isinstance(event, BlocksStored):
        return {
            "type": "BlockStored", "block_hashes": list(event.block_hashes),
            "parent_block_hash": event.parent, "token_ids": list(event.token_ids),
            "block_size": event.block_size, "medium": "GPU", "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }  # fmt: skip
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": list(event.block_hashes), "medium": "GPU"}
    assert isinstance(event, AllCleared)
    return {"type": "AllBlocksCleared"}


async def collect(stream: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(stream):
        return [output async for output in stream]
