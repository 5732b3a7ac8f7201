"""Events of an answer in the form of OpenAI's Responses API. Pure.

Items are messages, reasoning and calls of functions. Their ids follow from the id of the response
and their place, and the `sequence_number` of an event from the answer (`answer_items.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlane.app.http.api_errors import ApiError
from kvlane.app.http.openai.answer_items import AnswerItem, ItemChange, ItemEncoder
from kvlane.app.http.openai.event_encoder import KEEP_ALIVE, ResponseOptions
from kvlane.app.http.openai.openai_responses import Choice
from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.metrics.gateway_metrics import TokenTimes

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_UNKNOWN_REQUEST: JsonObject = {
    "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}  # fmt: skip
"""Fields of a response whose request is not at hand."""
_NO_NAMES: Mapping[str, str] = {}


class ResponseEncoder(ItemEncoder):
    """The encoder of answers to `/v1/responses`."""

    keep_alive = KEEP_ALIVE
    form = "response"

    def __init__(
        self,
        options: ResponseOptions,
        choices: Sequence[Choice],
        paces: Sequence[TokenTimes],
        request: Mapping[str, Any] = _UNKNOWN_REQUEST,
        namespaces: Mapping[str, str] = _NO_NAMES,
    ) -> None:
        """`request`: the fields of the request that come back. `namespaces`: by the names of
        functions."""
        super().__init__(options, choices, paces)
        self._request = request
        self._namespaces = namespaces

    def encode_failure(self, failure: ApiError) -> bytes:
        response = self.failed(failure)
        return self.encode_last({"type": f"response.{response['status']}", "response": response})

    def failed(self, failure: ApiError) -> JsonObject:
        """The response after a failure."""
        status = "cancelled" if failure.code == "cancelled" else "failed"
        error = {"code": failure.code, "message": failure.message} if status == "failed" else None
        return self._response(status) | {"error": error, "output": self._output("incomplete")}

    def whole_answer(self) -> JsonObject:
        """As `ItemEncoder.whole_answer`; of an answer that has not ended, the part so far."""
        status, details = self._end()
        return self._response(status) | {
            "output": self._output(status),
            "usage": None if self.choice.finish_reason is None else self._usage(),
            "incomplete_details": details,
        }

    def first_events(self) -> Sequence[JsonObject]:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": response} for kind in kinds]

    def item_events(self, change: ItemChange) -> Sequence[JsonObject]:
        item = change.item
        if change.step == "begin":
            fields = _begun(self._item(item, "in_progress"))
            added: JsonObject = {
                "type": "response.output_item.added",
                "output_index": item.index,
                "item": fields,
            }
            part = {"type": "response.content_part.added"} | self._place(item)
            return [added] if item.kind == "call" else [added, part | {"part": _part(item, "")}]
        status = self._end()[0] if self.is_ending else "completed"
        done = {"output_index": item.index, "item": self._item(item, status)}
        return [*self._text_done(item), {"type": "response.output_item.done"} | done]

    def text_event(self, change: ItemChange) -> JsonObject:
        item = change.item
        event = {"type": f"{_kind(item)}.delta", "delta": change.text} | self._place(item)
        return event | ({"logprobs": []} if item.kind == "text" else {})

    def last_events(self) -> Sequence[JsonObject]:
        whole = self.whole_answer()
        return [{"type": f"response.{whole['status']}", "response": whole}]

    def with_number(self, event: JsonObject, number: int) -> JsonObject:
        """As `ItemEncoder.with_number`; the first event has 0."""
        return event | {"sequence_number": number - 1}

    def _text_done(self, item: AnswerItem) -> list[JsonObject]:
        done = {"type": f"{_kind(item)}.done"} | self._place(item)
        if item.kind == "call":
            return [done | {"arguments": item.text, "name": item.name}]
        logprobs: JsonObject = {"logprobs": []} if item.kind == "text" else {}
        part = {"type": "response.content_part.done"} | self._place(item)
        return [done | {"text": item.text} | logprobs, part | {"part": _part(item, item.text)}]

    def _response(self, status: str) -> JsonObject:
        header = self.header
        return {
            **self._request,
            "id": header.id,
            "object": "response",
            "created_at": header.created,
            "status": status,
            "model": header.model,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def _end(self) -> tuple[str, JsonObject | None]:
        """The status, and the reason why it ended incomplete."""
        if self.choice.finish_reason is None:
            return ("in_progress" if self.items.items else "queued"), None
        reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(
            self.choice.finish_reason or ""
        )
        return ("completed", None) if reason is None else ("incomplete", {"reason": reason})

    def _output(self, last_status: str) -> list[JsonObject]:
        items = self.items.items
        statuses = ["completed"] * (len(items) - 1) + [last_status]
        return [self._item(item, status) for item, status in zip(items, statuses, strict=False)]

    def _item(self, item: AnswerItem, status: str) -> JsonObject:
        fields: JsonObject = {"id": self._item_id(item), "status": status}
        match item.kind:
            case "text":
                content = [_part(item, item.text)]
                return fields | {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                content = [_part(item, item.text)]
                return fields | {"type": "reasoning", "summary": [], "content": content}
        call = {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        if namespace := self._namespaces.get(item.name):
            call["namespace"] = namespace
        return fields | {"type": "function_call"} | call

    def _item_id(self, item: AnswerItem) -> str:
        return f"{_PREFIXES[item.kind]}_{self.header.id}_{item.index}"

    def _place(self, item: AnswerItem) -> JsonObject:
        place: JsonObject = {"item_id": self._item_id(item), "output_index": item.index}
        return place if item.kind == "call" else place | {"content_index": 0}

    def _usage(self) -> JsonObject | None:
        """The counts of tokens; None if those of the prompt or the answer are unknown."""
        usage = self.usage
        if not {"prompt_tokens", "completion_tokens"}.isdisjoint(usage.unknown):
            return None
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _kind(item: AnswerItem) -> str:
    """The first part of the types of the events of an item's text."""
    return {
        "text": "response.output_text",
        "reasoning": "response.reasoning_text",
        "call": "response.function_call_arguments",
    }[item.kind]


def _part(item: AnswerItem, text: str) -> JsonObject:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _begun(fields: JsonObject) -> JsonObject:
    """An item before its first part."""
    empty: JsonObject = {"arguments": ""} if "arguments" in fields else {"content": []}
    return fields | empty
