"""The bodies of requests, field by field: chats, completions, tokens, embeddings; and the little
that is read of those that are passed on as they came.

Owns names, types and bounds of the OpenAI API and of what vLLM adds to it. Unknown fields are
ignored, wrong types are refused with the field's name. Makes nothing of them: `openai.py` does.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from app.preprocess.nvext import STRICT, Name, NvExt, Text, Token

MOST_CHOICES = 128
"""Answers to one request, over all its prompts: as many as OpenAI gives."""
MOST_STOPS = 32
LONGEST_STOP = 1000
MOST_INPUTS = 2048
"""Texts in one request for embeddings, as with OpenAI."""

_I32 = 2**31 - 1
_I63 = 2**63 - 1

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Limit = Annotated[int, Field(ge=1, le=_I32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _listed(value: Any) -> Any:
    """One string as a list of one."""
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
    for number, item in enumerate(value):
        if not isinstance(item, str) and not _is_tokens(item):
            raise PydanticCustomError("prompt", "has no text and no tokens at {at}", {"at": number})
    return list(value)


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 2**32 for token in value)
    )


def _not_empty(value: list[Any]) -> list[Any]:
    if "" in value:
        raise PydanticCustomError("input", "has an empty text")
    return value


def _json_form(value: Any) -> Any:
    """A schema or the like: as an object, or as its text."""
    if not isinstance(value, str | dict):
        raise PydanticCustomError("form", "must be an object, or JSON in a string")
    return value


def _base64(value: str) -> str:
    try:
        base64.b64decode(value, validate=True)
    except ValueError:
        raise PydanticCustomError("base64", "must be base64 of a tensor") from None
    return value


Base64 = Annotated[str, Field(min_length=1), AfterValidator(_base64)]
Prompts = Annotated[list[Any], BeforeValidator(_texts_or_tokens)]
Inputs = Annotated[Prompts, Field(max_length=MOST_INPUTS), AfterValidator(_not_empty)]
JsonForm = Annotated[Any, BeforeValidator(_json_form)]


class StreamOptions(BaseModel):
    """How a stream is told."""

    model_config = STRICT

    include_usage: bool | None = None


class JsonSchema(BaseModel):
    """A form for JSON, by name."""

    model_config = STRICT

    form: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """The form an answer must have."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """The form an answer must have, in vLLM's words."""

    model_config = STRICT

    json_: JsonForm | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: JsonForm | None = None
    whitespace_pattern: str | None = None


class Body(BaseModel):
    """What the bodies that ask for text have in common."""

    model_config = STRICT

    model: Text = ""
    max_tokens: Limit | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=_I32)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_I32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=2)
    seed: int | None = Field(default=None, ge=-_I63 - 1, le=_I63)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: Annotated[list[Stop], BeforeValidator(_listed), Field(max_length=MOST_STOPS)] | None = (
        None
    )
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[Token] | None = Field(default=None, min_length=1)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonForm | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Text | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    prompt_embeds: Base64 | None = None
    nvext: NvExt | None = None

    def limit(self) -> tuple[str, int | None]:
        """The longest answer that is asked for, and the field that asks for it."""
        return "max_tokens", self.max_tokens

    def logprobs_wanted(self) -> int | None:
        """How many alternatives are wanted for each token; None: not even its probability."""
        return None


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """What was called."""

    model_config = STRICT

    name: str
    arguments: Any = None


class ToolCall(BaseModel):
    """A call that an earlier answer made."""

    model_config = STRICT

    function: CalledFunction


def _parts(value: Any) -> Any:
    """A text as a list of one part; no content as none."""
    if value is None:
        return []
    if not isinstance(value, str | list):
        raise PydanticCustomError("content", "must be a text or a list of parts")
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(BaseModel):
    """One message, as far as it is checked; templates get it as it came."""

    model_config = STRICT

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[list[TextPart], BeforeValidator(_parts)] = []
    tool_calls: list[ToolCall] | None = None

    def text(self) -> str:
        """All its text."""
        return "\n".join(part.text for part in self.content)


class Function(BaseModel):
    """A function that the model may call."""

    model_config = STRICT

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """Something that the model may use."""

    model_config = STRICT

    type: Literal["function"]
    function: Function


class ChatBody(Body):
    """The OpenAI chat request."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def limit(self) -> tuple[str, int | None]:
        """The newer name of the limit wins."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit()

    def logprobs_wanted(self) -> int | None:
        """Alternatives need the switch for probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """The OpenAI completion request. `prompt`: texts and lists of tokens."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = None

    def logprobs_wanted(self) -> int | None:
        """A number here."""
        return self.logprobs


class TokensBody(Body):
    """A prompt that is tokenised already."""

    token_ids: list[Token] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)

    def logprobs_wanted(self) -> int | None:
        """As with completions."""
        return self.logprobs


class PassedBody(BaseModel):
    """What is read of a body that its engine gets as it came."""

    model_config = STRICT

    model: Text = ""
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-_I63 - 1, le=_I63)
    max_tokens: int | None = Field(default=None, ge=0, le=_I32)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=_I32)
    cache_salt: Text | None = None
    nvext: NvExt | None = None


class EmbeddingBody(BaseModel):
    """The OpenAI request for embeddings. `input`: texts and lists of tokens."""

    model_config = STRICT

    model: Text = ""
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=2**16)
    user: str | None = None
    nvext: NvExt | None = None
