"""Clients of a deployment: OpenAI's client over HTTP, an SSE listener, and Kafka.

What each of them asks is held in an `DemoAnswer`, which knows the answer that is due.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai

from kvlane.app.demo.expected_answers import AnswerOracle, DemoAnswer
from kvlane.app.preprocess.requests.openai_requests import TokenizedKind
from kvlane.app.settings import Settings
from kvlane.streams.client import Client
from kvlane.streams.clock import SystemClock
from kvlane.streams.kafka.kafka_log import KafkaLog
from kvlane.streams.prompt import Prompt

ANSWER_S = 120.0
"""Time limit of an answer in a test."""
CLOCK = SystemClock()


class DeploymentClients:
    """Clients over HTTP at both gateways, and on Kafka. Keeps all requests."""

    def __init__(self, log: KafkaLog, settings: Settings, urls: tuple[str, ...]) -> None:
        self.log = log
        self.client = Client(log, CLOCK)
        self.judge = AnswerOracle(settings, CLOCK)
        self.openai = [
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
            )
            for url in urls
        ]
        self.published: list[DemoAnswer] = []

    async def wait_model(self) -> None:
        """Wait until both gateways know the model."""
        deadline = CLOCK.now() + ANSWER_S
        for gateway in self.openai:
            while not (await gateway.models.list()).data:
                assert CLOCK.now() < deadline
                await CLOCK.sleep(0.1)

    async def stream(
        self, gateway: int, kind: TokenizedKind, body: dict[str, Any], sent: DemoAnswer
    ) -> None:
        """Request a stream, and read it to its end."""
        answers: Any = self._endpoint(gateway, kind)
        stream = await answers.create(**_arguments(body), stream=True)
        sent.id = stream.response.headers["x-kvlane-id"]
        async for chunk in stream:
            (choice,) = chunk.choices
            text = choice.delta.content if kind == "chat" else choice.text
            sent.add_text(text or "", choice.finish_reason, CLOCK.now())

    async def complete(
        self, gateway: int, kind: TokenizedKind, body: dict[str, Any], sent: DemoAnswer
    ) -> None:
        """Request an unstreamed answer."""
        answers: Any = self._endpoint(gateway, kind)
        (choice,) = (await answers.create(**_arguments(body))).choices
        text = choice.message.content if kind == "chat" else choice.text
        sent.add_text(text, choice.finish_reason, CLOCK.now())

    async def publish(self, kind: TokenizedKind, body: dict[str, Any]) -> DemoAnswer:
        sent = await self.judge.expect_answer(self.client.new_request_id(), kind, body)
        await self.client.publish(Prompt(id=sent.id, kind=kind, body=body))
        self.published.append(sent)
        return sent

    async def read(self, sent: DemoAnswer) -> None:
        """Read the answer to a published prompt to its end."""
        async for piece in self.client.stream(sent.id, timeout_s=ANSWER_S):
            sent.add_record(piece, CLOCK.now())

    def _endpoint(self, gateway: int, kind: TokenizedKind) -> object:
        client = self.openai[gateway]
        return client.chat.completions if kind == "chat" else client.completions


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments for OpenAI's client: unknown fields go into `extra_body`."""
    ours = {"ignore_eos": body["ignore_eos"]} if "ignore_eos" in body else {}
    return {key: value for key, value in body.items() if key not in ours} | {"extra_body": ours}


class SseListener:
    """Reads one stream as a browser does: keeps the last event's id, and resumes from it."""

    def __init__(self, sent: DemoAnswer) -> None:
        self.sent = sent
        self.position = ""
        self.breaks = 0

    async def send(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        """Read until the end, or until the connection breaks."""
        try:
            async with http.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True}
            ) as response:
                self.sent.id = response.headers["x-kvlane-id"]
                await self._listen(response)
        except httpx.TransportError:
            self.breaks += 1

    async def resume(self, http: httpx.AsyncClient) -> None:
        headers = {"last-event-id": self.position} if self.position else {}
        url = f"/v1/streams/{self.sent.id}"
        async with http.stream("GET", url, headers=headers) as response:
            await self._listen(response)

    async def _listen(self, response: httpx.Response) -> None:
        assert response.status_code == httpx.codes.OK, await response.aread()
        event: dict[str, str] = {}
        async for line in response.aiter_lines():
            if line:
                field, _, value = line.partition(": ")
                event[field] = value
                continue
            data = event.pop("data", "")
            if data.startswith("{"):
                (choice,) = json.loads(data)["choices"]
                text = choice["delta"].get("content", "")
                self.sent.add_text(text, choice["finish_reason"], CLOCK.now())
            self.position = event.get("id", self.position)
            event.clear()
