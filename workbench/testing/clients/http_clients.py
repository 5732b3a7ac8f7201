"""HTTP clients of a simulation: they resume a stream at another gateway when theirs is gone.

A client whose gateway ends or sends nothing for a while disconnects and, by request id and
position, resumes the stream at any gateway. Where answers are long, it resumes at any position that
it has got, reads slowly, and reads parts of answers again that are over.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import msgspec

from kvlane.app.http.openai.response_writer import ID_HEADER
from workbench.testing.api_keys import TENANTS, ClientKey
from workbench.testing.clients.http_exchange import Disconnected, HttpCall, http_exchange
from workbench.testing.clients.kafka_clients import BURST_S, LONG_ANSWERS, TEXTS
from workbench.testing.clients.received_answer import ReceivedAnswer
from workbench.testing.simulated_process import SimulatedProcess
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import process_context
from workbench.testing.world_parameters import MODELS

MAX_HTTP_CLIENTS = 4
"""Most calls of a seed: one costs ten times as much as a record."""
MIN_READ_TIMEOUT_S, MAX_READ_TIMEOUT_S = 4.0, 20.0
RETRY_PAUSE_S = 2.0
RETRYABLE_CODES = ("log_unavailable", "stopping", "no_workers", "overloaded", "model_not_found")
"""Rejections by a gateway, before or instead of a router's: a retry may succeed."""
NOT_FOR_OTHERS = (HTTPStatus.NOT_FOUND, HTTPStatus.UNAUTHORIZED, HTTPStatus.SERVICE_UNAVAILABLE)
"""Answers to a request for an object of another tenant."""
MAX_CHOICES = 3
LEAVE_SHARE = 0.05
"""Probability, after an event of a long answer, that its client disconnects to resume elsewhere."""
SECOND_READINGS = 2
"""Readings of an answer that is over, each from a position that its client has got."""


class HttpClient:
    """One request of an HTTP client, and its answers so far."""

    def __init__(self, world: SimulatedWorld, number: int, rng: random.Random) -> None:
        shape = world.parameters
        self.name = f"caller-{number}"
        self.at_s = rng.random() * (BURST_S if shape.is_burst else shape.faults_s)
        self.prompt = rng.choice(TEXTS)
        self.max_tokens = rng.choice((1, 3, 7, 12, 20))
        self.chat = rng.random() < 0.5
        self._patience_s = rng.uniform(MIN_READ_TIMEOUT_S, MAX_READ_TIMEOUT_S)
        self.disconnects_after = rng.choice((None, None, None, 1, 3))
        """Events after which the client disconnects for good."""
        self.answers = [ReceivedAnswer()]
        """One for each choice; then second readings of answers that are over."""
        self.unexpected_errors: list[str] = []
        """Error codes that no gateway should ever send."""
        self._world = world
        self._rng = rng
        self._model = rng.choice(MODELS[: shape.models])
        self._choices = 1
        self._key: ClientKey | None = None
        self._pauses_s = 0.0
        self._is_unsteady = "long answers" in shape.scenarios
        more = random.Random(f"{world.seed} {self.name} more")
        if self._is_unsteady:
            self.max_tokens = more.choice(LONG_ANSWERS)
            self._pauses_s = more.choice((0.0, 0.3, 1.5))
        if "choices" in shape.scenarios:
            self._choices = more.randint(2, MAX_CHOICES)
        if world.keys is not None:
            self._key = ClientKey(world.keys, more.choice(TENANTS))

    @property
    def is_over(self) -> bool:
        """True once all its answers have ended."""
        return all(answer.outcome for answer in self.answers)

    async def run(self) -> None:
        """Send the request, and resume its streams until they are over; then read some again."""
        await self._world.clock.sleep(self.at_s)
        await self._read_all()
        if self._is_unsteady:
            self._read_again()
            await self._read_all()

    async def _read_all(self) -> None:
        while not self.is_over:
            up = [n for n in self._world.running("gateway") if n.state == "up"]
            if up:
                try:
                    await self._try(self._rng.choice(up))
                except Disconnected:
                    self._world.history.add_event(f"{self.name} lost its connection")
                    self._patience_s *= 2  # else it may ask for more than all workers can do
            await self._world.clock.sleep(RETRY_PAUSE_S * self._rng.random())

    def _read_again(self) -> None:
        for answer in list(self.answers):
            for _ in range(SECOND_READINGS if answer.marks else 0):
                self.answers.append(again := ReceivedAnswer(answer.id))
                again.marks = [self._rng.choice(answer.marks)]

    async def _ask_for_others(self, gateway: SimulatedProcess, key: ClientKey) -> None:
        """Ask for an answer, a file or a batch job of another tenant."""
        if not (paths := key.paths_of_others()):
            return
        call = HttpCall("GET", self._rng.choice(paths), headers=key.headers)
        async with aclosing(http_exchange(gateway, call, self._patience_s)) as parts:
            start = await anext(parts)
        if start["status"] not in NOT_FOR_OTHERS:
            self.unexpected_errors.append(f"{start['status']} for {call.path} of another tenant")

    async def _try(self, gateway: SimulatedProcess) -> None:
        if self._key is not None:
            await self._ask_for_others(gateway, self._key)
        if self.answers[0].id:
            answer = next(answer for answer in self.answers if not answer.outcome)
            read = [answer]
            stream = self._go_on(gateway, answer)
        else:
            read = self.answers = [ReceivedAnswer() for _ in range(self._choices)]
            stream = self._send(gateway)
        received = 0
        async with aclosing(stream) as events:
            async for event in events:
                self._take(event, read)
                received += 1
                if self._world.on_response_event is not None:
                    self._world.on_response_event(gateway)
                if received == self.disconnects_after:
                    self._leave()
                if all(each.outcome for each in read) or self._goes_elsewhere():
                    return
                if self._pauses_s:
                    await self._world.clock.sleep(self._pauses_s * self._rng.random())

    def _goes_elsewhere(self) -> bool:
        return self._is_unsteady and self._rng.random() < LEAVE_SHARE

    def _send(self, gateway: SimulatedProcess) -> AsyncGenerator[bytes, None]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": self.max_tokens, "stream": True}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        if self._choices > 1:
            body["n"] = self._choices
        if self._key is not None:
            body["nvext"] = {"session_control": {"session_id": "the same"}}
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        # Only a client that will resume elsewhere asks for a request that outlives it.
        headers = {} if self.disconnects_after else {"x-kvlane-detach": "true"}
        call = HttpCall("POST", path, msgspec.json.encode(body), headers)
        return self._exchange(gateway, call, self.answers)

    def _go_on(
        self, gateway: SimulatedProcess, answer: ReceivedAnswer
    ) -> AsyncGenerator[bytes, None]:
        if self._is_unsteady:
            answer.rewind(self._rng)
        path = f"/v1/streams/{answer.id}?form={'chat' if self.chat else 'completion'}"
        headers = {"last-event-id": f"{answer.position}"}
        return self._exchange(gateway, HttpCall("GET", path, headers=headers), [answer])

    async def _exchange(
        self, gateway: SimulatedProcess, call: HttpCall, read: list[ReceivedAnswer]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a response, one by one. Raises Disconnected."""
        self._world.history.add_event(f"{self.name} {call.method} {call.path} at {gateway.label}")
        buffered = 1 if self._pauses_s else 0
        is_valid = None
        if self._key is not None:
            is_valid = self._key.is_valid(gateway)
            call = call._replace(headers={**call.headers, **self._key.headers})
        messages = http_exchange(gateway, call, self._patience_s, buffered=buffered)
        async with aclosing(messages) as parts:
            start = await anext(parts)
            if is_valid == (start["status"] == HTTPStatus.UNAUTHORIZED):
                self.unexpected_errors.append("a revoked key is served, or a valid one refused")
            if call.method == "POST":
                self._name_answers({k.decode(): v.decode() for k, v in start["headers"]})
            rest = b""
            async for part in parts:
                rest += part.get("body", b"")
                if start["status"] == HTTPStatus.OK:
                    *events, rest = rest.split(b"\n\n")
                    for event in events:
                        yield event
        if start["status"] != HTTPStatus.OK:
            code = msgspec.json.decode(rest)["error"]["code"]
            self._world.history.add_event(f"{self.name} gets {start['status']} {code}")
            self._refused(code, call.method, read)

    def _refused(self, code: str, method: str, read: list[ReceivedAnswer]) -> None:
        if code == "invalid_api_key" and self._key is not None:
            self._key.replace()
        elif code in RETRYABLE_CODES and method == "POST":
            self._start_over()
        elif len(read) > 1:
            self._leave()  # some of the requests may not be in the log
        elif code != "overloaded":
            self._failed(code, read)

    def _name_answers(self, headers: Mapping[str, str]) -> None:
        if ids := headers.get(ID_HEADER):
            for answer, request_id in zip(self.answers, ids.split(","), strict=True):
                answer.id = unquote(request_id)
                if self._key is not None:
                    self._key.own(f"/v1/streams/{answer.id}")

    def _take(self, event: bytes, read: list[ReceivedAnswer]) -> None:
        """Take one event: a chunk, an error, or the end."""
        lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
        if (data := lines.get(b"data")) is None or data == b"[DONE]":
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            self._failed(chunk["error"]["code"], read)
            return
        positions = lines[b"id"].split(b",")
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if self.chat else choice["text"]
            index = choice["index"]
            read[index].take(text, int(positions[index]), choice["finish_reason"])

    def _start_over(self) -> None:
        """Send another request; the result of the one that was turned down is not checked."""
        for answer in self.answers:
            answer.id = ""

    def _leave(self) -> None:
        for answer in (each for each in self.answers if not each.outcome):
            answer.outcome = "left"

    def _failed(self, code: str, read: list[ReceivedAnswer]) -> None:
        if code in ("stopping", "log_unavailable"):
            return  # resumed at another gateway
        if len(read) > 1:
            return  # the error is of one of them: each is read by its own id
        for answer in (each for each in read if not each.outcome):
            answer.outcome = code
        if code in ("internal", "invalid_value"):
            self.unexpected_errors.append(code)


class HttpClients:
    def __init__(self, world: SimulatedWorld) -> None:
        rng = random.Random(f"{world.seed} calling")
        count = rng.randint(1, MAX_HTTP_CLIENTS) if world.parameters.gateways else 0
        self.clients = [
            HttpClient(world, n, random.Random(f"{world.seed} call {n}")) for n in range(count)
        ]
        self._loop = world.loop

    def start(self) -> None:
        for call in self.clients:
            self._loop.create_task(call.run(), name=call.name, context=process_context("callers"))
