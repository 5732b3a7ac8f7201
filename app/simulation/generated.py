"""Traces that nobody recorded: kinds of work with much in common, made by chance from a seed.

    shared-prefixes   one question each, behind one of forty system prompts; few prompts are popular
    multi-turn        conversations: each prompt is all that was said, and a new question
    agent-tools       agents with long instructions that call tools many times and soon again, now
                      and then several at once, each with what the tool said

Requests come by chance, so many a second on the average (a Poisson process of beginnings). Owns the
numbers of these kinds; they are no recording's, and no policy was tuned on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from app.trace import CHUNK_TOKENS, TraceRow

PREFIX = "gen:"
"""Before the name of a kind, where the name of a file may stand as well."""
SYSTEM_PROMPTS = 40
LONGEST_TOKENS = 120_000
"""Of a prompt; a conversation ends before."""


class Size(NamedTuple):
    """How much is made. `rate`: requests a second."""

    requests: int = 3000
    rate: float = 5.0
    seed: int = 0


class UnknownKind(Exception):
    """No kind of trace that can be made; the message says which there are."""


@dataclass(slots=True)
class _Text:
    """A prompt that grows. Its whole chunks have names of their own; the last one is open."""

    names: Iterator[int]
    tokens: int = 0
    chunks: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        while (len(self.chunks) + 1) * CHUNK_TOKENS <= self.tokens:
            self.chunks.append(next(self.names))

    def copy(self) -> _Text:
        return _Text(self.names, self.tokens, [*self.chunks])

    def asked(self, at_ms: float, output_tokens: int) -> TraceRow:
        """The request for what comes after it; that becomes part of it."""
        is_open = self.tokens % CHUNK_TOKENS > 0
        hash_ids = [*self.chunks, *([next(self.names)] if is_open else [])]
        row = TraceRow(at_ms, self.tokens, output_tokens, hash_ids)
        self.grow(output_tokens)
        return row


Session = Callable[[Random, _Text, float], Iterator[TraceRow]]
"""From a beginning at a time, in ms, the requests of one who uses the model, in their order."""


class _Kind(NamedTuple):
    """`mean_requests`: how many a session has; `system_tokens`: the least and the most."""

    session: Session
    mean_requests: float
    system_tokens: tuple[int, int]
    system_prompts: int = SYSTEM_PROMPTS


def generated(name: str, size: Size) -> list[TraceRow]:
    """A trace of a kind, in the order of arrival. Raises UnknownKind."""
    if name not in KINDS:
        raise UnknownKind(f"{PREFIX}{name}: one of {', '.join(PREFIX + kind for kind in KINDS)}")
    kind, rng, names = KINDS[name], Random(size.seed), count()
    prompts = [_Text(names) for _ in range(kind.system_prompts)]
    for prompt in prompts:
        prompt.grow(rng.randint(*kind.system_tokens))
    popularity = [1 / (number + 1) for number in range(len(prompts))]
    rows: list[TraceRow] = []
    at_ms, due = 0.0, 0
    while due < size.requests:
        at_ms += rng.expovariate(size.rate / kind.mean_requests) * 1000
        (prompt,) = rng.choices(prompts, popularity)
        rows += kind.session(rng, prompt.copy(), at_ms)
        if len(rows) >= size.requests:  # nothing that is still to be made comes before `at_ms`
            due = sum(row.timestamp <= at_ms for row in rows)
    rows.sort(key=lambda row: row.timestamp)
    return rows[: size.requests]


def _tokens(rng: Random, median: float, sigma: float, most: int) -> int:
    """How long a text is: most are short, few are very long."""
    return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def _question(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(_tokens(rng, 500, 1.2, 60_000))
    yield text.asked(at_ms, _tokens(rng, 180, 0.8, 2000))


def _conversation(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    while True:
        text.grow(_tokens(rng, 250, 1.3, 30_000))
        output_tokens = _tokens(rng, 250, 0.7, 2000)
        if text.tokens + output_tokens > LONGEST_TOKENS:
            return
        yield text.asked(at_ms, output_tokens)
        if rng.random() < 1 / 5:
            return
        at_ms += 15 * output_tokens + 1000 * _tokens(rng, 25, 1.0, 600)


def _agent(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(_tokens(rng, 400, 1.0, 8000))
    while text.tokens < LONGEST_TOKENS * 0.9:
        is_last = rng.random() < 1 / 12
        calls = 1 if is_last or rng.random() < 0.85 else rng.randint(2, 4)
        for branch in [text, *(text.copy() for _ in range(calls - 1))]:
            if branch is not text:
                branch.grow(_tokens(rng, 150, 0.8, 2000))
            yield branch.asked(at_ms, _tokens(rng, 400 if is_last else 70, 0.6, 2000))
        if is_last:
            return
        text.grow(_tokens(rng, 600 * calls, 1.2, 10_000))
        at_ms += 15 * 70 + _tokens(rng, 1500, 0.9, 60_000)


KINDS: Mapping[str, _Kind] = {
    "shared-prefixes": _Kind(_question, 1, (1_000, 12_000)),
    "multi-turn": _Kind(_conversation, 5, (200, 2_000)),
    "agent-tools": _Kind(_agent, 15.3, (6_000, 20_000), system_prompts=8),
}
