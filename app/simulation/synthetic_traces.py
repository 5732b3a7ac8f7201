"""Synthetic traces: workloads with shared prefixes, generated from a seed.

    shared-prefixes   single questions after one of forty system prompts of uneven popularity
    multi-turn        conversations: each prompt is the whole history and a new question
    offline           single requests of eight jobs, each with instructions of its own
    agent-tools       agents with long instructions and many tool calls in quick succession
    long-prompts      short questions, and one of fourteen with 30,000 to 60,000 tokens
    short-prompts     single requests of 40 to 200 tokens without common prefixes
    short-bursts      the same, 50 at once at regular intervals
    fan-outs          eight questions at once about a new document of 4,000 to 16,000 tokens
    long-answers      chats whose answers are several times as long as the new part of a prompt

Sessions arrive as a Poisson process, but for short-bursts. The parameters are not fitted to a
recording, and no policy was tuned on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from kvlane.app.traces.mooncake_trace import CHUNK_TOKENS, TraceRow

NAME_PREFIX = "gen:"
LONG_PROMPTS = "long-prompts"
SHORT_PROMPTS, SHORT_BURSTS, LONG_ANSWERS = "short-prompts", "short-bursts", "long-answers"
FAN_OUTS = "fan-outs"
BURST_REQUESTS = 50
SYSTEM_PROMPTS = 40
MAX_PROMPT_TOKENS = 120_000
"""Maximum prompt length; a conversation ends before it."""


class TraceSize(NamedTuple):
    requests: int = 3000
    rate: float = 5.0
    seed: int = 0


class UnknownTraceKind(Exception):
    """Unknown kind of trace; the message lists the known ones."""


@dataclass(slots=True)
class _Text:
    """A growing prompt. Its full chunks have unique ids; the last chunk may be partial."""

    names: Iterator[int]
    tokens: int = 0
    chunks: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        while (len(self.chunks) + 1) * CHUNK_TOKENS <= self.tokens:
            self.chunks.append(next(self.names))

    def copy(self) -> _Text:
        return _Text(self.names, self.tokens, [*self.chunks])

    def to_row(self, at_ms: float, output_tokens: int) -> TraceRow:
        """A request with this prompt; its output becomes part of the text."""
        is_open = self.tokens % CHUNK_TOKENS > 0
        hash_ids = [*self.chunks, *([next(self.names)] if is_open else [])]
        row = TraceRow(at_ms, self.tokens, output_tokens, hash_ids)
        self.grow(output_tokens)
        return row


SessionGenerator = Callable[[Random, _Text, float], Iterator[TraceRow]]


class _SessionProfile(NamedTuple):
    """`mean_requests`: per session; `system_tokens`: minimum and maximum. `is_regular`: equal
    intervals."""

    session: SessionGenerator
    mean_requests: float
    system_tokens: tuple[int, int]
    system_prompts: int = SYSTEM_PROMPTS
    is_regular: bool = False


def generate_trace(name: str, size: TraceSize) -> list[TraceRow]:
    """Generate a trace of a kind, in order of arrival. Raises UnknownTraceKind."""
    if name not in TRACE_KINDS:
        raise UnknownTraceKind(
            f"{NAME_PREFIX}{name}: one of {', '.join(NAME_PREFIX + kind for kind in TRACE_KINDS)}"
        )
    kind, rng, names = TRACE_KINDS[name], Random(size.seed), count()
    prompts = [_Text(names) for _ in range(kind.system_prompts)]
    for prompt in prompts:
        prompt.grow(rng.randint(*kind.system_tokens))
    popularity = [1 / (number + 1) for number in range(len(prompts))]
    rows: list[TraceRow] = []
    at_ms, due = 0.0, 0
    while due < size.requests:
        sessions = size.rate / kind.mean_requests
        at_ms += (1 / sessions if kind.is_regular else rng.expovariate(sessions)) * 1000
        (prompt,) = rng.choices(prompts, popularity)
        rows += kind.session(rng, prompt.copy(), at_ms)
        if len(rows) >= size.requests:  # no later session starts before `at_ms`
            due = sum(row.timestamp <= at_ms for row in rows)
    rows.sort(key=lambda row: row.timestamp)
    return rows[: size.requests]


def _tokens(rng: Random, median: float, sigma: float, most: int) -> int:
    """Log-normal text length: most are short, few are very long."""
    return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def _question(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(_tokens(rng, 500, 1.2, 60_000))
    yield text.to_row(at_ms, _tokens(rng, 180, 0.8, 2000))


def _offline(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(_tokens(rng, 350, 0.7, 8000))
    yield text.to_row(at_ms, _tokens(rng, 300, 0.5, 2000))


def _conversation(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    while True:
        text.grow(_tokens(rng, 250, 1.3, 30_000))
        output_tokens = _tokens(rng, 250, 0.7, 2000)
        if text.tokens + output_tokens > MAX_PROMPT_TOKENS:
            return
        yield text.to_row(at_ms, output_tokens)
        if rng.random() < 1 / 5:
            return
        at_ms += 15 * output_tokens + 1000 * _tokens(rng, 25, 1.0, 600)


def _agent(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(_tokens(rng, 400, 1.0, 8000))
    while text.tokens < MAX_PROMPT_TOKENS * 0.9:
        is_last = rng.random() < 1 / 12
        calls = 1 if is_last or rng.random() < 0.85 else rng.randint(2, 4)
        for branch in [text, *(text.copy() for _ in range(calls - 1))]:
            if branch is not text:
                branch.grow(_tokens(rng, 150, 0.8, 2000))
            yield branch.to_row(at_ms, _tokens(rng, 400 if is_last else 70, 0.6, 2000))
        if is_last:
            return
        text.grow(_tokens(rng, 600 * calls, 1.2, 10_000))
        at_ms += 15 * 70 + _tokens(rng, 1500, 0.9, 60_000)


def _document(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    is_long = rng.random() < 1 / 14
    text.grow(rng.randint(30_000, 60_000) if is_long else _tokens(rng, 300, 0.8, 4000))
    yield text.to_row(at_ms, _tokens(rng, 250, 0.6, 2000))


def _short(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(rng.choice((40, 80, 120, 200)))
    yield text.to_row(at_ms, rng.choice((20, 60, 100, 200)))


def _burst(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    for _ in range(BURST_REQUESTS):
        yield from _short(rng, text.copy(), at_ms)


def _fan_out(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    text.grow(rng.randint(4_000, 16_000))
    for _ in range(8):
        branch = text.copy()
        branch.grow(_tokens(rng, 150, 0.8, 2000))
        yield branch.to_row(at_ms, _tokens(rng, 200, 0.6, 2000))


def _long_chat(rng: Random, text: _Text, at_ms: float) -> Iterator[TraceRow]:
    while True:
        text.grow(_tokens(rng, 120, 1.0, 4000))
        output_tokens = _tokens(rng, 500, 0.6, 2000)
        yield text.to_row(at_ms, output_tokens)
        if rng.random() < 1 / 4 or text.tokens > MAX_PROMPT_TOKENS / 4:
            return
        at_ms += 15 * output_tokens + 1000 * _tokens(rng, 15, 0.8, 300)


TRACE_KINDS: Mapping[str, _SessionProfile] = {
    "shared-prefixes": _SessionProfile(_question, 1, (1_000, 12_000)),
    "offline": _SessionProfile(_offline, 1, (500, 2_000), system_prompts=8),
    "multi-turn": _SessionProfile(_conversation, 5, (200, 2_000)),
    "agent-tools": _SessionProfile(_agent, 15.3, (6_000, 20_000), system_prompts=8),
    LONG_PROMPTS: _SessionProfile(_document, 1, (500, 1_500), system_prompts=8),
    SHORT_PROMPTS: _SessionProfile(_short, 1, (0, 0), system_prompts=1),
    SHORT_BURSTS: _SessionProfile(_burst, BURST_REQUESTS, (0, 0), 1, is_regular=True),
    FAN_OUTS: _SessionProfile(_fan_out, 8, (200, 2_000), system_prompts=8),
    LONG_ANSWERS: _SessionProfile(_long_chat, 4, (200, 2_000)),
}
