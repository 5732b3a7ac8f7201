"""A model without files: one whose tokens are the bytes of UTF-8 (`app/preprocess/byte_level.py`).

What the echo engine serves. Owns, too, what all models have in common: `Model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from app.preprocess import byte_level
from app.preprocess.bodies import ChatBody, TokensBody
from app.preprocess.detokenize import ByteLevel, Vocabulary
from app.preprocess.errors import InvalidPrompt
from app.preprocess.loaded import Prepared
from app.preprocess.openai import Asked, Prompt
from app.preprocess.stops import TextStream
from streams.records import ModelCard, Request

_VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)], frozenset())


class Model(Protocol):
    """A model that requests can be made for, and whose answers can be read."""

    @property
    def card(self) -> ModelCard:
        """What it is."""

    async def prepare(self, asked: Asked) -> Prepared:
        """The requests for a body. Raises InvalidPrompt, Overloaded, BadModel."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself."""

    def text_stream(self, request: Request, taken: Sequence[int] = ()) -> TextStream:
        """What turns the answer to a request into visible text. `taken`: tokens that are out."""


class ByteModel:
    """A model that reads bytes. Without a limit its engine decides when an answer ends."""

    def __init__(self, name: str = "", context_length: int | None = None) -> None:
        self.card = ModelCard(name=name, context_length=context_length)

    def token_bytes(self, token_id: int) -> bytes:
        """As `Model.token_bytes`; markers stand for nothing."""
        return bytes([token_id]) if token_id < 256 else b""

    def text_stream(self, request: Request, taken: Sequence[int] = ()) -> TextStream:
        """As `Model.text_stream`. Markers have no text."""
        return TextStream(
            ByteLevel(_VOCABULARY),
            request.stop,
            eos_token_ids=request.eos_token_ids,
            include_stop=bool(request.sampling.include_stop_str_in_output),
            taken=taken,
        )

    async def prepare(self, asked: Asked) -> Prepared:
        """As `Model.prepare`."""
        try:
            prompts, tokens = _tokens(asked)
        except UnicodeEncodeError:
            raise InvalidPrompt(asked.field, "has lone surrogates: that is no text") from None
        requests = asked.requests(tokens, self.card)
        if asked.body.limit()[1] is None:
            requests = tuple(map(_unlimited, requests))
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        return Prepared(requests, texts)


def _tokens(asked: Asked) -> tuple[Sequence[Prompt], list[Sequence[int]]]:
    body = asked.body
    if isinstance(body, ChatBody) and asked.ext.token_data is None:
        turns = [(message.role, message.text()) for message in body.messages]
        if not any(text for _, text in turns):
            raise InvalidPrompt("messages", "all of them are empty")
        return [""], [
            byte_level.render_chat((_ROLES.get(role, "user"), text) for role, text in turns)
        ]
    prompts = asked.prompts(None)
    if isinstance(body, TokensBody):
        return prompts, [_encoded(prompt) for prompt in prompts]
    if "" in prompts:
        raise InvalidPrompt(asked.field, "is empty")
    return prompts, [[*_encoded(prompt), byte_level.ASSISTANT] for prompt in prompts]


_ROLES: dict[str, byte_level.Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}
"""Others speak as users."""


def _encoded(prompt: Prompt) -> Sequence[int]:
    return byte_level.encode(prompt) if isinstance(prompt, str) else prompt


def _unlimited(request: Request) -> Request:
    return replace(request, stop=replace(request.stop, max_tokens=None))
