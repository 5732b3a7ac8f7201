"""Discovery of a server: its readiness, its model, its adapters and its dialect of the API.

Trial requests of two tokens find the dialect, the best form first. The server's tokenizer is
compared with the model folder's if it has a tokenize endpoint. Every error has advice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvlane.app.engine.attached.completion_events import (
    MAX_COMPLETION_EVENT_BYTES,
    CompletionEvent,
    parse_completion_event,
)
from kvlane.app.engine.attached.request_body import ServerDialect, completion_body
from kvlane.app.engine.attached.server_client import ServerClient
from kvlane.app.engine.attached.server_errors import DONE, RequestRejected, ServerFailed
from kvlane.app.engine.interface import EngineError
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import Request, StopConditions

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 1.0
WAIT_LOG_INTERVAL_S = 10.0
MAX_TRIAL_EVENTS = 64
MAX_VERSION_CHARS = 100
"""Limit on the characters of a server's name and version."""
TOKENIZER_SAMPLE = "Hello there, 1234 naïve €uros!\n"
"""Tokenised by both sides to check that they have the same model."""


class ServerInfo(NamedTuple):
    """The discovered properties of a server."""

    dialect: ServerDialect
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


class _TokenizedPrompt(msgspec.Struct):
    tokens: list[int]


class ServerDiscovery:
    def __init__(self, server: ServerClient, clock: Clock) -> None:
        self._server = server
        self._clock = clock

    async def wait_ready(self, within_s: float) -> None:
        """Wait until the server is ready. Raises EngineError after `within_s`."""
        url, began_at = self._server.url, self._clock.now()
        reported_at = began_at
        while True:
            try:
                await self._server.get("/health", REQUEST_TIMEOUT_S)
                return
            except EngineError as e:
                if getattr(e, "status", None) in (404, 405):
                    return  # it runs, without a health endpoint
                waited_s = self._clock.now() - began_at
                if waited_s >= within_s:
                    raise EngineError(
                        f"KVLANE_ATTACH_URL={url}: no server is ready there after {waited_s:.0f} s "
                        f"({e}). Start it, or fix the URL; "
                        "KVLANE_ATTACH_START_TIMEOUT_S limits the wait"
                    ) from e
                if self._clock.now() - reported_at >= WAIT_LOG_INTERVAL_S:
                    reported_at = self._clock.now()
                    log.info("%s is not ready yet, %.0f s: %s", url, waited_s, e)
            await self._clock.sleep(RETRY_INTERVAL_S)

    async def discover(
        self, name: str, tokenizer: Tokenizer, *, has_transfers: bool = False
    ) -> ServerInfo:
        """Find the model `name` ("" for the only one) and the dialect. Raises EngineError.
        `has_transfers`: whether it shares requests with another server."""
        known = await self.look_up_model(name)
        is_disaggregated = has_transfers and known.dialect.vendor == "sglang"
        model, owner, adapters = known.dialect.model, known.dialect.vendor, known.dialect.adapters
        await self._compare_tokens(model, tokenizer)
        prompt = tokenizer.encode_now(TOKENIZER_SAMPLE)
        for prompts, answers in (
            ("tokens", "token_ids"),
            ("tokens", "log_probs"),
            ("tokens", "text"),
            ("text", "text"),
        ):
            dialect = ServerDialect(model, owner, prompts, answers, adapters)  # type: ignore[arg-type]
            dialect = dialect._replace(is_disaggregated=is_disaggregated)
            if await self._understands(dialect, prompt, tokenizer):
                self._warn(dialect)
                return known._replace(dialect=dialect)
        raise EngineError(
            f"KVLANE_ATTACH_URL={self._server.url}: the server completes no prompt, neither tokens "
            "nor text. It must support OpenAI's POST /v1/completions; see its own log"
        )

    async def look_up_model(self, name: str) -> ServerInfo:
        """Find the model `name` ("" for the only one). Raises EngineError."""
        models = await self._models()
        model = self._chosen(models, name)
        owner = model.owned_by or ""
        dialect = ServerDialect(model.id, owner, adapters=_adapters(models, model.id))
        return ServerInfo(dialect, model.max_model_len, await self._versions(owner or "server"))

    async def adapters(self, model: str) -> frozenset[str]:
        """The adapters of a model that are loaded now. Raises EngineError."""
        return _adapters(await self._models(), model)

    async def _versions(self, name: str) -> dict[str, str]:
        """The server's version under its vendor's name, from vLLM's endpoint; empty for others."""
        try:
            answer = msgspec.json.decode(
                await self._server.get("/version", REQUEST_TIMEOUT_S), type=_Version
            )
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            log.debug("%s reports no version: %s", self._server.url, e)
            return {}
        return {name[:MAX_VERSION_CHARS]: answer.version[:MAX_VERSION_CHARS]}

    async def _models(self) -> list[_Model]:
        url = self._server.url
        try:
            listed = msgspec.json.decode(
                await self._server.get("/v1/models", REQUEST_TIMEOUT_S), type=_Models
            )
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            hint = (
                "set KVLANE_ATTACH_API_KEY"
                if getattr(e, "status", 0) in (401, 403)
                else ("give the URL of an OpenAI-compatible server, as http://host:port")
            )
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
                f"the server at {self._server.url} serves {names}: choose one with "
                "KVLANE_ATTACH_MODEL"
            )
        return bases[0]

    async def _compare_tokens(self, model: str, tokenizer: Tokenizer) -> None:
        """Raises EngineError if the server's tokenizer differs from that of the folder."""
        sample = {"model": model, "prompt": TOKENIZER_SAMPLE, "content": TOKENIZER_SAMPLE,
                 "add_special_tokens": False, "add_special": False}  # fmt: skip
        try:
            body = await self._server.post("/tokenize", sample, REQUEST_TIMEOUT_S)
            theirs = msgspec.json.decode(body, type=_TokenizedPrompt).tokens
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError) as e:
            log.info(
                "%s has no tokenize endpoint, so tokenizers are not compared: %s",
                self._server.url,
                e,
            )
            return
        ours = list(tokenizer.encode_now(TOKENIZER_SAMPLE))
        if theirs != ours:
            raise EngineError(
                f"the server at {self._server.url} tokenises differently from the tokenizer in "
                f"KVLANE_MODEL_PATH ({theirs[:8]}, not {ours[:8]}): give the folder of its model "
                f"{model!r}"
            )

    async def _understands(
        self, dialect: ServerDialect, prompt: Sequence[int], tokenizer: Tokenizer
    ) -> bool:
        """Whether a trial request in this dialect is answered as expected. Raises ServerFailed."""
        request = Request(
            id="", token_ids=pack_tokens(prompt), is_probe=True, stop=StopConditions(max_tokens=2)
        )
        body = completion_body(
            request, dialect, 2, lambda ids: tokenizer.decode(ids, skip_special=False)
        )
        try:
            pieces = await self._pieces(body, dialect)
        except RequestRejected as e:
            log.info("%s does not accept %s with %s: %s", self._server.url, dialect.prompt_form,
                     dialect.answer_tokens, e)  # fmt: skip
            return False
        counts = next((piece.usage for piece in pieces if piece.usage is not None), None)
        counted = None if counts is None else counts.prompt_tokens or None
        if dialect.prompt_form == "tokens" and counted not in (None, len(prompt)):
            log.warning("%s counts %s tokens in a prompt of %d: it does not read them as tokens",
                        self._server.url, counted, len(prompt))  # fmt: skip
            return False
        if dialect.is_vllm and (counts is None or "cached_tokens" in counts.unknown):
            log.warning("%s does not report cached prompt tokens: start it with "
                        "--enable-prompt-tokens-details", self._server.url)  # fmt: skip
        return dialect.answer_tokens == "text" or any(piece.token_ids for piece in pieces)

    async def _pieces(self, body: object, dialect: ServerDialect) -> list[CompletionEvent]:
        pieces: list[CompletionEvent] = []
        async with self._server.open_stream(
            "/v1/completions", body, MAX_COMPLETION_EVENT_BYTES
        ) as stream:
            while (event := await stream.next_event()) is not None:
                if event == DONE:
                    return pieces
                pieces.append(parse_completion_event(event, dialect))
                if len(pieces) > MAX_TRIAL_EVENTS:
                    raise ServerFailed(
                        "the server generates far more than the two requested tokens"
                    )
        raise ServerFailed("the server ended the stream of its first answer early")

    def _warn(self, dialect: ServerDialect) -> None:
        if dialect.answer_tokens == "text":
            log.warning(
                "%s returns text without token ids: answers are tokenised again, and an "
                "interrupted one is not resumed by another worker",
                self._server.url,
            )


def _adapters(models: Sequence[_Model], of: str) -> frozenset[str]:
    return frozenset(m.id for m in models if m.parent == of)
