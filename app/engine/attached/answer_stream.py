"""Reader of one streamed answer of a server: its events to engine outputs, up to the final one."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from app.engine.attached.server_client import EventStream, ServerFailed
from app.engine.interface import EngineError, EngineOutput, GenerateContext
from streams.records import FinishReason, Usage

log = logging.getLogger(__name__)

DONE = b"[DONE]"
USAGE_TIMEOUT_S = 2.0
"""Time limit for the token counts that follow the end of an answer, in seconds."""


class AnswerStream(ABC):
    """One streamed answer. Subclasses parse its events."""

    @abstractmethod
    def _output(self, event: bytes) -> EngineOutput:
        """The output of one event, which may be empty. Raises EngineError for an invalid event."""

    @abstractmethod
    def _on_trailing_event(self, event: bytes) -> None:
        """An event after the end of the answer, which is complete without it."""

    @abstractmethod
    def _usage(self) -> Usage:
        """The token counts so far, the server's own where it reports them."""

    def _completed(self, output: EngineOutput) -> EngineOutput:
        """The final output, after all trailing events."""
        return output.with_usage(self._usage())

    def cancelled_output(self) -> EngineOutput:
        """The final output of a cancelled request."""
        return EngineOutput.cancelled().with_usage(self._usage())

    def _events(self, stream: EventStream) -> AsyncGenerator[bytes, None]:
        return stream.events()

    async def read_outputs(
        self, stream: EventStream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs, the final one last.

        Raises ServerFailed for an answer without an end, and the errors of its events.
        """
        async with aclosing(self._events(stream)) as events:
            async for event in events:
                if event == DONE:
                    break
                if context.is_stopped:
                    yield self.cancelled_output()
                    return
                output = self._output(event)
                if output.finish_reason is not None:
                    await self._read_trailing_events(events)
                    yield self._completed(output)
                    return
                if not output.is_empty:
                    yield output
        raise ServerFailed("the server ended the stream before the end of the answer")

    async def _read_trailing_events(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            async with asyncio.timeout(USAGE_TIMEOUT_S):
                async for event in events:
                    if event != DONE:
                        self._on_trailing_event(event)
        except (TimeoutError, EngineError) as e:
            log.debug("an answer ended without its token counts: %s", e)


def parse_finish_reason(reason: object, known: Mapping[str, FinishReason]) -> FinishReason | None:
    """The finish reason of an event, if it has one.

    Raises ServerFailed for others than the known ones, such as `abort` and `error`: the server
    ended the answer, not the model.
    """
    if reason is None:
        return None
    if not isinstance(reason, str) or reason not in known:
        raise ServerFailed(f"the server ended the answer with {reason!r:.200}")
    return known[reason]
