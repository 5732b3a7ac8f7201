"""Many who ask at a steady pace, over HTTP with OpenAI's own client and on Kafka, and go on asking.

Open loop: requests are due at fixed times, whatever the answers take. Whoever's connection breaks
goes on with `GET /v1/streams/{id}` and `Last-Event-ID` at another gateway, and has said before, by
a header, that to hang up is not to cancel. Whoever is refused, or hears nothing of a request that
has no id yet, asks again. Each answer is held against what the engine must say. Knows nothing of
what happens to the processes.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from app.demo.asked import Asked, Judge
from app.http.generation import DETACH
from app.http.telling import ID_HEADER
from streams.client import Client
from streams.clock import Clock
from streams.prompt import Prompt
from streams.records import End

SILENCE_S = 12.0
"""Hearing nothing for so long, a client takes its connection for dead. Longer than a worker's
time-out and what follows it."""
CONNECT_S = 3.0
ANSWER_S = 120.0
"""Past this a request counts as lost."""
AGAIN_S = 0.2
OF = 8
KAFKA = "kafka"
RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
"""What OpenAI's own client asks again for; 500 only while nothing was said."""
GOES_ON = frozenset({"stopping", "log_unavailable"})
"""Ends of a stream that say: at another gateway it goes on."""
WORDS = ("lane", "river", "morning", "story", "harbour", "train", "window", "letter", "garden")


@dataclass
class Talk:
    """One request and its client. Times are of the clock, in seconds."""

    asked: Asked
    number: int
    gateways: list[tuple[float, str]] = field(default_factory=list)
    """Where it was listened to, and since when; `KAFKA` for readers of the log."""
    position: int = 0
    repeated: int = 0
    """Pieces that had been told before."""
    breaks: int = 0
    refusals: int = 0
    over_at: float | None = None

    @property
    def verdict(self) -> str:
        """`right`, `twice`, `lost` (the end or a part of it is missing), or `wrong`."""
        told, due = self.asked.text, self.asked.due.text
        if self.asked.is_right and not self.repeated:
            return "right"
        if self.repeated or len(told) > len(due):
            return "twice"
        return "lost" if due.startswith(told) else "wrong"

    def gateway_at(self, moment: float) -> str:
        """Where it was listened to at a moment; "" before the first."""
        return next((name for since, name in reversed(self.gateways) if since <= moment), "")


class Crowd:
    """Asks `rate` times a second, until it is stopped."""

    def __init__(
        self,
        gateways: dict[str, str],
        client: Client,
        judge: Judge,
        clock: Clock,
        *,
        rate: float,
        tokens: int,
        on_kafka: int,
        rng: random.Random,
    ) -> None:
        """`gateways`: their URLs by name. `tokens`: how long answers are.

        `on_kafka`: of eight requests, how many are prompts on Kafka.
        """
        self._clock = clock
        self._client = client
        self._judge = judge
        self._rate = rate
        self._tokens = tokens
        self._on_kafka = on_kafka
        self._rng = rng
        timeout = openai.Timeout(SILENCE_S, connect=CONNECT_S)
        self._openai = {
            name: openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout
            )
            for name, url in gateways.items()
        }
        self._asking: set[asyncio.Task[None]] = set()
        self.talks: list[Talk] = []
        """All of them that nobody has taken account of yet."""
        self.late_s = 0.0
        """The latest that a request was asked, after it was due."""
        self.asked = 0
        """How many requests there were in `asking_s`."""
        self.asking_s = 0.0

    async def run(self) -> None:
        """Ask until cancelled; what was asked goes on until `drained`."""
        number, began = 0, self._clock.now()
        due = began
        while True:
            self.late_s = max(self.late_s, self._clock.now() - due)
            task = asyncio.create_task(self._ask(number))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            number += 1
            due = began + number / self._rate
            await self._clock.sleep(max(0.0, due - self._clock.now()))
            self.asked, self.asking_s = number, self._clock.now() - began

    async def served(self, within_s: float) -> None:
        """Wait until all gateways know the model. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            for client in self._openai.values():
                while not (await client.models.list()).data:
                    await self._clock.sleep(AGAIN_S)

    async def drained(self) -> None:
        """Wait for the last answers."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=ANSWER_S + SILENCE_S)

    async def close(self) -> None:
        """Hang up."""
        for task in list(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for client in self._openai.values():
            await client.close()

    # --- one request -----------------------------------------------------------------------------

    async def _ask(self, number: int) -> None:
        text = f"Tell me of {' '.join(self._rng.choices(WORDS, k=6))}, the {number}th time."
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._tokens + number % 7,
        }
        if number % 4 != 3:
            body["ignore_eos"] = True
        talk = Talk(await self._judge.asked("", "chat", body), number)
        self.talks.append(talk)
        try:
            async with asyncio.timeout(ANSWER_S):
                if number % OF >= OF - self._on_kafka:
                    await self._publish(talk, body)
                else:
                    await self._chat(talk, body)
        except TimeoutError:
            talk.asked.ended = "timeout"
        except Exception as e:  # noqa: BLE001 - whatever its client fails with, it is lost
            talk.asked.ended = talk.asked.ended or f"{type(e).__name__}: {e}"
        finally:
            talk.over_at = self._clock.now()

    async def _publish(self, talk: Talk, body: dict[str, Any]) -> None:
        talk.asked.id = self._client.new_request_id()
        talk.gateways.append((self._clock.now(), KAFKA))
        prompt = Prompt(id=talk.asked.id, kind="chat", body=body)
        await self._client.publish(prompt, timeout_s=ANSWER_S)
        async for piece in self._client.stream(talk.asked.id, timeout_s=ANSWER_S):
            if not isinstance(piece, End):
                talk.repeated += piece.index < talk.position
                talk.position = piece.index + len(piece.token_ids)
            talk.asked.receive(piece, self._clock.now())

    async def _chat(self, talk: Talk, body: dict[str, Any]) -> None:
        names = list(self._openai)
        at = talk.number  # gateways in turn, then whichever is left
        while not talk.asked.ended:
            name = names[at % len(names)]
            at += 1
            try:
                await self._listen(talk, name, body)
            except openai.APIStatusError as e:
                if e.status_code not in RETRIED or e.code in ("attempts", "lost", "internal"):
                    raise
                talk.refusals += 1
                await self._clock.sleep(AGAIN_S)
            except openai.APIConnectionError:
                talk.breaks += 1
                await self._clock.sleep(AGAIN_S / 10)
            except openai.APIError as e:  # an event in the stream
                if e.code not in GOES_ON:
                    talk.asked.ended = str(e.code or e)
                talk.breaks += 1

    async def _listen(self, talk: Talk, name: str, body: dict[str, Any]) -> None:
        """Ask, or go on; until the end, or until it breaks. Raises openai.APIError."""
        client, asked = self._openai[name], talk.asked
        if asked.id:
            stream: Any = await client.get(
                f"/streams/{asked.id}",
                cast_to=ChatCompletionChunk,
                stream=True,
                stream_cls=openai.AsyncStream[ChatCompletionChunk],
                options={"headers": {"Last-Event-ID": str(talk.position)}},
            )
        else:
            said = {k: v for k, v in body.items() if k in ("model", "messages", "max_tokens")}
            more = {k: v for k, v in body.items() if k not in said}
            stream = await client.chat.completions.create(
                **said, stream=True, extra_body=more, extra_headers={DETACH: "true"}
            )
            asked.id = stream.response.headers[ID_HEADER]
        talk.gateways.append((self._clock.now(), name))
        async for chunk in stream:
            position = int(stream._decoder._last_event_id or 0)  # noqa: SLF001  not told otherwise
            for choice in chunk.choices:
                text, reason = choice.delta.content or "", choice.finish_reason
                # The last piece may be text alone, which had been held back.
                behind = position < talk.position + (reason is None)
                talk.repeated += bool(text) and behind
                asked.hear(text, reason, self._clock.now())
            talk.position = max(talk.position, position)
        if not asked.ended:
            talk.breaks += 1
