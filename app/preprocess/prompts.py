"""From what a client wrote to what a router reads: `Prompt` in, `Request`, `Cancel` or refusal out.

Pure: bytes and what is known of the models in, records out. Every way in which a prompt can be
wrong ends in a `Refused` with the field's name, if there is an id to answer to, and in
`Unreadable` if there is none. Tokenising is byte level (`app/preprocess/byte_level.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.preprocess import byte_level
from app.preprocess.models import Models
from streams.codecs import pack_tokens
from streams.prompt import Prompt
from streams.records import Cancel, Refused, Request, SamplingOptions, StopConditions

LONGEST_ID = 200
NAMED_PROBLEMS = 3
"""How many wrong fields a refusal names; the first ones tell enough."""

_I64 = 2**63 - 1
Token = Annotated[int, Field(ge=0, le=2**32 - 1)]
Tokens = Annotated[list[Token], Field(min_length=1)]


class Unreadable(NamedTuple):
    """A record that nobody can be answered for."""

    reason: str


class InvalidPrompt(Exception):
    """The prompt cannot become a request; the message names the field."""


class _Body(BaseModel):
    """What the kinds have in common. Unknown fields are ignored, wrong types are not guessed at."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str = Field(default="", max_length=LONGEST_ID)
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    min_tokens: int = Field(default=0, ge=0, le=2**31 - 1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=-_I64 - 1, le=_I64)
    ignore_eos: bool = False
    n: int | None = None
    stop: str | list[str] | None = None

    def tokens(self) -> list[int]:
        """The prompt's tokens. Raises InvalidPrompt."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """The longest answer that is asked for."""
        return self.max_tokens


class _TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: byte_level.Role
    content: str | list[_TextPart]

    def text(self) -> str:
        """All its text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(_Body):
    """The OpenAI chat request, as far as it is understood."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)

    def tokens(self) -> list[int]:
        """The rendered turns."""
        turns = [(message.role, message.text()) for message in self.messages]
        if not any(text for _, text in turns):
            raise InvalidPrompt("body.messages: all of them are empty")
        return byte_level.render_chat(turns)

    def limit(self) -> int | None:
        """The newer name of the limit wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


class CompletionBody(_Body):
    """The OpenAI completion request, as far as it is understood."""

    prompt: Annotated[str, Field(min_length=1)] | Tokens

    def tokens(self) -> list[int]:
        """The prompt, followed by the assistant's marker."""
        text = self.prompt
        return [*(byte_level.encode(text) if isinstance(text, str) else text), byte_level.ASSISTANT]


class TokensBody(_Body):
    """A prompt that is tokenised already, taken as it is."""

    token_ids: Tokens

    def tokens(self) -> list[int]:
        """The tokens as they came."""
        return self.token_ids


_BODIES: dict[str, type[_Body]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "tokens": TokensBody,
}


def read(
    key: bytes | None, value: bytes | None, received_ms: int, models: Models, deadline_s: float
) -> Request | Cancel | Refused | Unreadable:
    """What a record of `prompts` asks for. Never raises.

    `deadline_s` counts for prompts that name none.
    """
    try:
        fields = msgspec.json.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return _refused(key, None, f"not a JSON object in UTF-8: {e}")
    if not isinstance(fields, dict):
        return _refused(key, None, "not a JSON object")
    try:
        prompt = Prompt.model_validate(fields)
        return _record_of(prompt, received_ms, models, deadline_s)
    except ValidationError as e:
        return _refused(key, fields.get("id"), _problems(e))
    except InvalidPrompt as e:
        return _refused(key, fields.get("id"), str(e))


def _record_of(
    prompt: Prompt, received_ms: int, models: Models, deadline_s: float
) -> Request | Cancel:
    if prompt.kind == "cancel":
        return Cancel(id=prompt.id, reason="the client cancelled it")
    try:
        body = _BODIES[prompt.kind].model_validate(prompt.body)
    except ValidationError as e:
        raise InvalidPrompt(_problems(e, "body.")) from None
    if body.n not in (None, 1):
        raise InvalidPrompt("body.n: one answer a request; publish several requests for more")
    if body.stop:
        raise InvalidPrompt("body.stop: stop strings are not supported yet")
    try:
        tokens = body.tokens()
    except UnicodeEncodeError:
        raise InvalidPrompt("body: text with lone surrogates is not Unicode text") from None
    _check_context(len(tokens), body.limit(), models.context_length(body.model))
    return Request(
        id=prompt.id,
        model=body.model,
        token_ids=pack_tokens(tokens),
        tenant=prompt.tenant,
        deadline_s=prompt.deadline_s if "deadline_s" in prompt.model_fields_set else deadline_s,
        received_ms=received_ms,
        stop=StopConditions(
            max_tokens=body.limit(), min_tokens=body.min_tokens, ignore_eos=body.ignore_eos
        ),
        sampling=SamplingOptions(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, seed=body.seed
        ),
    )


def _check_context(prompt: int, answer: int | None, context: int | None) -> None:
    if context is not None and prompt + (answer or 1) > context:
        wanted = "" if answer is None else f" and {answer} for the answer"
        raise InvalidPrompt(
            f"body: {prompt} prompt tokens{wanted} exceed the context of {context} tokens"
        )


def _refused(key: bytes | None, wanted_id: Any, message: str) -> Refused | Unreadable:
    """Answer to the id in the prompt, else to the record's key, if either can be an id."""
    for candidate in (wanted_id, _text(key)):
        if isinstance(candidate, str) and 0 < len(candidate) <= LONGEST_ID:
            return Refused(id=candidate, code="invalid", message=message)
    return Unreadable(message)


def _text(key: bytes | None) -> str | None:
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None


def _problems(error: ValidationError, prefix: str = "") -> str:
    """The wrong fields and what is wrong with them; never what was given, it may be private."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    named = [f"{prefix}{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems]
    more = len(named) - NAMED_PROBLEMS
    return "; ".join(named[:NAMED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
