"""Passthrough requests: bodies that are forwarded unchanged to an OpenAI-compatible server.

    fields, headers ──read_passthrough──► PassthroughRequest ──► `Request`s, each with a body

Only the fields that routing and the response need are read. Removed are `_TAKEN_OUT`, and all but
one of several prompts, since each answer is a request of its own and engines always stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvlane.app.preprocess.json_limits import check_size
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.guided_decoding import check_forwarded_forms
from kvlane.app.preprocess.requests.nvext import NvExt, routing_fields_of, with_headers
from kvlane.app.preprocess.requests.openai_requests import RoutingOptions, check_options, validated
from kvlane.app.preprocess.requests.request_models import PassthroughBody
from kvlane.streams.records import ModelCard
from kvlane.streams.request import OpenAiBody, Request, SamplingOptions, StopConditions

BYTES_PER_TOKEN = 4
"""For JSON with English text; other languages have more tokens per byte, code fewer."""
MEDIA_ITEM_TOKENS = 1000
_BASE64 = re.compile(rb"[A-Za-z0-9+/=_-]").match
_CLASSES = bytes(_BASE64(bytes([byte])) is not None for byte in range(256))
_MEDIUM = b"\x01" * 1024
"""The shortest stretch of base64 that is taken for an image, in the classes of its bytes."""
_FIELDS = {"chat": "messages", "completion": "prompt", "embedding": "input"}
_OF_TOKENS = (
    "greed_sampling", "use_raw_prompt", "token_data", "max_thinking_tokens", "extra_args",
    "mm_routing_info",
)  # fmt: skip
"""Fields of `nvext` that apply to tokenised requests only."""

_TAKEN_OUT = frozenset({"nvext", "n", "stream", "request_id", "rid", "priority"})
"""`rid` is SGLang's name of a request id."""

PassthroughKind = Literal["chat", "completion", "embedding"]


@dataclass(frozen=True)
class PassthroughRequest(RoutingOptions):
    """A request whose body is forwarded. `fields`: the whole body."""

    body: PassthroughBody
    kind: PassthroughKind
    fields: Mapping[str, Any]

    @property
    def echo(self) -> bool:
        return False

    @property
    def field(self) -> str:
        return _FIELDS[self.kind]

    def requests(self, card: ModelCard) -> tuple[Request, ...]:
        """One Request for each prompt, without an id, a tenant and a deadline. Raises TooLarge."""
        ext, body = self.ext, self.body
        # The engine interprets a limit of 0; here it would end the request.
        limit = body.max_completion_tokens or body.max_tokens or None
        return tuple(
            Request(
                id="",
                model=self.model,
                body=OpenAiBody(
                    kind=self.kind, json=body_json, prompt_tokens=estimate_tokens(body_json)
                ),
                stop=StopConditions(max_tokens=limit),
                sampling=SamplingOptions(seed=body.seed),
                mdc_sum=card.checksum or None,
                cache_salt=self.cache_salt,
                **routing_fields_of(ext),
            )
            for body_json in self._bodies_json()
        )

    def _bodies_json(self) -> list[bytes]:
        """The bodies, one for each prompt. Raises TooLarge before the copies are made."""
        common = {n: value for n, value in self.fields.items() if n not in _TAKEN_OUT}
        prompts = _prompts(self.kind, self.fields)
        whole = msgspec.json.encode(common)
        if len(prompts) == 1:
            check_size(len(whole) * self.n)
            return [whole]
        rest = {n: msgspec.Raw(msgspec.json.encode(value)) for n, value in common.items()}
        prompt_bytes = len(bytes(rest[self.field]))
        check_size((prompt_bytes + (len(whole) - prompt_bytes) * len(prompts)) * self.n)
        return [msgspec.json.encode(rest | {self.field: prompt}) for prompt in prompts]


def read_passthrough(
    kind: PassthroughKind, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> PassthroughRequest:
    """The routing options of a body that is forwarded unchanged. Raises InvalidPrompt."""
    body = validated(PassthroughBody, fields)
    ext = with_headers(body.nvext or NvExt(), headers or {})
    for name in _OF_TOKENS:
        if getattr(ext, name):
            raise InvalidPrompt(f"nvext.{name}", "is for models that are asked in tokens")
    if kind == "embedding" and (body.stream or body.n not in (None, 1)):
        raise InvalidPrompt("stream" if body.stream else "n", "is for chats and completions")
    check_forwarded_forms(fields)
    check_options(body, len(_prompts(kind, fields)))
    return PassthroughRequest(body, ext, kind, fields)


def estimate_tokens(body: bytes) -> int:
    """Estimated number of prompt tokens in a body: one for each BYTES_PER_TOKEN, and
    MEDIA_ITEM_TOKENS for each long run of base64."""
    classes = body.translate(_CLASSES)  # a regular expression takes ten times as long
    text, media, end = len(body), 0, 0
    while (begin := classes.find(_MEDIUM, end)) >= 0:
        end = classes.find(b"\0", begin)
        end = len(body) if end < 0 else end
        text, media = text - (end - begin), media + 1
    return text // BYTES_PER_TOKEN + media * MEDIA_ITEM_TOKENS


def _prompts(kind: PassthroughKind, fields: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completion, if it is a list of them."""
    prompt: Any = fields.get("prompt") if kind == "completion" else None
    match prompt:
        case [str() | list(), *_]:
            return list(prompt)
    return [prompt]
