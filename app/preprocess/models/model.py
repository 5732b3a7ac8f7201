"""Loaded models: card, tokenizer and template, to prepare prompts and to decode answers.

Each is loaded once, from the log or from its folder, before its first prompt; a failed load is
retried. Everything that takes time runs in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from msgspec.structs import replace

from kvlane.app.preprocess.json_limits import MAX_PROMPT_TOKENS
from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model_folder import ModelFiles, card_of
from kvlane.app.preprocess.prompt_errors import BadModel, InvalidPrompt, context_error
from kvlane.app.preprocess.requests.answer_parsing import parsers_of, with_parsing
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest, TextOrTokens
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.app.preprocess.text.tokenizer import PieceCache, Scope, Tokenizer, TooManyTokens
from kvlane.app.preprocess.thread_pool import WorkPool
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.text.stop_conditions import TextStream
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.errors import StreamError
from kvlane.streams.records import Artifact, ModelCard
from kvlane.streams.request import Request


class PreparedPrompts(NamedTuple):
    """`requests`: one for each prompt, without an id. `texts`: the prompts as they were tokenised;
    None for one that came in tokens."""

    requests: tuple[Request, ...]
    texts: tuple[str | None, ...]


class LoadedModel:
    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None, pool: WorkPool
    ) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self._template = template
        self._parsers = parsers_of(card, None if template is None else template.source)
        self._pool = pool

    def under(self, name: str) -> LoadedModel:
        """The same files under the name of another model."""
        if name == self.card.name:
            return self
        model = copy(self)
        model.card = replace(self.card, name=name)
        return model

    async def prepare(self, request: OpenAIRequest, tenant: str = "") -> PreparedPrompts:
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


async def publish_files(
    name: str,
    model: ModelFiles,
    artifacts: ArtifactStore,
    *,
    context_length: int | None = None,
    block_size: int | None = None,
) -> ModelCard:
    """Put the files of a model into the log; the card that names them. Raises BadModel,
    BrokerUnavailable."""
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


log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 30.0
"""Time limit of a prompt for a loading model."""
LOAD_RETRY_S = 10.0
MAX_SPARE_MODELS = 8
"""Loaded models kept beyond those in use: their workers may be restarting."""


class LoadFailed(Exception):
    """A model could not be loaded, at this point of the clock; the cause has the reason."""

    def __init__(self, at: float) -> None:
        super().__init__("it could not be loaded")
        self.at = at


class ModelLoader:
    def __init__(self, artifacts: ArtifactStore, pool: WorkPool, ctx: ProcessContext) -> None:
        self._artifacts = artifacts
        self._pool = pool
        self._ctx = ctx
        self._pieces = PieceCache()
        self._loads: dict[str, asyncio.Task[LoadedModel | LoadFailed]] = {}

    def sync(self, cards: Iterable[ModelCard]) -> None:
        wanted = {_key(card): card for card in cards}
        for card in wanted.values():
            self._load(card)
        spare = [key for key, load in self._loads.items() if key not in wanted and load.done()]
        for key in spare[: max(0, len(spare) - MAX_SPARE_MODELS)]:
            del self._loads[key]

    async def model(self, card: ModelCard) -> LoadedModel:
        """The model of a card that names files. Raises TimeoutError after LOAD_TIMEOUT_S, BadModel,
        StreamError."""
        load = self._load(card)
        if not load.done():
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await asyncio.shield(load)
        model = load.result()
        if not isinstance(model, LoadFailed):
            return model.under(card.name)
        if isinstance(model.__cause__, StreamError):
            raise model.__cause__
        raise BadModel(f"{card.name}: {model}")

    def _load(self, card: ModelCard) -> asyncio.Task[LoadedModel | LoadFailed]:
        """The load of a model: under way, done, or begun now."""
        load = self._loads.get(_key(card))
        if load is not None and load.done():
            model = load.result()
            if isinstance(model, LoadFailed) and self._ctx.clock.now() - model.at >= LOAD_RETRY_S:
                load = None
        if load is None:
            load = self._ctx.spawn(f"load {card.name}", self._loaded(card))
            self._loads[_key(card)] = load
        return load

    async def _loaded(self, card: ModelCard) -> LoadedModel | LoadFailed:
        try:
            model = await load_model(
                card, self._artifacts, self._pool, self._ctx.clock, self._pieces
            )
        except Exception as e:
            log.exception("model %s cannot be used", card.name)
            failed = LoadFailed(self._ctx.clock.now())
            failed.__cause__ = e
            return failed
        log.info("model %s is loaded", card.name)
        return model


def _key(card: ModelCard) -> str:
    """Models with equal files share them: a checksum leaves the name out."""
    return card.checksum or card.name
