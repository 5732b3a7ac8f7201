"""From what a client wrote to what a router reads: `Prompt` in, `Request`, `Cancel` or refusal out.

Every way in which a prompt can be wrong ends in a `Refused` with the field's name, if there is an
id to answer to, and in `Unreadable` if there is none. `read` is pure: bytes in, a `Question` out
that is right in itself; `answered` holds it against its model and may wait for the tokenizer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from app.preprocess import passed
from app.preprocess.byte_model import Model
from app.preprocess.errors import BadModel, InvalidPrompt, Overloaded, TooLarge, invalid
from app.preprocess.openai import Asked
from app.preprocess.passed import Passed
from streams.prompt import Prompt
from streams.records import LONGEST_ID, Cancel, Refused, Request

Find = Callable[[str], Awaitable[Model]]
"""The model of a name; raises InvalidPrompt, BadModel, TimeoutError."""
PassesOn = Callable[[object], bool]
"""Whether the model of a name gets bodies as they come."""


class Unreadable(NamedTuple):
    """A record that nobody can be answered for."""

    reason: str


class Question(NamedTuple):
    """A prompt whose body is right in itself."""

    prompt: Prompt
    asked: Asked | Passed
    received_ms: int


def read(
    key: bytes | None,
    value: bytes | None,
    received_ms: int,
    passes_on: PassesOn = lambda _: False,
) -> Question | Cancel | Refused | Unreadable:
    """What a record of `prompts` says. Never raises."""
    try:
        fields = msgspec.json.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        return _refused(key, None, f"not a JSON object in UTF-8: {e}")
    if not isinstance(fields, dict):
        return _refused(key, None, "not a JSON object")
    try:
        prompt = Prompt.model_validate(fields)
        if prompt.kind == "cancel":
            return Cancel(id=prompt.id, reason="the client cancelled it")
        as_is = passes_on(prompt.body.get("model"))
        asked = passed.read(prompt.kind, prompt.body, as_is=as_is)
    except ValidationError as e:
        return _refused(key, fields.get("id"), str(invalid(e)))
    except InvalidPrompt as e:
        return _refused(key, fields.get("id"), _in_body(e))
    return Question(prompt, asked, received_ms)


async def answered(question: Question, find: Find, deadline_s: float) -> Request | Refused:
    """The request of a prompt. Raises nothing that is about this prompt.

    `deadline_s` counts for prompts that name none.
    """
    prompt, asked, received_ms = question
    if asked.n != 1:
        return _invalid(prompt.id, "body.n: one answer a request; publish several requests")
    try:
        model = await find(asked.model)
        requests = (await passed.prepare(asked, model)).requests
    except TooLarge as e:
        return Refused(id=prompt.id, code="too_large", message=_in_body(e))
    except InvalidPrompt as e:
        return _invalid(prompt.id, _in_body(e))
    except (BadModel, Overloaded, TimeoutError) as e:
        message = f"body.model: it cannot be used at the moment: {e}"
        return Refused(id=prompt.id, code="internal", message=message)
    if len(requests) != 1:
        return _invalid(prompt.id, f"body.{asked.field}: one prompt a request")
    return replace(
        requests[0],
        id=prompt.id,
        model=asked.model or model.card.name,
        tenant=prompt.tenant,
        deadline_s=prompt.deadline_s if "deadline_s" in prompt.model_fields_set else deadline_s,
        received_ms=received_ms,
    )


def _in_body(error: InvalidPrompt) -> str:
    """The error, with the field's path from the prompt on."""
    return f"body.{error}" if error.field else f"body: {error}"


def _invalid(request_id: str, message: str) -> Refused:
    return Refused(id=request_id, code="invalid", message=message)


def _refused(key: bytes | None, wanted_id: Any, message: str) -> Refused | Unreadable:
    """Answer to the id in the prompt, else to the record's key, if either can be an id."""
    for candidate in (wanted_id, _text(key)):
        if isinstance(candidate, str) and 0 < len(candidate) <= LONGEST_ID:
            return _invalid(candidate, message)
    return Unreadable(message)


def _text(key: bytes | None) -> str | None:
    try:
        return None if key is None else key.decode()
    except UnicodeDecodeError:
        return None
