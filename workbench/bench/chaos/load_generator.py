"""Open-loop load generator: OpenAI and Kafka clients with reconnects and retries.

Requests are due at fixed times, independently of the answers. A client whose connection breaks
resumes at another gateway with `GET /v1/streams/{id}` and `Last-Event-ID`; a header keeps its
request from being cancelled. Rejected requests, and those without a response before their id is
known, are sent again. Each answer is compared with the expected text of the engine, those of agents
with all of their parts (`agent_requests.py`). Never injects faults.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import openai
from msgspec.structs import replace
from openai.types.chat import ChatCompletionChunk

from kvlane.app.demo.expected_answers import AnswerOracle, DemoAnswer
from kvlane.app.http.openai.completions import DETACH_HEADER
from kvlane.app.http.openai.response_writer import ID_HEADER
from kvlane.streams.client import Client
from kvlane.streams.clock import Clock
from kvlane.streams.prompt import Prompt
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.records import End
from workbench.bench.chaos.agent_requests import (
    AGENT_MODEL,
    AGENTS_EVERY,
    agent_request,
    text_of_chunk,
    text_of_delta,
)

READ_TIMEOUT_S = 12.0
"""After this silence a client closes its connection. Longer than the timeout of a worker and the
failover after it."""
CONNECT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 120.0
"""After this a request counts as lost."""
BATCH_TIMEOUT_S = 3600.0
"""The same for batch requests: they wait for the time that interactive ones leave. Those that are
open at the end of the load get the time of `drain` from then on, like the others."""
RETRY_DELAY_S = 0.2
REQUEST_CYCLE = 8
VIA_KAFKA = "kafka"
RETRIED_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""Statuses that OpenAI's own client retries; 500 only before the first text."""
RESUMABLE_CODES = frozenset({"stopping", "log_unavailable"})
"""Error codes of a stream that can be resumed at another gateway."""
WORDS = ("lane", "river", "morning", "story", "harbour", "train", "window", "letter", "garden")


@dataclass
class Conversation:
    """One request and its client. Times are seconds of the clock."""

    expected: DemoAnswer
    number: int
    gateways: list[tuple[float, str]] = field(default_factory=list)
    """The gateways that it was read from, with start times; `VIA_KAFKA` for Kafka clients."""
    is_batch: bool = False
    agent_content: str | None = None
    """The content of the answer to an agent; None for other requests."""
    position: int = 0
    repeated_chunks: int = 0
    """Number of chunks that had been received before."""
    disconnects: int = 0
    rejections: int = 0
    ended_at: float | None = None

    @property
    def verdict(self) -> str:
        """`right`, `twice` (repeated text), `lost` (the end or a part is missing), or `wrong`."""
        received, due = self.expected.text, self.expected.expected.text
        if self.expected.is_correct and not self.repeated_chunks:
            return "right"
        if self.repeated_chunks or len(received) > len(due):
            return "twice"
        return "lost" if due.startswith(received) else "wrong"

    def gateway_at(self, moment: float) -> str:
        """The gateway that it was read from at a time; "" before the first."""
        return next((name for since, name in reversed(self.gateways) if since <= moment), "")


class LoadGenerator:
    """Sends `rate` requests per second, until cancelled."""

    def __init__(
        self,
        gateways: dict[str, str],
        client: Client,
        judge: AnswerOracle,
        clock: Clock,
        *,
        rate: float,
        tokens: int,
        on_kafka: int,
        rng: random.Random,
        batch: int = 0,
        has_agents: bool = False,
    ) -> None:
        """`gateways`: URLs by name. `tokens`: length of an answer.

        `on_kafka`: number of requests in eight that are prompts on Kafka. `batch`: of the others,
        those that are batch prompts on Kafka. `has_agents`: a third of all are agents' requests.
        """
        self._clock = clock
        self._client = client
        self._oracle = judge
        self._rate = rate
        self._tokens = tokens
        self._on_kafka = on_kafka
        self._batch = batch
        self._has_agents = has_agents
        self._rng = rng
        timeout = openai.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._openai = {
            name: openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout
            )
            for name, url in gateways.items()
        }
        self._open: set[asyncio.Task[None]] = set()
        self.conversations: list[Conversation] = []
        """Requests that are not yet in a line of the log."""
        self.max_lateness_s = 0.0
        """The largest delay of a request after its due time."""
        self.request_count = 0
        """Number of requests in `duration_s`."""
        self.duration_s = 0.0

    async def run(self) -> None:
        """Send requests until cancelled; those in flight continue until `drain`."""
        number, began = 0, self._clock.now()
        due = began
        while True:
            self.max_lateness_s = max(self.max_lateness_s, self._clock.now() - due)
            task = asyncio.create_task(self._start(number))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            number += 1
            due = began + number / self._rate
            await self._clock.sleep(max(0.0, due - self._clock.now()))
            self.request_count, self.duration_s = number, self._clock.now() - began

    async def wait_until_served(self, timeout_s: float, *, with_agents: bool = True) -> None:
        """Wait until all gateways serve the models. Raises TimeoutError."""
        wanted = {"demo", *([AGENT_MODEL] if self._has_agents and with_agents else [])}
        async with asyncio.timeout(timeout_s):
            for client in self._openai.values():
                while not wanted <= {model.id for model in (await client.models.list()).data}:
                    await self._clock.sleep(RETRY_DELAY_S)

    async def drain(self) -> None:
        if self._open:
            await asyncio.wait(self._open, timeout=REQUEST_TIMEOUT_S + READ_TIMEOUT_S)

    async def close(self) -> None:
        """Cancel all requests and close the clients."""
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for client in self._openai.values():
            await client.close()

    # --- one request -----------------------------------------------------------------------------

    async def _start(self, number: int) -> None:
        words = f"{' '.join(self._rng.choices(WORDS, k=6))}, the {number}th time"
        from_end = REQUEST_CYCLE - number % REQUEST_CYCLE - self._on_kafka
        is_batch = 0 < from_end <= self._batch
        if self._has_agents and number % AGENTS_EVERY == AGENTS_EVERY - 1:
            body, answer, content = agent_request(words)
            expected = DemoAnswer("", answer, 0, self._clock.now())
            chat = Conversation(expected, number, is_batch=is_batch, agent_content=content)
        else:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": f"Tell me of {words}."}],
                "max_tokens": self._tokens + number % 7,
            }
            if number % 4 != 3:
                body["ignore_eos"] = True
            expected = await self._oracle.expect_answer("", "chat", body)
            chat = Conversation(expected, number, is_batch=is_batch)
        self.conversations.append(chat)
        limit_s = BATCH_TIMEOUT_S if is_batch else REQUEST_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                if is_batch or from_end <= 0:
                    await self._publish(chat, body, limit_s)
                else:
                    await self._chat(chat, body)
        except TimeoutError:
            chat.expected.finish_reason = "timeout"
        except Exception as e:  # noqa: BLE001 - any error of the client counts as lost
            chat.expected.finish_reason = chat.expected.finish_reason or f"{type(e).__name__}: {e}"
        finally:
            chat.ended_at = self._clock.now()

    async def _publish(self, chat: Conversation, body: dict[str, Any], limit_s: float) -> None:
        chat.expected.id = self._client.new_request_id()
        chat.gateways.append((self._clock.now(), VIA_KAFKA))
        service_class: ServiceClass = "batch" if chat.is_batch else "interactive"
        prompt = Prompt(id=chat.expected.id, kind="chat", body=body, service_class=service_class)
        await self._client.publish(prompt, timeout_s=REQUEST_TIMEOUT_S)
        async for piece in self._client.stream(chat.expected.id, timeout_s=limit_s):
            if not isinstance(piece, End):
                chat.repeated_chunks += piece.index < chat.position
                chat.position = piece.index + len(piece.token_ids)
                piece = replace(piece, text=text_of_chunk(piece))  # noqa: PLW2901
            chat.expected.add_record(piece, self._clock.now())

    async def _chat(self, chat: Conversation, body: dict[str, Any]) -> None:
        names = list(self._openai)
        at = chat.number  # round robin over the gateways
        while not chat.expected.finish_reason:
            name = names[at % len(names)]
            at += 1
            try:
                await self._listen(chat, name, body)
            except openai.APIStatusError as e:
                if e.status_code not in RETRIED_STATUSES or e.code in (
                    "attempts",
                    "lost",
                    "internal",
                ):
                    raise
                chat.rejections += 1
                await self._clock.sleep(RETRY_DELAY_S)
            except openai.APIConnectionError:
                chat.disconnects += 1
                await self._clock.sleep(RETRY_DELAY_S / 10)
            except openai.APIError as e:  # an error event in the stream
                if e.code not in RESUMABLE_CODES:
                    chat.expected.finish_reason = str(e.code or e)
                chat.disconnects += 1

    async def _listen(self, chat: Conversation, name: str, body: dict[str, Any]) -> None:
        """Send or resume a request and read until it ends or breaks. Raises openai.APIError."""
        client, expected = self._openai[name], chat.expected
        if expected.id:
            stream: Any = await client.get(
                f"/streams/{expected.id}",
                cast_to=ChatCompletionChunk,
                stream=True,
                stream_cls=openai.AsyncStream[ChatCompletionChunk],
                options={"headers": {"Last-Event-ID": str(chat.position)}},
            )
        else:
            named = {k: v for k, v in body.items() if k in ("model", "messages", "max_tokens")}
            more = {k: v for k, v in body.items() if k not in named}
            stream = await client.chat.completions.create(
                **named, stream=True, extra_body=more, extra_headers={DETACH_HEADER: "true"}
            )
            expected.id = stream.response.headers[ID_HEADER]
        chat.gateways.append((self._clock.now(), name))
        async for chunk in stream:
            position = int(stream._decoder._last_event_id or 0)  # noqa: SLF001  it has no accessor
            for choice in chunk.choices:
                text = text_of_delta(choice.delta.to_dict(), expected.id)
                reason = choice.finish_reason
                # The last chunk may have text only, which was held back before.
                behind = position < chat.position + (reason is None)
                chat.repeated_chunks += bool(text) and behind
                expected.add_text(text, reason, self._clock.now())
            chat.position = max(chat.position, position)
        if not expected.finish_reason:
            chat.disconnects += 1
