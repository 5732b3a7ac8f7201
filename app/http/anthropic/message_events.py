"""Events of an answer in the form of Anthropic's Messages API. Pure.

Items become content blocks: text, thinking, and uses of tools. A block of thinking is signed with
the id of the request; the signature of a block that comes back is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvlane.app.http.api_errors import ApiError
from kvlane.app.http.openai.answer_items import AnswerItem, ItemChange, ItemEncoder
from kvlane.app.http.openai.event_encoder import ResponseOptions
from kvlane.app.http.openai.openai_responses import Choice
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.metrics.gateway_metrics import TokenTimes

_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""By finish reason; all others end the turn."""

_COUNTS = {
    "prompt_tokens": "input_tokens",
    "cached_tokens": "cache_read_input_tokens",
    "completion_tokens": "output_tokens",
}


class MessageEncoder(ItemEncoder):
    """The encoder of answers to `/v1/messages`."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'
    form = "message"

    def __init__(
        self, options: ResponseOptions, choices: Sequence[Choice], paces: Sequence[TokenTimes],
        *, hides_thinking: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(options, choices, paces)
        self.hidden = "reasoning" if hides_thinking else ""

    def encode_failure(self, failure: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % failure.message_body()

    def whole_answer(self) -> JsonObject:
        return self._message([self._block(item) for item in self.items.items]) | {
            **self._stop(),
            "usage": self._usage(),
        }

    def first_events(self) -> Sequence[JsonObject]:
        """As `ItemEncoder.first_events`. The count of cached tokens comes with the last event."""
        usage = {"input_tokens": self.usage.prompt_tokens, "output_tokens": 0}
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": message}]

    def item_events(self, change: ItemChange) -> Sequence[JsonObject]:
        item, place = change.item, {"index": change.item.index}
        if change.step == "begin":
            block = {"type": "content_block_start"} | place
            return [block | {"content_block": _empty(item)}]
        events: list[JsonObject] = [{"type": "content_block_stop"} | place]
        if item.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": self.header.id}
            events.insert(0, {"type": "content_block_delta"} | place | {"delta": signature})
        return events

    def text_event(self, change: ItemChange) -> JsonObject:
        kind, field = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[change.item.kind]
        delta = {"type": kind, field: change.text}
        return {"type": "content_block_delta", "index": change.item.index, "delta": delta}

    def last_events(self) -> Sequence[JsonObject]:
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def _message(self, content: Sequence[JsonObject]) -> JsonObject:
        return {
            "id": self.header.id,
            "type": "message",
            "role": "assistant",
            "model": self.header.model,
            "content": content,
        }

    def _block(self, item: AnswerItem) -> JsonObject:
        match item.kind:
            case "text":
                return {"type": "text", "text": item.text}
            case "reasoning":
                thinking = "" if self.hidden else item.text
                return {"type": "thinking", "thinking": thinking, "signature": self.header.id}
        return _empty(item) | {"input": _input(item.text)}

    def _stop(self) -> JsonObject:
        reason = _STOP_REASONS.get(self.choice.finish_reason or "", "end_turn")
        by_string = self.choice.finish_reason == "stop" and self.stop_string is not None
        return {
            "stop_reason": "stop_sequence" if by_string else reason,
            "stop_sequence": self.stop_string if by_string else None,
        }

    def _usage(self) -> JsonObject:
        """The counts of tokens, null for unknown ones; those of the prompt are divided into cached
        and other ones."""
        usage = self.usage
        counts: JsonObject = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        counts |= {shown: None for name, shown in _COUNTS.items() if name in usage.unknown}
        if thinking := usage.reasoning_tokens:
            counts["output_tokens_details"] = {"thinking_tokens": thinking}
        return counts


def _empty(item: AnswerItem) -> JsonObject:
    """The block of an item before its first part."""
    match item.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": {}}


def _input(arguments: str) -> JsonObject:
    """The input of a tool as an object; of arguments that are none, as their text."""
    try:
        parsed = msgspec.json.decode(arguments.encode(errors="replace") or b"{}")
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}
    return parsed if isinstance(parsed, dict) else {"arguments": arguments}
