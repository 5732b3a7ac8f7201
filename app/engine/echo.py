"""Echo engine: repeats the last chat turn, or answers it from a script, one token per step.

The next token is a function of the sequence alone, so any worker continues an interrupted request
with the same text, and a test can compute it with `echo_answer`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, NamedTuple

import msgspec

from kvlane.app.engine.interface import (
    SCRIPTED_UNSUPPORTED,
    TEXT_ONLY_UNSUPPORTED,
    Engine,
    EngineOutput,
    GenerateContext,
    InvalidRequest,
    check_text_only,
    token_usage,
)
from kvlane.app.text.byte_level import ASSISTANT, USER
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import Request

log = logging.getLogger(__name__)


MAX_PAUSE_MS = 10_000
"""Less than a worker waits for an engine that makes no step."""
STOP_CHECK_S = 0.1


class ScriptPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a scripted answer. `after_ms`: a pause before its first token."""

    text: Annotated[str, msgspec.Meta(min_length=1)]
    after_ms: Annotated[float, msgspec.Meta(ge=0, le=MAX_PAUSE_MS)] = 0


ScriptedAnswer = str | list[ScriptPart]


class EchoTurn(NamedTuple):
    """The tokens to echo, and how many of them the sequence already has."""

    body: Sequence[int]
    emitted_tokens: int


def current_turn(sequence: Sequence[int]) -> EchoTurn:
    """The turn at the end of a sequence, and the number of echoed tokens.

    It lies between the last assistant marker and the user marker (or earlier answer) before it. A
    sequence without the marker is all turn.
    """
    end = _last(sequence, len(sequence), ASSISTANT)
    if end is None:
        return EchoTurn(sequence, 0)
    starts = (_last(sequence, end, USER), _last(sequence, end, ASSISTANT))
    start = max((s + 1 for s in starts if s is not None), default=0)
    return EchoTurn(sequence[start:end], len(sequence) - end - 1)


def echo_answer(token_ids: Sequence[int], max_tokens: int | None = None) -> list[int]:
    """The answer to a prompt: its body, repeated up to `max_tokens`; once without a limit."""
    body, visible = current_turn(token_ids)
    if not body:
        return []
    tokens = max(len(body) - visible, 0) if max_tokens is None else max_tokens
    return [body[k % len(body)] for k in range(visible, visible + tokens)]


def _last(sequence: Sequence[int], end: int, token: int) -> int | None:
    return next((i for i in range(end - 1, -1, -1) if sequence[i] == token), None)


class _TimedAnswer(NamedTuple):
    """The tokens of a scripted answer, and the pauses before some of them, by place, in seconds."""

    tokens: bytes
    pauses_s: Mapping[int, float]


def _timed(answer: ScriptedAnswer) -> _TimedAnswer:
    if isinstance(answer, str):
        return _TimedAnswer(answer.encode(), {})
    tokens, pauses_s = b"", {}
    for part in answer:
        pauses_s[len(tokens)] = part.after_ms / 1000
        tokens += part.text.encode()
    return _TimedAnswer(tokens, pauses_s)


class EchoEngine(Engine):
    """Echoes at a fixed rate; all requests advance in the same steps, as in a batching engine.

    `step_s`: seconds of a step. `script`: answers by the text of the last turn; others are echoed.
    An answer with a form has to be in the script, whose author sees to the form. A run that
    continues an answer makes the pauses that are left.
    """

    def __init__(
        self,
        clock: Clock,
        step_s: float,
        *,
        model: str = "echo",
        context_length: int = 131_072,
        max_num_seqs: int = 256,
        script: Mapping[str, ScriptedAnswer] | None = None,
    ) -> None:
        self._clock = clock
        self._has_script = script is not None
        self._script = {
            tuple(turn.encode()): _timed(answer) for turn, answer in (script or {}).items()
        }
        self._step_s = step_s
        self._config = EngineConfig(
            model=model,
            context_length=context_length,
            max_num_seqs=max_num_seqs,
            unsupported=TEXT_ONLY_UNSUPPORTED if script is None else SCRIPTED_UNSUPPORTED,
            continues_guided=script is not None,
        )
        self._context_length = context_length
        self.running_count = 0

    def versions(self) -> Mapping[str, str]:
        return {"echo": version("kvlane")}

    async def start(self, worker_id: str) -> EngineConfig:
        log.info("echo engine of %s: %g s per token", worker_id, self._step_s)
        return self._config

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        check_text_only(request, has_script=self._has_script)
        sequence = unpack_tokens(request.token_ids)
        turn, emitted_tokens = current_turn(sequence)
        scripted = self._script.get(tuple(turn))
        if request.sampling.guided_decoding is not None and scripted is None:
            raise InvalidRequest(
                "a form is asked for, and the script has no answer to this message"
            )
        room = max(self._context_length - len(sequence), 0)
        limit = request.stop.max_tokens
        tokens = self._answer(sequence, limit, room)
        made = 0
        self.running_count += 1
        try:
            for place, token in enumerate(tokens, emitted_tokens):
                if scripted is not None and (pause_s := scripted.pauses_s.get(place)):
                    await self._pause(pause_s, context)
                await self._step()
                if context.is_stopped:
                    yield EngineOutput.cancelled().with_usage(token_usage(len(sequence), made))
                    return
                made += 1
                yield EngineOutput.token(token)
            limited = made in (room, limit)
            last = EngineOutput.length() if limited else EngineOutput.stop()
            yield last.with_usage(token_usage(len(sequence), made))
        finally:
            self.running_count -= 1

    async def cleanup(self) -> None:
        """Nothing to release."""

    def _answer(self, sequence: Sequence[int], limit: int | None, room: int) -> Sequence[int]:
        """The rest of the answer, at most `limit` and `room` tokens."""
        most = room if limit is None else min(limit, room)
        turn, emitted_tokens = current_turn(sequence)
        if (answer := self._script.get(tuple(turn))) is not None:
            return answer.tokens[emitted_tokens:][:most]
        return echo_answer(sequence, None if limit is None else most)[:room]

    async def _pause(self, seconds: float, context: GenerateContext) -> None:
        until = self._clock.now() + seconds
        while not context.is_stopped and (left_s := until - self._clock.now()) > 0:
            await self._clock.sleep(min(left_s, STOP_CHECK_S))

    async def _step(self) -> None:
        """Wait for the next step; steps are on a grid of the clock, common to all requests."""
        if self._step_s <= 0:
            await self._clock.sleep(0)
            return
        now = self._clock.now()
        # The thousandth keeps rounding errors from returning the current step again.
        next_step = (int(now / self._step_s + 1e-3) + 1) * self._step_s
        await self._clock.sleep(max(next_step - now, 0.0))
