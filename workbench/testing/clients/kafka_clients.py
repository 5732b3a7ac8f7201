"""Kafka clients of a simulation: requests, prompts, repeats, cancels, and the expected answers.

Everything is drawn before the first record is written, so that a seed sends the same requests in
every run. All clients publish from one process, under the same network faults as all
others. HTTP clients are in `http_clients.py`.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvlane.app.engine.echo import echo_answer
from kvlane.app.text.byte_level import ASSISTANT, encode_bytes
from kvlane.streams.codecs import encode as entry_of
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.errors import AppendFailed, BrokerUnavailable
from kvlane.streams.memory.memory_log import MemoryLog
from kvlane.streams.ports import Entry
from kvlane.streams.prompt import Prompt, encode_prompt
from kvlane.streams.record_base import ServiceClass
from kvlane.streams.record_publisher import RecordPublisher
from kvlane.streams.records import Cancel, Refused
from kvlane.streams.request import (
    AnswerParsing,
    GuidedDecoding,
    Request,
    ResultOptions,
    SamplingOptions,
    StopConditions,
    StoredInput,
)
from kvlane.streams.topics import BATCH, PROMPTS, REQUESTS
from workbench.testing.simulated_world import SimulatedWorld
from workbench.testing.virtual_time import VirtualClock, process_context
from workbench.testing.world_parameters import DEAD_REPLIES, MODELS, OPEN_REPLIES, UNKNOWN_REPLIES

ENDLESS_PROMPT_DEADLINE_S = 20.0
TEXTS = ("abc", "kvlane", "né", "→✓", "a", "tokens, please")
AGENT_TEXTS = (
    '<think>a</think>b<tool_call>{"name": "f", "arguments": {"c": 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
    "<think>no call</think>plain <tool_call>text",
)
"""Prompts that the engines echo."""
AGENT_REQUESTS = (2, 5)
NO_DEADLINE_S = 600.0
BATCH_DEADLINE_S = 86_400.0
"""Time limit of batch prompts that wait for a part that is away."""
LONG_ANSWERS = (5, 15, 40)
ENDLESS_TOKENS = 2000
"""Length of an answer that outlasts the simulation: only its Cancel can end it."""
BURST_S = 1.5
PEAK_OVERLAP = 0.8
"""Part of the longest time limit after which a peak sends its requests again."""
REPEATED_WITHIN = 0.3
"""Part of `dedup_window_s` within which a client repeats a request."""
RETRIED_S = 5.0
"""Time after which a client looks again whether its first record is in the log."""
UNSERVED_MODEL = "nobody's"
"""A model that no worker serves."""


class ExpectedRequest(NamedTuple):
    """One request and its whole expected answer. `is_refused`: it is to be rejected. `via_prompts`:
    it is published to a topic of prompts, not to `requests`. `may_expire`: once begun, it has less
    time than a peak may take from it. `reply_topic`: the topic that a copy of its result is for."""

    request: Request
    expected_tokens: list[int]
    is_cancelled: bool
    is_refused: bool = False
    via_prompts: bool = False
    wants_result: bool = False
    may_expire: bool = False
    reply_topic: str = ""

    @property
    def may_time_out(self) -> bool:
        """Whether its deadline may pass within the simulation."""
        return self.may_expire or self.request.deadline_s < NO_DEADLINE_S

    @property
    def is_served(self) -> bool:
        """Whether any worker serves its model."""
        return self.request.model != UNSERVED_MODEL


class Publication(NamedTuple):
    """A record to publish `at_s` seconds after the start; records of one `id` go in order."""

    at_s: float
    id: str
    topic: str
    entry: Entry


class KafkaClients:
    """The requests of one seed, and the client process that publishes them."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._rng = rng = random.Random(f"{world.seed} asking")
        self.requests: dict[str, ExpectedRequest] = {}
        self._publications: list[Publication] = []
        self._reply_rng = random.Random(f"{world.seed} replies")
        within_s = BURST_S if world.parameters.is_burst else world.parameters.faults_s
        for number in range(world.parameters.requests):
            self._draw(f"r{number}", rng.random() * within_s)
        batch_rng = random.Random(f"{world.seed} asking batch")
        batch_within_s = BURST_S if world.parameters.peak_s else within_s / 2
        for number in range(world.parameters.batch_requests):
            self._draw_batch(batch_rng, f"b{number}", batch_rng.random() * batch_within_s)
        if "agents" in world.parameters.scenarios:
            agent_rng = random.Random(f"{world.seed} agents")
            self._store_rng = random.Random(f"{world.seed} stored")
            for number in range(agent_rng.randint(*AGENT_REQUESTS)):
                self._draw_agent(agent_rng, f"agent{number}", agent_rng.random() * within_s)
        if world.parameters.peak_s is not None:
            self._draw_peak(random.Random(f"{world.seed} peak"), *world.parameters.peak_s)
        self._publications.sort(key=lambda p: p.at_s)

    def _draw(self, request_id: str, at: float) -> None:
        rng, shape = self._rng, self._world.parameters
        text = rng.choice(TEXTS)
        prompt = [*encode_bytes(text), ASSISTANT]
        cancelled = rng.random() < shape.cancel_share
        endless = cancelled and rng.random() < 0.5
        lengths = LONG_ANSWERS if "long answers" in shape.scenarios else (None, 1, 3, 7, 12)
        max_tokens = ENDLESS_TOKENS if endless else rng.choice(lengths)
        prompted = bool(shape.preprocessors) and rng.random() < 0.5
        # A prompt without a model is for the only model there is.
        unnamed = () if prompted and shape.models > 1 else ("",)
        model = rng.choice((*unnamed, *MODELS[: shape.models]))
        deadline_s = rng.uniform(1.0, 20.0) if rng.random() < 0.12 else NO_DEADLINE_S
        deadline_s = min(deadline_s, shape.settings.max_lifetime_s)
        if endless and prompted and shape.is_tight:
            # Its cancel waits behind earlier prompts of the partition, which may wait for its end.
            deadline_s = min(deadline_s, ENDLESS_PROMPT_DEADLINE_S)
        if rng.random() < 0.04:
            model, deadline_s = UNSERVED_MODEL, rng.uniform(1.0, 10.0)
        request = Request(
            id=request_id,
            model=model,
            token_ids=pack_tokens(prompt),
            deadline_s=deadline_s,
            stop=StopConditions(max_tokens=max_tokens),
        )
        refused = rng.random() < 0.06
        nonsense = not prompted and rng.random() < 0.04
        if nonsense:
            request, refused = _nonsense(rng, request), True
        reply_topic = self._draw_reply_topic() if prompted else ""
        question = ExpectedRequest(
            request, echo_answer(prompt, max_tokens), cancelled, refused, prompted,
            wants_result=bool(reply_topic), may_expire=shape.absence is not None,
            reply_topic=reply_topic,
        )  # fmt: skip
        self.requests[request_id] = question
        if prompted:
            topic, entry = PROMPTS, _prompt(question, text, prompt)
            cancel = encode_prompt(Prompt(id=request_id, kind="cancel"))
        else:
            turned_down = refused and not nonsense
            record = Refused(id=request_id, code="invalid") if turned_down else request
            topic, entry = REQUESTS, entry_of(record, request_id)
            cancel = entry_of(Cancel(id=request_id, reason="of the client"), request_id)
        self._publish_at(at, request_id, topic, entry)
        while rng.random() < 0.2:
            self._publish_at(at + self._repeat_s(rng), request_id, topic, entry)
        if cancelled:
            for _ in range(rng.choice((1, 1, 2))):
                # Often at once, so that both come with the same poll.
                later_s = rng.choice((0.0, rng.expovariate(0.5), rng.expovariate(0.5)))
                self._publish_at(at + later_s, request_id, topic, cancel)

    def _draw_batch(self, rng: random.Random, request_id: str, at: float) -> None:
        """A prompt of class batch, mostly in its own topic; its answer is long enough to be
        preempted."""
        shape = self._world.parameters
        text = rng.choice(TEXTS)
        prompt = [*encode_bytes(text), ASSISTANT]
        max_tokens = rng.choice((3, 12, 20, 30))
        cancelled = rng.random() < shape.cancel_share
        request = Request(
            id=request_id,
            model=rng.choice(MODELS[: shape.models]),
            token_ids=pack_tokens(prompt),
            deadline_s=NO_DEADLINE_S if shape.absence is None else BATCH_DEADLINE_S,
            stop=StopConditions(max_tokens=max_tokens),
        )
        is_refused = rng.random() < 0.06
        wants_result = bool(shape.collectors) and rng.random() < 0.8
        reply_topic = self._draw_reply_topic()
        question = ExpectedRequest(
            request, echo_answer(prompt, max_tokens), cancelled, is_refused, via_prompts=True,
            wants_result=wants_result or bool(reply_topic),
            may_expire=bool(shape.peak_s or shape.absence), reply_topic=reply_topic,
        )  # fmt: skip
        self.requests[request_id] = question
        entry = _prompt(question, text, prompt, "batch")
        topic = PROMPTS if rng.random() < 0.2 else BATCH
        self._publish_at(at, request_id, topic, entry)
        while rng.random() < 0.2:
            self._publish_at(at + self._repeat_s(rng), request_id, topic, entry)
        if cancelled:
            cancel = encode_prompt(Prompt(id=request_id, kind="cancel"))
            self._publish_at(at + rng.expovariate(0.3), request_id, BATCH, cancel)

    def _draw_agent(self, rng: random.Random, request_id: str, at: float) -> None:
        """A request whose answer has reasoning and calls, in half of the cases with a form."""
        text = rng.choice(AGENT_TEXTS)
        prompt = [*encode_bytes(text), ASSISTANT]
        max_tokens = rng.choice((None, None, rng.randrange(1, len(text))))
        form = GuidedDecoding(choice=(text[:max_tokens],)) if rng.random() < 0.5 else None
        request = Request(
            id=request_id,
            model=rng.choice(MODELS[: self._world.parameters.models]),
            token_ids=pack_tokens(prompt),
            deadline_s=min(NO_DEADLINE_S, self._world.parameters.settings.max_lifetime_s),
            stop=StopConditions(max_tokens=max_tokens),
            sampling=SamplingOptions(guided_decoding=form),
            parsing=AnswerParsing(tools="hermes", reasoning="qwen3"),
            result=self._draw_stored(request_id),
        )
        self.requests[request_id] = ExpectedRequest(
            request,
            echo_answer(prompt, max_tokens),
            is_cancelled=False,
            wants_result=request.result is not None,
            may_expire=bool(self._world.parameters.peak_s or self._world.parameters.absence),
        )
        self._publish_at(at, request_id, REQUESTS, entry_of(request, request_id))

    def _draw_stored(self, request_id: str) -> ResultOptions | None:
        """The options of a stored response; None for an answer that is not stored."""
        if not self._world.parameters.collectors or self._store_rng.random() < 0.3:
            return None
        items = msgspec.json.encode([{"role": "user", "content": request_id}])
        return ResultOptions(stored=StoredInput(shown=b"{}", input=items))

    def _draw_reply_topic(self) -> str:
        """The topic that a prompt names for its reply; "" for none."""
        if "replies" not in self._world.parameters.scenarios:
            return ""
        return self._reply_rng.choice(
            ("", OPEN_REPLIES, OPEN_REPLIES, DEAD_REPLIES, UNKNOWN_REPLIES)
        )

    def _draw_peak(self, rng: random.Random, begins_s: float, ends_s: float) -> None:
        """Interactive requests that take all places of all workers, until they are cancelled."""
        shape = self._world.parameters
        wave_s = shape.settings.max_lifetime_s * PEAK_OVERLAP
        for wave in range(math.ceil((ends_s - begins_s) / wave_s)):
            for place in range(shape.workers * shape.sequences):
                request_id, at_s = f"peak{wave}-{place}", begins_s + wave * wave_s
                prompt = [*encode_bytes(rng.choice(TEXTS)), ASSISTANT]
                request = Request(
                    id=request_id,
                    model=MODELS[place % shape.models],
                    token_ids=pack_tokens(prompt),
                    deadline_s=shape.settings.max_lifetime_s,
                    stop=StopConditions(max_tokens=ENDLESS_TOKENS),
                )
                self.requests[request_id] = ExpectedRequest(
                    request, echo_answer(prompt, ENDLESS_TOKENS), is_cancelled=True
                )
                self._publish_at(at_s, request_id, REQUESTS, entry_of(request, request_id))
                over_s = min(ends_s, at_s + shape.settings.max_lifetime_s)
                cancel = Cancel(id=request_id, reason="the peak is over")
                self._publish_at(over_s, request_id, REQUESTS, entry_of(cancel, request_id))

    def _repeat_s(self, rng: random.Random) -> float:
        """Time until a client sends a request again: its id is known then, also where the copy is
        appended late."""
        return min(rng.expovariate(0.3), REPEATED_WITHIN * self._world.settings.dedup_window_s)

    def _publish_at(self, at: float, request_id: str, topic: str, entry: Entry) -> None:
        self._publications.append(Publication(at, request_id, topic, entry))

    def start(self) -> asyncio.Task[None]:
        """Start the clients; the task ends when everything is published."""
        return self._world.loop.create_task(
            self._publish(), name="clients/main", context=process_context("clients")
        )

    async def _publish(self) -> None:
        world = self._world
        clock = VirtualClock(world.loop)
        log = MemoryLog(world.broker, "clients")
        await log.start()
        publisher = RecordPublisher(log, clock)
        last: dict[str, asyncio.Task[None]] = {}
        for publication in self._publications:
            await clock.sleep(max(0.0, publication.at_s - clock.now()))
            publishing = self._publish_after(last.get(publication.id), publisher, publication)
            last[publication.id] = asyncio.create_task(publishing)
        await asyncio.gather(*last.values())
        await log.close()

    async def _publish_after(
        self,
        before: asyncio.Task[None] | None,
        publisher: RecordPublisher,
        publication: Publication,
    ) -> None:
        """Publish after the record before it: a Cancel ahead of its request cancels nothing."""
        if before is not None:
            await before
        until = publication.at_s + REPEATED_WITHIN * self._world.settings.dedup_window_s
        while True:
            try:
                await publisher.publish_entry(publication.topic, publication.entry, until=until)
            except (AppendFailed, BrokerUnavailable):
                if self._is_appended(publication):
                    return  # a repetition might come when its id is forgotten
                until = self._world.loop.time() + RETRIED_S
            else:
                return

    def _is_appended(self, publication: Publication) -> bool:
        """Whether some copy of a record is in the log: the acknowledgement was lost."""
        topic = publication.topic
        lanes = range(self._world.broker.partitions[topic])
        kept = (raw for lane in lanes for raw in self._world.all_records(topic, lane))
        return any(raw.value == publication.entry.value for raw in kept)


def _nonsense(rng: random.Random, request: Request) -> Request:
    """A well-formed request that no worker can run."""
    broken: tuple[dict[str, Any], ...] = (
        {"deadline_s": math.nan},
        {"deadline_s": -math.inf},
        {"deadline_s": -1.0},
        {"token_ids": b"abc"},
    )
    return replace(request, **rng.choice(broken))


def _prompt(
    question: ExpectedRequest,
    text: str,
    tokens: list[int],
    service_class: ServiceClass = "interactive",
) -> Entry:
    """The same request as a prompt for a preprocessor."""
    request = question.request
    body: dict[str, Any] = {"model": request.model}
    if request.stop.max_tokens is not None:
        body["max_tokens"] = request.stop.max_tokens
    if question.is_refused:
        body["n"] = 2
    kind = "completion" if len(tokens) % 2 else "tokens"
    body |= {"prompt": text} if kind == "completion" else {"token_ids": tokens}
    fields = {
        "id": request.id, "kind": kind, "body": body, "deadline_s": request.deadline_s,
        "service_class": service_class, "result": question.wants_result,
    }  # fmt: skip
    entry = encode_prompt(Prompt.model_validate(fields))
    if not question.reply_topic:
        return entry
    reply = (("reply_to", question.reply_topic.encode()), ("correlation_id", request.id.encode()))
    return entry._replace(headers=(*entry.headers, *reply))
