"""Bodies of Anthropic's Messages API, as chat requests. Pure.

    body ──chat_of──► the fields of a chat ──► read_request, as for every other body

Owns the names and types of the API. Fields that would change the answer and are not honoured are
refused by name. Marks of the cache are accepted and mean nothing: all prefixes are cached. Bounds
and limits are those of chats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag, ValidationError

from kvlane.app.http.openai.passthrough_fields import JsonObject
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, invalid_prompt
from kvlane.app.preprocess.requests.nvext import (
    SHORT_LIST,
    ModelName,
    Name,
    NullableModel,
    NvExt,
    Object,
    StrictModel,
    Text,
)
from kvlane.app.preprocess.requests.request_models import (
    MAX_MESSAGES,
    MAX_STOPS,
    PARTS_LIST,
    Limit,
    StopText,
    call_of,
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

VERSION_HEADER = "anthropic-version"
VERSIONS = ("2023-06-01", "2026-10-21")
"""Values of the header `anthropic-version`; the stream of earlier versions is another."""

UNSUPPORTED: Mapping[str, Unsupported] = {
    "container": Unsupported(),
    "context_management": Unsupported(
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "the client shortens its history",
    ),
    "inference_geo": Unsupported(),
    "mcp_servers": Unsupported(([],), "the client calls tools"),
    "service_tier": Unsupported(("auto", "standard_only"), "use nvext.queue_class"),
    "speed": Unsupported(("standard",)),
}
"""Fields that are refused; see `unsupported_fields.py`."""


class TextBlock(StrictModel):
    """A text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictModel):
    """The reasoning of an earlier answer; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(StrictModel):
    """Reasoning that only its maker can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(NullableModel):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any] = Field(default={})


TextBlocks = Annotated[list[TextBlock], PARTS_LIST, text_or_list("text", "blocks")]


class ToolResultBlock(StrictModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks | None = None


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(
        _type_of,
        custom_error_type="block",
        custom_error_message="must be a block of the type text, thinking, tool_use or tool_result",
    ),
]
MessageBlocks = Annotated[list[Block], PARTS_LIST, text_or_list("text", "blocks")]


_BLOCKS: Mapping[str, tuple[type[StrictModel], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}
"""The blocks of each role."""


class MessageTurn(StrictModel):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: MessageBlocks


class MessageTool(StrictModel):
    """A function of the client; tools that Anthropic runs have another type, and are refused."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Object
    strict: bool | None = None


class MessageToolChoice(StrictModel):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """Whether the model reasons first. A budget is not enforced: `max_tokens` counts all."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """The required form of an answer."""

    type: Literal["json_schema"]
    form: Object = Field(alias="schema")


class OutputConfig(StrictModel):
    """The form of an answer. `effort` is a hint, for templates that read it."""

    format: OutputFormat | None = None


class CountBody(StrictModel):
    """The fields that make the prompt."""

    model: ModelName = ""
    messages: Annotated[
        list[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: TextBlocks | None = None
    tools: Annotated[list[MessageTool], SHORT_LIST] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier name of `output_config.format`."""
    nvext: NvExt | None = None


class MessagesBody(CountBody):
    """The request for a message."""

    max_tokens: Limit
    stop_sequences: (
        Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


_SAME = (
    "model", "max_tokens", "stream", "temperature", "top_p", "cache_salt", "chat_template_kwargs",
    "nvext",
)  # fmt: skip
"""Fields with the same name and meaning in chats."""


_NAMES = {
    "messages": "messages",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
"""Fields by their names in chats."""


def names_of(fields: Mapping[str, Any]) -> Mapping[str, str]:
    """The names of the body's fields by those of the chat."""
    config = fields.get("output_config")
    is_new = isinstance(config, dict) and config.get("format")
    form = "output_config.format" if is_new else "output_format"
    return _NAMES | {"response_format.json_schema": form, "response_format": form}


def hides_thinking(fields: Mapping[str, Any]) -> bool:
    """Whether blocks of thinking come without their text. Of fields that may be wrong."""
    thinking = fields.get("thinking")
    return isinstance(thinking, dict) and thinking.get("display") == "omitted"


def check_version(headers: Mapping[str, str]) -> None:
    """Raises InvalidPrompt for a version of the API that is not this one."""
    if headers.get(VERSION_HEADER, VERSIONS[0]) not in VERSIONS:
        raise InvalidPrompt(VERSION_HEADER, f"must be {' or '.join(VERSIONS)}")


def chat_of(fields: Mapping[str, Any]) -> JsonObject:
    """The fields of the chat for a body. Raises InvalidPrompt that names the field."""
    return _chat_of(fields, MessagesBody)


def counted_chat_of(fields: Mapping[str, Any]) -> JsonObject:
    """The same of a body whose tokens are counted."""
    return _chat_of(fields, CountBody)


def _chat_of(fields: Mapping[str, Any], kind: type[CountBody]) -> JsonObject:
    try:
        body = kind.model_validate(fields)
    except ValidationError as e:
        raise invalid_prompt(e) from None
    refuse_reserved(fields)
    refuse_unsupported(fields, UNSUPPORTED)
    chat = {name: fields[name] for name in _SAME if fields.get(name) is not None}
    chat["messages"] = list(_messages(body))
    if body.tools:
        chat["tools"] = [
            function_of(
                name=each.name, description=each.description, parameters=each.input_schema,
                strict=each.strict,
            )
            for each in body.tools
        ]  # fmt: skip
    chat |= _tool_choice(body)
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        thinks = {"enable_thinking": body.thinking.type == "enabled"}
        chat["chat_template_kwargs"] = thinks | dict(chat.get("chat_template_kwargs") or {})
    if form := (body.output_config and body.output_config.format) or body.output_format:
        schema = {"name": "output", "schema": form.form}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        if body.stop_sequences:
            chat["stop"] = body.stop_sequences
        if body.top_k:
            chat["top_k"] = body.top_k
    return chat


def _messages(body: CountBody) -> Iterator[JsonObject]:
    """The messages of the chat; successive turns of one role are one turn."""
    if body.messages[-1].role == "assistant":
        raise InvalidPrompt("messages", "the last one is the assistant's: no answer is continued")
    if body.system:
        yield {"role": "system", "content": content_of(body.system)}
    number = 0
    for role, turns in groupby(body.messages, key=lambda turn: turn.role):
        blocks = []
        for turn in turns:
            for place, block in enumerate(turn.content):
                if not isinstance(block, _BLOCKS[role]):
                    raise InvalidPrompt(
                        f"messages.{number}.content.{place}.type",
                        f"is no block of a message of the role {role}",
                    )
                blocks.append(block)
            number += 1
        yield from [_answer(blocks)] if role == "assistant" else _asked(role, blocks)


def _asked(role: str, blocks: Sequence[Block]) -> Iterator[JsonObject]:
    """A turn before an answer: results of tools are messages of their own in a chat."""
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": content_of(texts)}
                texts = []
            content = content_of(block.content or ())
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts or not blocks:
        yield {"role": role, "content": content_of(texts)}


def _answer(blocks: Sequence[Block]) -> JsonObject:
    """An earlier answer."""
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        call_of(block.id, block.name, msgspec.json.encode(block.input).decode())
        for block in blocks if isinstance(block, ToolUseBlock)
    ]  # fmt: skip
    message: JsonObject = {"role": "assistant", "content": content_of(texts) if texts else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _tool_choice(body: CountBody) -> JsonObject:
    choice = body.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool":
        names = {tool.name for tool in body.tools or ()}
        wanted: Any = chosen_function(choice.name, names)
    else:
        wanted = "required" if choice.type == "any" else choice.type
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": wanted} | parallel
