"""Pydantic models of request bodies: names, types and bounds of the OpenAI API and of vLLM's
additions.

Unknown fields are ignored (known ones that are not honoured: `unsupported_fields.py`), wrong types
are refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.nvext import (
    I32,
    MAX_NAMES,
    SHORT_LIST,
    ModelName,
    Name,
    NvExt,
    Object,
    StrictModel,
    Text,
    Token,
    TokenIds,
    is_tokens,
)
from kvlane.streams.request import MultimodalData


def _item(item: dict[str, Any]) -> MultimodalData:
    """One of {"Url": …}, {"RawUrl": …}, {"Decoded": …}. A URL without a scheme is a raw one."""
    if len(item) != 1:
        raise ValueError("each item has one key, Url, RawUrl or Decoded")
    ((kind, value),) = item.items()
    if kind == "Decoded":
        return MultimodalData(kind="decoded", decoded=msgspec.json.encode(value))
    if kind not in ("Url", "RawUrl"):
        raise ValueError("an item is none of Url, RawUrl and Decoded")
    if not isinstance(value, str):
        raise ValueError(f"{kind} must be a string")  # noqa: TRY004 - its callers refuse values
    return MultimodalData(
        kind="url" if kind == "Url" and _has_scheme(value) else "raw_url", url=value
    )


def _has_scheme(url: str) -> bool:
    try:
        return bool(urlsplit(url).scheme)
    except ValueError:
        return False


MAX_CHOICES = 128
"""Answers to one request, over all its prompts; the same limit as OpenAI's."""
MAX_STOPS = 32
MAX_STOP_CHARS = 1000
MAX_INPUTS = 2048
MAX_MESSAGES = 10_000
MAX_CONTENT_PARTS = 10_000
PARTS_LIST = Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)
MAX_DOCUMENTS = 10_000
MAX_LOGIT_BIASES = 8192
MAX_ALLOWED_TOKENS = 2**18
"""Entries of `allowed_token_ids`; the size of the largest vocabularies."""
MAX_GRAMMAR_CHARS = 2**20

I63 = 2**63 - 1

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[str], Field(max_length=MAX_LOGIT_BIASES, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Limit = Annotated[int, Field(ge=1, le=I32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _listed(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("strings", "must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _texts_or_tokens(value: Any) -> list[str | list[int]]:
    """A text, the tokens of one, or a list of either: always as a list."""
    match value:
        case str():
            return [value]
        case [int(), *_]:
            value = [value]
        case [str() | list(), *_]:
            pass
        case _:
            raise PydanticCustomError("prompt", "must be a text, the tokens of one, or a list")
    for number, item in enumerate(value[: MAX_INPUTS + 1]):
        if not isinstance(item, str) and not is_tokens(item):
            raise PydanticCustomError("prompt", "has no text and no tokens at {at}", {"at": number})
    return list(value)


def _not_empty(value: list[Any]) -> list[Any]:
    if "" in value:
        raise PydanticCustomError("input", "has an empty text")
    return value


def _json_form(value: Any) -> Any:
    """A schema or the like: as an object, or as its text."""
    if not isinstance(value, str | dict):
        raise PydanticCustomError("form", "must be an object, or JSON in a string")
    most = MAX_GRAMMAR_CHARS if isinstance(value, str) else MAX_NAMES
    if len(value) > most:
        raise PydanticCustomError("form", "is longer than {most}", {"most": most})
    return value


def _base64(value: str) -> str:
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        raise PydanticCustomError("base64", "must be base64 of a tensor") from None
    return value


Base64 = Annotated[str, Field(min_length=1), AfterValidator(_base64)]
Prompts = Annotated[
    list[Any], Field(max_length=MAX_INPUTS, fail_fast=True), BeforeValidator(_texts_or_tokens)
]
Inputs = Annotated[Prompts, AfterValidator(_not_empty)]
JsonOrText = Annotated[
    Any, BeforeValidator(_json_form, json_schema_input_type=Object | GrammarText)
]


class StreamOptions(StrictModel):
    include_usage: bool | None = None


class JsonSchema(StrictModel):
    form: Object | None = Field(default=None, alias="schema")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """The required form of an answer, with vLLM's field names."""

    json_: JsonOrText | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    structural_tag: JsonOrText | None = None
    whitespace_pattern: GrammarText | None = None


class GenerationBody(StrictModel):
    model: ModelName = ""
    max_tokens: Limit | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=I32)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=I32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    seed: int | None = Field(default=None, ge=-I63 - 1, le=I63)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: (
        Annotated[StopTexts, BeforeValidator(_listed, json_schema_input_type=StopText | StopTexts)]
        | None
    ) = None
    stop_token_ids: Annotated[list[Token], SHORT_LIST] | None = None
    ignore_eos: bool | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=I32)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonOrText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: GrammarText | None = None
    guided_decoding_backend: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Text | None = None
    mm_processor_kwargs: Object | None = None
    prompt_embeds: Base64 | None = None
    nvext: NvExt | None = None

    def max_tokens_field(self) -> tuple[str, int | None]:
        """The field that limits the answer's tokens, and its value."""
        return "max_tokens", self.max_tokens

    def top_logprobs_count(self) -> int | None:
        """Number of alternatives per token; None: no log probabilities."""
        return None


class TextPart(StrictModel):
    """A part of a message's content. The longer names of the type are those of other endpoints."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(StrictModel):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def _part(value: Any, _: ValidatorFunctionWrapHandler) -> TextPart | RefusalPart:
    is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
    return (RefusalPart if is_refusal else TextPart).model_validate(value)


class CalledFunction(StrictModel):
    name: str
    arguments: Any = None


class ToolCall(StrictModel):
    function: CalledFunction


Part = Annotated[TextPart | RefusalPart, WrapValidator(_part)]
ContentParts = Annotated[list[Part], PARTS_LIST]
_parts = TypeAdapter(ContentParts)


def text_or_list(kind: str, entries: str) -> BeforeValidator:
    """Accepts a text as a list of one entry of this type. `entries`: their name in errors."""

    def validate(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": kind, "text": value}]
        if not isinstance(value, list):
            raise PydanticCustomError("list", f"must be a text or a list of {entries}")
        return value

    return BeforeValidator(validate)


class _TextEntry(Protocol):
    @property
    def text(self) -> str: ...


def content_of(parts: Sequence[_TextEntry]) -> str | list[dict[str, Any]]:
    """The content of a chat's message: a text, or its parts if there are several."""
    if len(parts) > 1:
        return [{"type": "text", "text": part.text} for part in parts]
    return parts[0].text if parts else ""


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in a chat's message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def function_of(**fields: Any) -> dict[str, Any]:
    """A tool of a chat, or the choice of one, by the fields of its function that are given."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def chosen_function(name: Any, names: Collection[str]) -> dict[str, Any]:
    """The choice of a function. Raises InvalidPrompt for one that is none of the tools."""
    if name not in names:
        raise InvalidPrompt("tool_choice.name", "is none of the tools")
    return function_of(name=name)


def check_allowed_tools(choice: Any) -> None:
    """Raises InvalidPrompt for a choice among some of the tools."""
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        raise InvalidPrompt("tool_choice", "allowed_tools is not supported: send these tools alone")


def _content(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
    """A text, or a list of parts, whose errors name no branch of a union; null as no parts."""
    if value is None:
        return []
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "must be a text or a list of parts")
    return _parts.validate_python(value)


class Message(StrictModel):
    """The checked fields of a message; templates receive it unchanged."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str | ContentParts, WrapValidator(_content)] = Field(default=[])
    tool_calls: Annotated[list[ToolCall], SHORT_LIST] | None = None
    function_call: CalledFunction | None = None

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class Function(StrictModel):
    name: Name
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Annotated[list[Tool], SHORT_LIST] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[Object], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None

    def max_tokens_field(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().max_tokens_field()

    def top_logprobs_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """The OpenAI completion request. `prompt`: texts and lists of tokens."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool | None = None

    def top_logprobs_count(self) -> int | None:
        return self.logprobs


def _media(value: Any) -> dict[str, tuple[MultimodalData, ...]] | None:
    if value is None:
        return None
    try:
        items = msgspec.convert(value, dict[str, list[dict[str, Any]]])
        return {part: tuple(map(_item, listed)) for part, listed in items.items()}
    except (msgspec.MsgspecError, ValueError) as e:
        raise PydanticCustomError("media", "{wrong}", {"wrong": str(e)}) from None


class TokensBody(GenerationBody):
    """A tokenised prompt. `flatten` (`request_reader.py`) makes it of Dynamo's form as well."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    stop_token_ids_hidden: Annotated[list[Token], SHORT_LIST] | None = None
    bad_words_token_ids: Annotated[list[Annotated[list[Token], SHORT_LIST]], SHORT_LIST] | None = (
        None
    )
    eos_token_ids: Annotated[list[Token], SHORT_LIST] | None = None
    multi_modal_data: Annotated[Any, BeforeValidator(_media)] = None
    is_probe: bool | None = Field(default=None, alias="_HEALTH_CHECK")

    def top_logprobs_count(self) -> int | None:
        return self.logprobs


class PassthroughBody(StrictModel):
    model: ModelName = ""
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-I63 - 1, le=I63)
    max_tokens: int | None = Field(default=None, ge=0, le=I32)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=I32)
    cache_salt: Text | None = None
    nvext: NvExt | None = None


class EmbeddingBody(StrictModel):
    """The OpenAI request for embeddings. `input`: texts and lists of tokens."""

    model: ModelName = ""
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=2**16)
    user: str | None = None
    nvext: NvExt | None = None
