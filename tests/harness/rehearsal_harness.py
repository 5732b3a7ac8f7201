"""Simulated engines of two models, one with planted differences, for tests of rehearsals."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from kvlane.app.engine.simulated.batch import EngineLimits
from kvlane.app.engine.simulated.engine import SimulatedEngine
from kvlane.app.engine.simulated.text_generator import Continuation
from kvlane.app.text.byte_level import encode_bytes
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ids import RequestIds
from kvlane.streams.request import Request, SamplingOptions, StopConditions

SHAPE = EngineLimits(block_size=16, cache_blocks=4000)
ANSWER_TOKENS = 12
GREEDY = SamplingOptions(temperature=0.0)


def plain(sequence: Sequence[int], _max_tokens: int | None) -> Iterator[int]:
    """Digits that depend on the whole sequence, also where an answer is continued."""
    total = sum(sequence)
    while True:
        token = 48 + total * 7 % 10
        yield token
        total += token


def changed(prompts: dict[bytes, int]) -> Continuation:
    """As `plain`, but another token at the given place of the answers to these prompts."""

    def tokens(sequence: Sequence[int], most: int | None) -> Iterator[int]:
        packed = pack_tokens(sequence)
        begun = [each for each in prompts if packed.startswith(each)]
        at = prompts[begun[0]] + len(begun[0]) // 4 - len(sequence) if begun else -1
        for number, token in enumerate(plain(sequence, most)):
            yield 120 if number == at else token

    return tokens


def engine_of(
    clock: Clock, model: str, continuation: Continuation = plain, speedup: float = 1.0
) -> SimulatedEngine:
    return SimulatedEngine(
        clock, SHAPE, model=model, context_length=4096, continuation=continuation, speedup=speedup
    )


def greedy_requests(clock: Clock, model: str, count: int, seed: int = 1) -> list[Request]:
    """Requests of different prompts, whose answers are the same each time."""
    ids = RequestIds(clock, random.Random(seed))
    return [
        Request(
            id=ids.new(), model=model, sampling=GREEDY, deadline_s=300,
            token_ids=pack_tokens(encode_bytes(f"question {number:4} of {count}")),
            stop=StopConditions(max_tokens=ANSWER_TOKENS),
        )
        for number in range(count)
    ]  # fmt: skip
