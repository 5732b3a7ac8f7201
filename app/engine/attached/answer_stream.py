"""Reader of one streamed answer of a server: its events to engine outputs, up to the final one.

An answer with a finish reason ends with `[DONE]`, with the end of the response, or after a while
without more of it; all text up to there is part of it, since servers send the reason before or
after the last text, and twice. The last reason counts; `stop` replaces no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from msgspec.structs import replace

from kvlane.app.engine.attached.server_client import EventStream
from kvlane.app.engine.attached.server_errors import (
    DONE,
    ConnectionBroken,
    ResponseTooLarge,
    ServerFailed,
)
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, token_usage
from kvlane.streams.records import FinishReason, Usage

log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
"""Longest time after a finish reason or the text that follows it, in seconds. Token counts that
come later are missing."""
EMPTY_END_TIMEOUT_S = 30.0
"""The same for an answer that has a finish reason and no text: a reason may precede all of the
text, and the prefill with it."""


class AnswerStream(ABC):
    @abstractmethod
    def _output(self, event: bytes) -> EngineOutput:
        """The output of one event, which may be empty. Raises EngineError for an invalid event."""

    @abstractmethod
    def _usage(self) -> Usage | None:
        """The token counts so far, the server's own where it reports them; None for none."""

    def _completed(self, output: EngineOutput) -> EngineOutput:
        return replace(output, usage=self._usage())

    def cancelled_output(self) -> EngineOutput:
        return replace(EngineOutput.cancelled(), usage=self._usage())

    def _too_large(self, error: ResponseTooLarge) -> EngineError:
        """The error of an answer beyond a limit."""
        return error

    async def read_outputs(
        self, stream: EventStream, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs, the final one last. Raises ServerFailed for an answer without an end,
        and the errors of its events."""
        last: EngineOutput | None = None
        has_content = False
        until = math.inf
        loop = asyncio.get_running_loop()
        while True:
            event = await self._next(stream, until, has_content=has_content)
            if event is None or event == DONE:
                break
            if context.is_stopped:
                yield self.cancelled_output()
                return
            output = self._output(event)
            has_content = has_content or _has_content(output)
            if last is None and output.finish_reason is None:
                if not output.is_empty:
                    yield output
                continue
            if _has_content(output) or output.finish_reason is not None:
                timeout_s = END_TIMEOUT_S if has_content else EMPTY_END_TIMEOUT_S
                until = loop.time() + timeout_s
            if last is not None and _has_content(last) and _has_content(output):
                yield replace(last, finish_reason=None, stop_reason=None)
                last = replace(last, token_ids=(), text="", log_probs=None, data=(), usage=None)
            last = output if last is None else _joined(last, output)
        if last is None:
            raise ServerFailed(_UNFINISHED, reason=_UNFINISHED)
        yield self._completed(last)

    async def _next(self, stream: EventStream, until: float, *, has_content: bool) -> bytes | None:
        """The next event; None after the last one.

        `until`: loop time at which an answer with a finish reason ends as it is. With content, a
        broken connection ends it, too; without, another server may give the answer.
        """
        try:
            return await stream.next_event(until)
        except ResponseTooLarge as e:
            raise self._too_large(e) from e.__cause__
        except (TimeoutError, ConnectionBroken) as e:
            if until == math.inf or (isinstance(e, ConnectionBroken) and not has_content):
                raise
            log.debug("an answer ended with its finish reason: %s", e)
            return None


_UNFINISHED = "the server ended the stream before the end of the answer"


def _has_content(output: EngineOutput) -> bool:
    """True for an output with a part of the answer, not only fields about it."""
    return bool(output.token_ids or output.text or any(aside.delta for aside in output.data))


def _joined(last: EngineOutput, output: EngineOutput) -> EngineOutput:
    """One output of two, of which one at most has content."""
    reason = output.finish_reason
    if reason is None or (reason == "stop" and last.finish_reason is not None):
        reason = last.finish_reason
    asides = (replace(aside, at=len(last.text) + aside.at) for aside in output.data)
    return EngineOutput(
        token_ids=last.token_ids + output.token_ids,
        finish_reason=reason,
        usage=output.usage or last.usage,
        stop_reason=last.stop_reason if output.stop_reason is None else output.stop_reason,
        log_probs=output.log_probs or last.log_probs,
        text=last.text + output.text,
        data=(*last.data, *asides),
    )


FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop",
    "repetition": "stop", "length": "length", "max_tokens": "length", "model_length": "length",
    "content_filter": "content_filter", "tool_calls": "tool_calls",
    "function_call": "function_call",
}  # fmt: skip
"""Finish reasons of the model, by the names that servers give them in any case."""


def parse_finish_reason(reason: object) -> FinishReason | None:
    """The finish reason of an event; an empty text is none. Raises ServerFailed for unknown ones,
    such as `abort`: the model did not end the answer."""
    if reason is None or reason == "":
        return None
    known = FINISH_REASONS.get(reason.lower()) if isinstance(reason, str) else None
    if known is None:
        said = f"the server ended the answer with {reason!r:.200}"
        raise ServerFailed(said, reason=said)
    return known


def parse_usage(fields: object) -> Usage | None:
    """The token counts of a server, with the names of those that it lacks; None for none."""
    if not isinstance(fields, dict) or not fields:
        return None
    details = {name: value for name, value in fields.items() if name not in _COUNTS}
    of_prompt = fields.get("prompt_tokens_details")
    of_prompt = dict(of_prompt) if isinstance(of_prompt, dict) else {}
    counts = {
        "prompt_tokens": _number(fields.get("prompt_tokens")),
        "completion_tokens": _number(fields.get("completion_tokens")),
        "cached_tokens": _number(of_prompt.pop("cached_tokens", None)),
    }
    if of_prompt := non_empty(of_prompt):
        details["prompt_tokens_details"] = of_prompt
    return replace(
        token_usage(*(value or 0 for value in counts.values())),
        details=non_empty(details) or None,
        unknown=tuple(name for name, value in counts.items() if value is None),
    )


_COUNTS = frozenset({"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"})


def _number(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < 2**63 else None


def non_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of JSON that are not null, nor empty texts, arrays or objects."""
    return {name: value for name, value in fields.items() if value or value in (0, False)}
