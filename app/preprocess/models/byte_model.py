"""Model without files whose tokens are the bytes of UTF-8; and `Model`, the protocol of all
models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from kvlane.app.preprocess.json_limits import MAX_PROMPT_TOKENS
from kvlane.app.preprocess.models.model import PreparedPrompts
from kvlane.app.preprocess.prompt_errors import InvalidPrompt, context_error
from kvlane.app.preprocess.requests.answer_parsing import ModelParsers, with_parsing
from kvlane.app.preprocess.requests.openai_requests import NO_EFFORT, OpenAIRequest, TextOrTokens
from kvlane.app.preprocess.requests.request_models import ChatBody, TokensBody
from kvlane.app.text import byte_level
from kvlane.app.text.detokenize import ByteLevelDetokenizer, Vocabulary
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.records import ModelCard
from kvlane.streams.request import Request

_PARSERS = ModelParsers("hermes", "qwen3")
"""Of answers to chats with tools, which such a model is not shown."""
_VOCABULARY = Vocabulary([bytes([byte]) for byte in range(256)], frozenset())


class Model(Protocol):
    """A model that requests can be made for, and whose answers can be read."""

    @property
    def card(self) -> ModelCard:
        """The card of the model."""

    async def prepare(self, request: OpenAIRequest, tenant: str = "") -> PreparedPrompts:
        """The requests for a body. Raises InvalidPrompt, PreprocessorOverloaded, BadModel.
        `tenant`: whose texts a cache may find again; "" for those without one."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a single token."""

    def text_stream(self, request: Request, taken: Sequence[int] = ()) -> TextStream:
        """The decoder of a request's answer into visible text. `taken`: tokens that are out."""


class ByteModel:
    """A model that reads bytes. Without a limit its engine decides when an answer ends."""

    def __init__(self, name: str = "", context_length: int | None = None) -> None:
        self.card = ModelCard(name=name, context_length=context_length)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def text_stream(self, request: Request, taken: Sequence[int] = ()) -> TextStream:
        return TextStream(
            ByteLevelDetokenizer(_VOCABULARY),
            request.stop,
            eos_token_ids=request.eos_token_ids,
            include_stop=bool(request.sampling.include_stop_str_in_output),
            taken=taken,
        )

    async def prepare(self, request: OpenAIRequest, tenant: str = "") -> PreparedPrompts:  # noqa: ARG002
        if isinstance(request.body, TokensBody) and request.body.multi_modal_data:
            raise InvalidPrompt("multi_modal_data", "this model takes text only")
        try:
            prompts, tokens = _tokens(request, self.card.context_length)
        except UnicodeEncodeError:
            raise InvalidPrompt(request.field, "has lone surrogates: that is no text") from None
        requests = request.requests(tokens, self.card)
        if request.body.max_tokens_field()[1] is None:
            requests = tuple(map(_unlimited, requests))
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        parsers = _PARSERS if request.tools else ModelParsers()
        return PreparedPrompts(with_parsing(request, parsers, requests, texts), texts)


def byte_model_of(card: ModelCard) -> ByteModel | None:
    """The model of a card without a tokenizer, whose tokens are bytes; None for another one. Such
    cards are of engines without the files of a model: a worker whose engine has a model of its own
    publishes its tokenizer, or does not start."""
    return None if card.tokenizer is not None else ByteModel(card.name, card.context_length)


def _tokens(
    request: OpenAIRequest, context: int | None
) -> tuple[Sequence[TextOrTokens], list[Sequence[int]]]:
    body = request.body
    if isinstance(body, ChatBody) and request.ext.token_data is None:
        turns = [(message.role, message.text()) for message in body.messages]
        if body.reasoning_effort is not None:
            raise InvalidPrompt("reasoning_effort", NO_EFFORT)
        if not any(text for _, text in turns):
            raise InvalidPrompt("messages", "all of them are empty")
        _check_length("messages", [text for _, text in turns], context)
        return [""], [
            byte_level.render_chat((_ROLES.get(role, "user"), text) for role, text in turns)
        ]
    prompts = request.prompts(None)
    if isinstance(body, TokensBody):
        return prompts, [_encoded(prompt) for prompt in prompts]
    _check_length(request.field, [prompt for prompt in prompts if isinstance(prompt, str)], context)
    if "" in prompts:
        raise InvalidPrompt(request.field, "is empty")
    return prompts, [[*_encoded(prompt), byte_level.ASSISTANT] for prompt in prompts]


def _check_length(field: str, texts: Sequence[str], context: int | None) -> None:
    if sum(map(len, texts)) > MAX_PROMPT_TOKENS:
        raise context_error(field, MAX_PROMPT_TOKENS, context)


_ROLES: dict[str, byte_level.MessageRole] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}
"""Other roles count as users."""


def _encoded(prompt: TextOrTokens) -> Sequence[int]:
    return byte_level.encode_bytes(prompt) if isinstance(prompt, str) else prompt


def _unlimited(request: Request) -> Request:
    return replace(request, stop=replace(request.stop, max_tokens=None))
