"""Bodies that go to the engine as they came, of models that are asked in OpenAI's own words.

    fields, headers ──read──► Passed ──prepare──► Requests, each with a body

Here the two ways part that a body can go: to tokens (`openai.py`, `loaded.py`), or as it is. Of the
latter only what routing and telling need is read; all else is between the client and the server
behind the engine, which says what is wrong with it. Taken out is what others do: `nvext`, which is
for routers; `n` and all but one of several prompts, since each answer is a request of its own;
`stream`, since an engine streams in any case; `request_id`, which several requests would share, and
`priority`, which `nvext` has. What servers say to each other is refused: who may name the server
that a cache is fetched from could read what others have asked, or make one server call another.

Nobody here knows such a prompt's tokens, and load is counted in them. So they are guessed from the
body's size: one for each BYTES_PER_TOKEN, after each image or the like, which is a long stretch of
base64, was taken for MEDIUM_TOKENS. The guess stands in the request, so that all count the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic import ValidationError

from app.preprocess import openai
from app.preprocess.bodies import MOST_CHOICES, PassedBody
from app.preprocess.byte_model import Model
from app.preprocess.errors import InvalidPrompt, TooLarge, invalid
from app.preprocess.loaded import Prepared
from app.preprocess.nvext import (
    NvExt,
    context_of,
    hints_of,
    override_of,
    targets_of,
    with_headers,
)
from app.preprocess.openai import Asked, Wish
from streams.records import (
    ModelCard,
    OpenAiBody,
    Request,
    SamplingOptions,
    StopConditions,
)

BYTES_PER_TOKEN = 4
"""Of English JSON; other languages have more tokens in as many bytes, code fewer."""
MEDIUM_TOKENS = 1000
"""An image of usual size, or some 40 s of speech."""
_MEDIUM = re.compile(rb"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{1024,}")
"""Sought where a stretch begins: from each byte of one, it would take the square of its size."""
MOST_BYTES = 32 * 1024 * 1024
"""Of all the requests that one body becomes: four times what a single one can have."""
TOO_DEEP = "is nested too deep"
_FIELDS = {"chat": "messages", "completion": "prompt", "embedding": "input"}
_OF_TOKENS = (
    "greed_sampling", "use_raw_prompt", "token_data", "max_thinking_tokens", "extra_args",
    "mm_routing_info",
)  # fmt: skip
"""What `nvext` can say to engines that are asked in tokens only."""

_TAKEN_OUT = frozenset({"nvext", "n", "stream", "request_id", "rid", "priority"})
"""`rid` is what SGLang calls a request's id."""
_BETWEEN_SERVERS = (
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
)  # fmt: skip
"""By vLLM, and by SGLang."""

Kind = Literal["chat", "completion", "embedding"]


@dataclass(frozen=True)
class Passed(Wish):
    """A body to be passed on. `fields`: all of it, as it came."""

    body: PassedBody
    kind: Kind
    fields: Mapping[str, Any]

    @property
    def echo(self) -> bool:
        """Whether the prompt is to be put before the answer here; the engine sees to that."""
        return False

    @property
    def field(self) -> str:
        """The field that holds the prompt."""
        return _FIELDS[self.kind]

    def requests(self, card: ModelCard) -> tuple[Request, ...]:
        """One Request for each prompt, without an id, a tenant and a deadline. Raises TooLarge."""
        ext, body = self.ext, self.body
        # What a limit of 0 means is the engine's to say; here it would end the request.
        limit = body.max_completion_tokens or body.max_tokens or None
        return tuple(
            Request(
                id="",
                model=self.model,
                body=OpenAiBody(kind=self.kind, json=said, prompt_tokens=guessed_tokens(said)),
                stop=StopConditions(max_tokens=limit),
                sampling=SamplingOptions(seed=body.seed),
                hints=hints_of(ext),
                mdc_sum=card.checksum or None,
                annotations=tuple(ext.annotations or ()),
                cache_salt=ext.cache_salt or body.cache_salt or "",
                router_config_override=override_of(ext),
                router=targets_of(ext),
                agent_context=context_of(ext),
                request_timestamp_ms=ext.request_timestamp_ms,
            )
            for said in self._said()
        )

    def _said(self) -> list[bytes]:
        """The bodies, one for each prompt. Raises TooLarge before the copies are made."""
        common = {n: value for n, value in self.fields.items() if n not in _TAKEN_OUT}
        prompts = _prompts(self.kind, self.fields)
        whole = msgspec.json.encode(common)
        if len(prompts) == 1:
            self._check_size(len(whole))
            return [whole]
        rest = common | {self.field: None}
        self._check_size(len(whole) + len(msgspec.json.encode(rest)) * (len(prompts) - 1))
        return [msgspec.json.encode(common | {self.field: prompt}) for prompt in prompts]

    def _check_size(self, size: int) -> None:
        if size * self.n > MOST_BYTES:
            raise TooLarge(
                "", f"its answers are requests of {size * self.n} bytes together, of which "
                f"{MOST_BYTES} are taken: ask for fewer at a time",
            )  # fmt: skip


def read(
    kind: openai.Kind | Kind,
    fields: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    as_is: bool,
) -> Asked | Passed:
    """What a body asks for; `as_is`: of a model that gets it as it came.

    Raises InvalidPrompt that names the field or the header.
    """
    try:
        if kind == "tokens" or not (as_is or kind == "embedding"):
            return openai.read(kind, fields, headers)
        return _read(kind, fields, headers)
    except RecursionError:
        raise InvalidPrompt("", TOO_DEEP) from None


def _read(kind: Kind, fields: Mapping[str, Any], headers: Mapping[str, str] | None) -> Passed:
    try:
        body = PassedBody.model_validate(fields)
    except ValidationError as e:
        raise invalid(e) from None
    ext = with_headers(body.nvext or NvExt(), headers or {})
    for name in _OF_TOKENS:
        if getattr(ext, name):
            raise InvalidPrompt(f"nvext.{name}", "is for models that are asked in tokens")
    for name in _BETWEEN_SERVERS:
        if fields.get(name) is not None:
            raise InvalidPrompt(name, "is between servers only")
    if kind == "embedding" and (body.stream or body.n not in (None, 1)):
        raise InvalidPrompt("stream" if body.stream else "n", "is for chats and completions")
    prompts = len(_prompts(kind, fields))
    if prompts * (body.n or 1) > MOST_CHOICES:
        raise InvalidPrompt("n", f"{prompts} prompts with {body.n or 1} answers are too many")
    if body.stream_options is not None and not body.stream:
        raise InvalidPrompt("stream_options", "is for streams only")
    return Passed(body, ext, kind, fields)


async def prepare(asked: Asked | Passed, model: Model) -> Prepared:
    """The requests for a body. Raises InvalidPrompt, Overloaded, BadModel."""
    try:
        if isinstance(asked, Asked):
            return await model.prepare(asked)
        requests = asked.requests(model.card)
    except RecursionError:  # what can be read cannot always be written: the stack is deeper here
        raise InvalidPrompt("", TOO_DEEP) from None
    return Prepared(requests, (None,) * len(requests))


def guessed_tokens(body: bytes) -> int:
    """How long the prompt in a body is thought to be, in tokens; see the module."""
    text, media = _MEDIUM.subn(b"", body)
    return len(text) // BYTES_PER_TOKEN + media * MEDIUM_TOKENS


def _prompts(kind: Kind, fields: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completion, if it is a list of them."""
    prompt: Any = fields.get("prompt") if kind == "completion" else None
    match prompt:
        case [str() | list(), *_]:
            return list(prompt)
    return [prompt]
