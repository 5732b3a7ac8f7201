"""Bodies of OpenAI's Responses API, as chat requests. Pure.

    body ──read_response──► ResponseRequest ──chat──► read_request, as for every other body

Owns the names and types of the API. Fields that would change the answer and are not honoured are
refused by name, and so are tools that OpenAI runs. Bounds and limits are those of chats.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, invalid_prompt
from kvlane.app.preprocess.requests.nvext import (
    SHORT_LIST,
    ModelName,
    Name,
    NvExt,
    Object,
    StrictModel,
    Text,
)
from kvlane.app.preprocess.requests.request_models import (
    MAX_MESSAGES,
    PARTS_LIST,
    Limit,
    Part,
    call_of,
    check_allowed_tools,
    chosen_function,
    content_of,
    function_of,
    text_or_list,
)
from kvlane.app.preprocess.requests.unsupported_fields import (
    Unsupported,
    refuse_reserved,
    refuse_unsupported,
)

UNSUPPORTED: Mapping[str, Unsupported] = {
    "context_management": Unsupported(([],), "the client shortens its history"),
    "conversation": Unsupported((), "send its items"),
    "enable_response_messages": Unsupported((False,)),
    "include": Unsupported(([], ["reasoning.encrypted_content"])),
    "moderation": Unsupported(),
    "previous_input_messages": Unsupported(([],), "send items as input"),
    "prompt": Unsupported((), "send the text as instructions"),
    "service_tier": Unsupported(("auto", "default"), "use nvext.queue_class"),
    "stream_options.include_obfuscation": Unsupported((False,)),
    "text.verbosity": Unsupported(("medium",)),
    "top_logprobs": Unsupported((0,), "use chats"),
    "truncation": Unsupported(("disabled",), "the client shortens its history"),
}
"""Fields that are refused; see `unsupported_fields.py`. Encrypted reasoning is never given."""


Parts = Annotated[list[Part], PARTS_LIST, text_or_list("input_text", "parts")]


class InputMessage(StrictModel):
    """A message, also one of an earlier answer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class FunctionCall(StrictModel):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str


class FunctionCallOutput(StrictModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts


class ReasoningText(StrictModel):
    """A part of a reasoning."""

    text: str


class ReasoningItem(StrictModel):
    """The reasoning of an earlier answer; without its text it is left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], SHORT_LIST] | None = None


def _type_of(value: Any) -> Any:
    """The type of an item or a tool; the items of older clients have none."""
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    return value.get("type") or "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="item",
        custom_error_message="must be an item of the type message, function_call, "
        "function_call_output or reasoning",
    ),
]


def _input(value: Any) -> Any:
    """A text as a list of one message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "must be a text or a list of items")
    return value


class FunctionTool(StrictModel):
    """A function of the client."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class NamespaceTool(StrictModel):
    """Functions of the client under a common name, which comes back with their calls."""

    type: Literal["namespace"]
    name: Name
    tools: Annotated[list[FunctionTool], SHORT_LIST]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[NamespaceTool, Tag("namespace")],
    Discriminator(
        _type_of,
        custom_error_type="tool",
        custom_error_message="must be a function or a namespace of functions: tools that OpenAI "
        "runs are not offered",
    ),
]


class ResponseReasoning(StrictModel):
    """How much the model reasons. Reasoning comes as it is, a `summary` has no effect."""

    effort: Text | None = None


class TextFormat(StrictModel):
    """The required form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    form: Object | None = Field(default=None, alias="schema")


class ResponseText(StrictModel):
    """The text of an answer."""

    format: TextFormat | None = None


class ResponsesBody(StrictModel):
    """The request for a response."""

    model: ModelName = ""
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(_input),
    ]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[ResponseTool], SHORT_LIST] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: Text | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    nvext: NvExt | None = None


_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "cache_salt",
    "chat_template_kwargs", "nvext",
    # vLLM's in this API
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias",
    "mm_processor_kwargs", "presence_penalty", "priority", "repetition_penalty", "seed",
    "skip_special_tokens", "stop", "structured_outputs", "top_k", "vllm_xargs",
)  # fmt: skip
"""Fields with the same name and meaning in chats, which check them."""
_SHOWN = (
    "instructions", "max_output_tokens", "previous_response_id", "reasoning", "temperature", "text",
    "top_p", "user",
)  # fmt: skip
"""Fields that come back with the response."""


_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""Fields by their names in chats."""


class ResponseRequest(NamedTuple):
    """A checked body, and all its fields."""

    body: ResponsesBody
    fields: Mapping[str, Any]

    def items(self) -> list[JsonObject]:
        """The input as items."""
        items: list[JsonObject] = _input(self.fields.get("input"))
        return items

    def after(self, items: Sequence[JsonObject]) -> ResponseRequest:
        """The request with items before its input. Raises InvalidPrompt."""
        return read_response({**self.fields, "input": [*items, *self.items()]})

    def shown(self, *, is_stored: bool) -> dict[str, msgspec.Raw]:
        """The fields of the request that come back with the response, as JSON."""
        fields = self.fields
        values = {name: fields.get(name) for name in _SHOWN} | {
            "metadata": fields.get("metadata") or {},
            "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
            "tool_choice": fields.get("tool_choice") or "auto",
            "tools": fields.get("tools") or [],
            "background": bool(fields.get("background")),
            "store": is_stored,
            "truncation": "disabled",
        }
        return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}

    def functions(self) -> list[FunctionTool]:
        """The functions, also those in namespaces."""
        return [
            function
            for tool in self.body.tools or ()
            for function in (tool.tools if isinstance(tool, NamespaceTool) else (tool,))
        ]

    def names(self) -> Mapping[str, str]:
        """The names of fields by those of the chat, which has tools of namespaces in one list."""
        return _NAMES | {"tools": "tools"} if self.namespaces() else _NAMES

    def namespaces(self) -> dict[str, str]:
        """The namespaces of functions, by their names."""
        spaces = (tool for tool in self.body.tools or () if isinstance(tool, NamespaceTool))
        return {function.name: space.name for space in spaces for function in space.tools}

    def chat(self) -> JsonObject:
        """The fields of the chat."""
        body = self.body
        chat = {name: self.fields[name] for name in _SAME if self.fields.get(name) is not None}
        chat["messages"] = list(_messages(body.instructions, body.input))
        if body.max_output_tokens is not None:
            chat["max_completion_tokens"] = body.max_output_tokens
        if functions := self.functions():
            chat["tools"] = [
                function_of(
                    name=each.name, description=each.description, parameters=each.parameters,
                    strict=each.strict,
                )
                for each in functions
            ]  # fmt: skip
        if body.tool_choice is not None:
            names = {function.name for function in functions}
            chat["tool_choice"] = _tool_choice(body.tool_choice, names)
        if body.reasoning is not None and body.reasoning.effort is not None:
            chat["reasoning_effort"] = body.reasoning.effort
        if body.text is not None and body.text.format is not None:
            chat |= _response_format(body.text.format)
        return chat


def read_response(fields: Mapping[str, Any]) -> ResponseRequest:
    """Check a body. Raises InvalidPrompt that names the field."""
    try:
        body = ResponsesBody.model_validate(fields)
    except ValidationError as e:
        raise invalid_prompt(e) from None
    refuse_reserved(fields)
    refuse_unsupported(fields, UNSUPPORTED)
    return ResponseRequest(body, fields)


def _messages(instructions: str | None, items: Sequence[Item]) -> Iterator[JsonObject]:
    """The messages of the chat; the items of an answer are one message."""
    if instructions:
        yield {"role": "system", "content": instructions}
    answer: JsonObject = {}
    for item in items:
        match item:
            case InputMessage(role="assistant"):
                if answer.get("content") or answer.get("tool_calls"):
                    yield answer
                    answer = {}
                answer |= {"role": "assistant", "content": content_of(item.content)}
            case FunctionCall():
                call = call_of(item.call_id, item.name, item.arguments)
                calls = [*answer.get("tool_calls", ()), call]
                answer = {"role": "assistant", "content": None} | answer | {"tool_calls": calls}
            case ReasoningItem():
                if answer:
                    yield answer
                reasoning = "".join(part.text for part in item.content or ())
                answer = {"role": "assistant", "content": None}
                answer |= {"reasoning_content": reasoning} if reasoning else {}
            case _:
                if answer:
                    yield answer
                answer = {}
                yield _asked(item)
    if answer:
        yield answer


def _asked(item: InputMessage | FunctionCallOutput) -> JsonObject:
    if isinstance(item, FunctionCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": content_of(item.output)}
    return {"role": item.role, "content": content_of(item.content)}


def _tool_choice(choice: Any, names: Collection[str]) -> Any:
    match choice:
        case "auto" | "none" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return chosen_function(name, names)
    check_allowed_tools(choice)
    raise InvalidPrompt("tool_choice", "must be none, auto, required or a function")


def _response_format(form: TextFormat) -> JsonObject:
    if form.type == "text":
        return {}
    wanted: JsonObject = {"type": form.type}
    if form.type == "json_schema":
        wanted["json_schema"] = {"name": form.name or "output", "schema": form.form}
    return {"response_format": wanted}
