"""Prompts of the backlog bench: their texts, their results, and the engines' capacity for them.

The number of a prompt gives its text and is its `custom_id`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvlane.app.demo.expected_answers import AnswerOracle
from kvlane.app.engine.simulated.batch import BatchSequence, BatchState, EngineLimits
from kvlane.app.engine.simulated.step import add_sequence, run_step
from kvlane.streams.client import Client
from kvlane.streams.codecs import decode
from kvlane.streams.ports import POLL_S, Partition
from kvlane.streams.prompt import Prompt
from kvlane.streams.records import Result
from kvlane.streams.topics import RESULTS
from workbench.bench.bench_environment import BenchEnvironment

MAX_SEQS = 8
ENGINE_SPEEDUP = 0.3
TOKENS, TOKENS_SPREAD = 32, 7
"""Shortest answer, and number of lengths: equal ones would begin and end in step."""
PROMPT_TOKENS = 48
"""About the length of the prompts, for the capacity."""
CAPACITY_REQUESTS = 4000
PUBLISHED_TOGETHER, PUBLISH_TIMEOUT_S = 500, 120.0
RETRIED_CODES = frozenset(
    {"deadline", "no_workers", "none_eligible", "all_busy", "queue_full", "overloaded"}
)
"""Codes of errors after which a client sends its request again."""


async def publish_prompts(client: Client, results: ResultCounter, count: int) -> None:
    """Publish further prompts of class batch, each with a result. Raises BrokerUnavailable."""
    while count > 0:
        ids = [client.new_request_id() for _ in range(min(count, PUBLISHED_TOGETHER))]
        first = results.expect(ids)
        prompts = (backlog_prompt(first + n, ids[n]) for n in range(len(ids)))
        limit_s = PUBLISH_TIMEOUT_S
        await asyncio.gather(
            *(client.publish(p, timeout_s=limit_s, subscribe=False) for p in prompts)
        )
        count -= len(ids)


def backlog_prompt(number: int, request_id: str) -> Prompt:
    """A prompt by its number, which is also its `custom_id`."""
    return Prompt(
        id=request_id, kind="chat", body=chat_body(number), service_class="batch", result=True,
        deadline_s=24 * 3600, custom_id=str(number),
    )  # fmt: skip


def chat_body(number: int) -> dict[str, Any]:
    """The body of a prompt by its number."""
    text = f"The {number}th letter: what does it say of the river, and of the harbour?"
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": TOKENS + number % TOKENS_SPREAD,
        "ignore_eos": True,
    }


def engine_requests_per_s() -> float:
    """Requests a second of one engine that always has requests waiting."""
    state = BatchState(EngineLimits(16, 16_384, max_sequences=MAX_SEQS))
    added = done = 0
    duration_ms = 0.0
    while done < CAPACITY_REQUESTS:
        while state.waiting_count < MAX_SEQS:
            tokens = TOKENS + added % TOKENS_SPREAD
            add_sequence(state, BatchSequence(added, PROMPT_TOKENS, tokens))
            added += 1
        step = run_step(state)
        assert step is not None, "there are requests"
        duration_ms += step.duration_ms
        done += len(step.finished)
    return 1000 * ENGINE_SPEEDUP * done / duration_ms


class ResultCounter:
    """Reads `results` from its beginning, and counts the records of each prompt."""

    def __init__(self, on: BenchEnvironment, oracle: AnswerOracle) -> None:
        self._on = on
        self._oracle = oracle
        self._ids: list[str] = []
        self.counts: list[int] = []
        self.received = 0
        """Prompts with a result."""
        self.refused = 0
        """Results that are errors after which a client sends its prompt again."""
        self.wrong: list[Result] = []
        self.unknown = 0
        """Results of other requests."""

    def expect(self, ids: Sequence[str]) -> int:
        """Count the results of further prompts; returns the number of the first."""
        first = len(self._ids)
        self._ids += ids
        self.counts += [0] * len(ids)
        return first

    async def run(self) -> None:
        """Read until cancelled; raises the errors of the reader."""
        numbers = range(await self._on.log.partitions(RESULTS))
        reader = self._on.log.reader(moving=False)
        reader.assign({Partition(RESULTS, n): 0 for n in numbers})
        try:
            while True:
                for records in (await reader.poll(POLL_S)).values():
                    for record in records:
                        result = decode(record)
                        assert isinstance(result, Result), "results has no other records"
                        await self._count(result)
        finally:
            await reader.close()

    async def _count(self, result: Result) -> None:
        number = int(result.custom_id or -1)
        if not 0 <= number < len(self._ids) or self._ids[number] != result.id:
            self.unknown += 1
            return
        self.counts[number] += 1
        self.received += self.counts[number] == 1
        expected = await self._oracle.expect_answer(result.id, "chat", chat_body(number))
        choices = (result.body or {}).get("choices", ())
        texts = [choice["message"]["content"] for choice in choices]
        if result.error is not None and result.error.code in RETRIED_CODES:
            self.refused += 1
        elif texts != [expected.expected.text]:
            self.wrong.append(result)
