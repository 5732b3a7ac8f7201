"""An engine without a model: it repeats the last turn, one token a step, always the same way.

The next token is a function of the whole sequence so far and of nothing else, so a request that
was interrupted continues its text on another worker, and every test can tell what the text must
be: `echo_answer`. The turns are those of `app/preprocess/byte_level.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from app.engine.contract import Engine, EngineOutput, GenerateContext, usage
from app.preprocess.byte_level import ASSISTANT, USER
from streams.clock import Clock
from streams.codecs import unpack_tokens
from streams.records import EngineConfig, Request

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """What is echoed, and how many tokens of it the sequence holds already."""

    body: Sequence[int]
    said: int


def turn_of(sequence: Sequence[int]) -> Turn:
    """The turn a sequence is in.

    Between the last assistant marker and the user marker (or earlier answer) before it lies the
    body; what follows the last assistant marker was said. A sequence without the marker is all
    body: where its prompt ended cannot be seen, so nothing counts as said.
    """
    end = _last(sequence, len(sequence), ASSISTANT)
    if end is None:
        return Turn(sequence, 0)
    starts = (_last(sequence, end, USER), _last(sequence, end, ASSISTANT))
    start = max((s + 1 for s in starts if s is not None), default=0)
    return Turn(sequence[start:end], len(sequence) - end - 1)


def echo_answer(token_ids: Sequence[int], max_tokens: int | None = None) -> list[int]:
    """The answer to a prompt: its body, cycled up to `max_tokens`; once over without a limit."""
    body, said = turn_of(token_ids)
    if not body:
        return []
    tokens = max(len(body) - said, 0) if max_tokens is None else max_tokens
    return [body[k % len(body)] for k in range(said, said + tokens)]


def _last(sequence: Sequence[int], end: int, token: int) -> int | None:
    return next((i for i in range(end - 1, -1, -1) if sequence[i] == token), None)


class EchoEngine(Engine):
    """Echoes with a fixed pace; all its requests step together, as those of a batching engine do.

    `step_s` is the time of one step, in seconds: one token for every running request. The first
    token comes with the first whole step.
    """

    def __init__(
        self,
        clock: Clock,
        step_s: float,
        *,
        model: str = "echo",
        context_length: int = 131_072,
        max_num_seqs: int = 256,
    ) -> None:
        self._clock = clock
        self._step_s = step_s
        self._config = EngineConfig(
            model=model, context_length=context_length, max_num_seqs=max_num_seqs
        )
        self._context_length = context_length
        self.running = 0

    async def start(self, worker_id: str) -> EngineConfig:
        """Ready at once."""
        log.info("echo engine of %s: %g s a token", worker_id, self._step_s)
        return self._config

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """The echo of the last turn, a token a step."""
        sequence = unpack_tokens(request.token_ids)
        room = max(self._context_length - len(sequence), 0)
        limit = request.stop.max_tokens
        tokens = echo_answer(sequence, limit if limit is None else min(limit, room))[:room]
        made = 0
        self.running += 1
        try:
            for token in tokens:
                await self._step()
                if context.stopped:
                    yield EngineOutput.cancelled().with_usage(usage(len(sequence), made))
                    return
                made += 1
                yield EngineOutput.token(token)
            limited = made in (room, limit)
            last = EngineOutput.length() if limited else EngineOutput.stop()
            yield last.with_usage(usage(len(sequence), made))
        finally:
            self.running -= 1

    async def cleanup(self) -> None:
        """Nothing to release."""

    async def _step(self) -> None:
        """Wait for the next step; steps lie on a grid of the clock, common to all requests."""
        if self._step_s <= 0:
            await self._clock.sleep(0)
            return
        now = self._clock.now()
        # The thousandth keeps rounding from taking the step that has just come for the next one.
        next_step = (int(now / self._step_s + 1e-3) + 1) * self._step_s
        await self._clock.sleep(max(next_step - now, 0.0))
