"""Getting to know a server: that it is there, what it serves, and how it is spoken to.

What a server can do is found out by asking it for one token, in one way after the other, best
first; no list of servers and versions. That its tokens are those of the model's folder is compared
where it can tell. One that is to be asked in OpenAI's own words is asked so once. Every error says
what the operator may do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from app.engine.attached.dialect import Speech, body_of
from app.engine.attached.pieces import DONE, EVENT_BYTES, Piece, piece_of
from app.engine.attached.server import Rejected, Server, ServerFailed
from app.engine.contract import EngineError
from app.preprocess.tokenizer import Tokenizer
from streams.clock import Clock
from streams.codecs import pack_tokens
from streams.records import Request, StopConditions

log = logging.getLogger(__name__)

ASK_S = 10.0
AGAIN_S = 1.0
PROGRESS_S = 10.0
MOST_PIECES = 64
LONGEST_WORD = 100
"""Of what a server calls itself."""
TEXT = "Hello there, 1234 naïve €uros!\n"
"""Tokenised by both sides to see whether they mean the same model."""


class Known(NamedTuple):
    """A server, as it introduced itself."""

    speech: Speech
    context_length: int | None
    versions: Mapping[str, str] = {}


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class Introduction:
    """To one server."""

    def __init__(self, server: Server, clock: Clock) -> None:
        self._server = server
        self._clock = clock

    async def wait(self, within_s: float) -> None:
        """Wait until the server is ready. Raises EngineError when it does not get so in time."""
        url, began_at = self._server.url, self._clock.now()
        told_at = began_at
        while True:
            try:
                await self._server.get("/health", ASK_S)
                return
            except EngineError as e:
                if getattr(e, "status", None) in (404, 405):
                    return  # it is there, and has no such page
                waited_s = self._clock.now() - began_at
                if waited_s >= within_s:
                    raise EngineError(
                        f"KVLANE_ATTACH_URL={url}: no server is ready there after {waited_s:.0f} s "
                        f"({e}). Start it, or give its URL; KVLANE_ATTACH_START_S bounds the wait"
                    ) from e
                if self._clock.now() - told_at >= PROGRESS_S:
                    told_at = self._clock.now()
                    log.info("%s is not ready yet, %.0f s: %s", url, waited_s, e)
            await self._clock.sleep(AGAIN_S)

    async def introduce(self, name: str, tokenizer: Tokenizer) -> Known:
        """What it serves under this name ("": alone), and how. Raises EngineError."""
        known = await self.look_up(name)
        model, owner, adapters = known.speech.model, known.speech.owner, known.speech.adapters
        await self._compare_tokens(model, tokenizer)
        prompt = tokenizer.encode_now(TEXT)
        for prompts, answers in (
            ("tokens", "token_ids"),
            ("tokens", "log_probs"),
            ("tokens", "text"),
            ("text", "text"),
        ):
            speech = Speech(model, owner, prompts, answers, adapters)  # type: ignore[arg-type]
            if await self._understands(speech, prompt, tokenizer):
                self._warn(speech)
                return known._replace(speech=speech)
        raise EngineError(
            f"KVLANE_ATTACH_URL={self._server.url}: the server completes no prompt, neither tokens "
            "nor text. It must speak OpenAI's POST /v1/completions; see its own log"
        )

    async def look_up(self, name: str) -> Known:
        """What it serves under this name ("": alone). Raises EngineError."""
        models = await self._models()
        model = self._chosen(models, name)
        owner = model.owned_by or ""
        speech = Speech(model.id, owner, adapters=_adapters(models, model.id))
        return Known(speech, model.max_model_len, await self._versions(owner or "server"))

    async def adapters(self, model: str) -> frozenset[str]:
        """Those that it has of a model now. Raises EngineError."""
        return _adapters(await self._models(), model)

    async def _versions(self, name: str) -> dict[str, str]:
        """The server's version under its maker's name, as vLLM tells it; nothing of most others."""
        try:
            told = msgspec.json.decode(await self._server.get("/version", ASK_S), type=_Version)
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            log.debug("%s tells no version: %s", self._server.url, e)
            return {}
        return {name[:LONGEST_WORD]: told.version[:LONGEST_WORD]}

    async def _models(self) -> list[_Model]:
        url = self._server.url
        try:
            listed = msgspec.json.decode(await self._server.get("/v1/models", ASK_S), type=_Models)
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            hint = "set KVLANE_ATTACH_API_KEY" if getattr(e, "status", 0) in (401, 403) else (
                "give the URL of a server that speaks to OpenAI clients, as http://host:port"
            )  # fmt: skip
            raise EngineError(f"KVLANE_ATTACH_URL={url}: no list of models ({e}); {hint}") from e
        if not listed.data:
            raise EngineError(f"KVLANE_ATTACH_URL={url}: the server serves no model")
        return listed.data

    def _chosen(self, models: list[_Model], name: str) -> _Model:
        names = ", ".join(repr(m.id) for m in models)
        if name:
            found = [m for m in models if m.id == name]
            if not found:
                raise EngineError(
                    f"KVLANE_ATTACH_MODEL={name}: the server at {self._server.url} serves {names}"
                )
            return found[0]
        bases = [m for m in models if m.parent is None]
        if len(bases) != 1:
            raise EngineError(
                f"the server at {self._server.url} serves {names}: say which one with "
                "KVLANE_ATTACH_MODEL"
            )
        return bases[0]

    async def _compare_tokens(self, model: str, tokenizer: Tokenizer) -> None:
        """Raises EngineError when the server tokenises otherwise than the model's folder."""
        asked = {"model": model, "prompt": TEXT, "content": TEXT,
                 "add_special_tokens": False, "add_special": False}  # fmt: skip
        try:
            body = await self._server.post("/tokenize", asked, ASK_S)
            theirs = msgspec.json.decode(body, type=_Tokens).tokens
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            log.info("%s does not tokenise, so models are not compared: %s", self._server.url, e)
            return
        ours = list(tokenizer.encode_now(TEXT))
        if theirs != ours:
            raise EngineError(
                f"the server at {self._server.url} makes other tokens than the tokenizer of "
                f"KVLANE_MODEL_PATH ({theirs[:8]}, not {ours[:8]}): give the folder of the model "
                f"{model!r} that it serves"
            )

    async def _understands(
        self, speech: Speech, prompt: Sequence[int], tokenizer: Tokenizer
    ) -> bool:
        """Whether an answer asked for so comes as it should. Raises ServerFailed."""
        request = Request(
            id="", token_ids=pack_tokens(prompt), is_probe=True, stop=StopConditions(max_tokens=2)
        )
        body = body_of(request, speech, 2, lambda ids: tokenizer.decode(ids, skip_special=False))
        try:
            pieces = await self._pieces(body, speech)
        except Rejected as e:
            log.info("%s takes no %s for %s: %s", self._server.url, speech.prompts,
                     speech.answers, e)  # fmt: skip
            return False
        counts = next((piece.counts for piece in pieces if piece.counts is not None), None)
        counted = None if counts is None else counts.prompt_tokens
        if speech.prompts == "tokens" and counted not in (None, len(prompt)):
            log.warning("%s counts %s tokens in a prompt of %d: it takes them for something else",
                        self._server.url, counted, len(prompt))  # fmt: skip
            return False
        if speech.is_vllm and (counts is None or counts.cached_tokens is None):
            log.warning("%s does not say how much of a prompt was cached: start it with "
                        "--enable-prompt-tokens-details", self._server.url)  # fmt: skip
        return speech.answers == "text" or any(piece.token_ids for piece in pieces)

    async def _pieces(self, body: object, speech: Speech) -> list[Piece]:
        pieces: list[Piece] = []
        async with self._server.stream("/v1/completions", body, EVENT_BYTES) as stream:
            async for event in stream.events():
                if event == DONE:
                    return pieces
                pieces.append(piece_of(event, speech))
                if len(pieces) > MOST_PIECES:
                    raise ServerFailed("the server gives far more than the two tokens it is asked")
        raise ServerFailed("the server broke its first answer off")

    def _warn(self, speech: Speech) -> None:
        if speech.answers == "text":
            log.warning(
                "%s gives text without token ids: its answers are tokenised again, and one that "
                "breaks off is not continued by another worker", self._server.url,
            )  # fmt: skip


def _adapters(models: Sequence[_Model], of: str) -> frozenset[str]:
    return frozenset(m.id for m in models if m.parent == of)
