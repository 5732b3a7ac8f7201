"""Loaded model: card, tokenizer and template, to prepare prompts and to decode answers.

Loaded from the log or from its folder. Everything that takes time runs in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvlane.app.preprocess.json_limits import MAX_PROMPT_TOKENS
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model_folder import ModelFiles, card_of, read_folder
from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt, context_error
from kvlane.app.preprocess.requests.answer_parsing import parsers_of, with_parsing
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest, TextOrTokens
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.app.preprocess.text.piece_cache import PieceCache, Scope
from kvlane.app.preprocess.text.tokenizer import Tokenizer, TooManyTokens
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.records import Artifact, ModelCard
from kvlane.streams.request import Request


class PreparedPrompts(NamedTuple):
    """`requests`: one for each prompt, without an id. `texts`: the prompts as they were tokenised;
    None for one that came in tokens."""

    requests: tuple[Request, ...]
    texts: tuple[str | None, ...]


class LoadedModel:
    """One model, ready for use."""

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None, pool: WorkPool
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self._template = template
        self._parsers = parsers_of(card, None if template is None else template.source)
        self._pool = pool

    async def prepare(self, request: OpenAIRequest, tenant: str = "") -> PreparedPrompts:
        """The requests for a body. Raises InvalidPrompt, PreprocessorOverloaded. `tenant`: whose
        pieces of text the tokenizer may find again; "" for those without one."""
        scope = Scope(tenant, request.cache_salt)
        if request.is_short:
            prompts = request.prompts(self._template)
        else:
            prompts = await self._pool.run(lambda: request.prompts(self._template))
        tokens = [
            await self._tokens(
                prompt, request.field, scope, add_special_tokens=request.add_special_tokens
            )
            for prompt in prompts
        ]
        texts = tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)
        requests = request.requests(tokens, self.card)
        return PreparedPrompts(with_parsing(request, self._parsers, requests, texts), texts)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.bytes_of(token_id)

    def text_stream(self, request: Request, taken: Sequence[int] = ()) -> TextStream:
        """The decoder of a request's answer into visible text. `taken`: tokens that are out."""
        shown = request.output.skip_special_tokens is False
        return TextStream(
            self.tokenizer.detokenizer(unpack_tokens(request.token_ids), skip_special=not shown),
            request.stop,
            eos_token_ids=request.eos_token_ids or self.card.eos_token_ids,
            include_stop=bool(request.sampling.include_stop_str_in_output),
            taken=taken,
        )

    async def _tokens(
        self, prompt: TextOrTokens, field: str, scope: Scope, *, add_special_tokens: bool
    ) -> Sequence[int]:
        if isinstance(prompt, str):
            try:
                return await self.tokenizer.encode(
                    prompt,
                    add_special_tokens=add_special_tokens,
                    most=min(self.card.context_length or MAX_PROMPT_TOKENS, MAX_PROMPT_TOKENS),
                    scope=scope,
                )
            except UnicodeEncodeError:
                raise InvalidPrompt(field, "has lone surrogates: that is no text") from None
            except TooManyTokens as e:
                raise context_error(field, e.most, self.card.context_length) from None
        if (highest := max(prompt, default=0)) >= self.tokenizer.vocabulary_size:
            raise InvalidPrompt(
                field, f"has the token {highest}; the model has {self.tokenizer.vocabulary_size}"
            )
        return prompt


async def load_model(
    card: ModelCard,
    artifacts: ArtifactStore,
    pool: WorkPool,
    clock: Clock,
    pieces: PieceCache | None = None,
) -> LoadedModel:
    """A model from the files that its card names. `pieces`: the cache of all tokenizers. Raises
    BadModel, BrokerUnavailable."""
    if card.tokenizer is None:
        raise BadModel(f"{card.name}: its card names no tokenizer")
    spec = await artifacts.fetch(card.tokenizer)
    source = None if card.template is None else await artifacts.fetch(card.template)
    return await pool.run(lambda: _loaded(card, spec, source, pool, clock, pieces))


async def publish_folder(
    name: str,
    folder: Path,
    artifacts: ArtifactStore,
    *,
    context_length: int | None = None,
    block_size: int | None = None,
) -> ModelCard:
    """Put the files of a model's folder into the log; the card that names them. Raises BadModel,
    BrokerUnavailable."""
    return await publish_files(
        name, read_folder(folder), artifacts, context_length=context_length, block_size=block_size
    )


async def publish_files(
    name: str,
    model: ModelFiles,
    artifacts: ArtifactStore,
    *,
    context_length: int | None = None,
    block_size: int | None = None,
) -> ModelCard:
    """As `publish_folder`, of a folder that is read already."""
    tokenizer = await artifacts.publish(model.tokenizer)
    template: Artifact | None = None
    if model.template is not None:
        template = await artifacts.publish(model.template.encode())
    return card_of(
        name, model, tokenizer, template, context_length=context_length, block_size=block_size
    )


async def model_of_files(
    card: ModelCard, model: ModelFiles, pool: WorkPool, clock: Clock
) -> LoadedModel:
    """A model from the files that its card was made of. Raises BadModel."""
    source = None if model.template is None else model.template.encode()
    return await pool.run(lambda: _loaded(card, model.tokenizer, source, pool, clock))


def _loaded(
    card: ModelCard, spec: bytes, source: bytes | None, pool: WorkPool, clock: Clock,
    pieces: PieceCache | None = None,
) -> LoadedModel:  # fmt: skip
    try:
        text = None if source is None else source.decode()
    except UnicodeDecodeError as e:
        raise BadModel(f"{card.name}: its chat template is not UTF-8: {e}") from e
    template = None if text is None else ChatTemplate(text, clock, card.special_tokens)
    return LoadedModel(card, Tokenizer(spec, pool, pieces), template, pool)
