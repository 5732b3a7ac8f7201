"""Engine over a running server that receives OpenAI bodies unchanged, for one kind of request.

    Request.body ─► request_body.py ─► server_client.py ─HTTP─► the server ─► passthrough_events.py
                                                                                 ─► EngineOutputs

The server handles templates, tools, reasoning and images. Tokens and cache are unknown, and no
other worker can resume an answer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from kvlane.app.engine.attached.new_forms import form_key
from kvlane.app.engine.attached.passthrough_events import (
    MAX_EVENT_BYTES,
    EmbeddingsResponse,
    PassthroughStream,
)
from kvlane.app.engine.attached.request_body import passthrough_body
from kvlane.app.engine.attached.server_engine import ServerAddress, ServerEngine
from kvlane.app.engine.interface import EngineError, EngineOutput, GenerateContext, InvalidRequest
from kvlane.streams.clock import Clock
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import OpenAiBody, Request

log = logging.getLogger(__name__)

BodyKind = Literal["chat", "completion", "embedding"]

API_PATHS: Mapping[BodyKind, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "embedding": "/v1/embeddings",
}
_PROBES: Mapping[BodyKind, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "completion": {"prompt": "a", "max_tokens": 1},
    "embedding": {"input": "a"},
}


class PassthroughEngine(ServerEngine):
    """See the module. `context_length`: of a server that does not report it, if known;
    `served_name`: the model's name for clients; "" for the server's name. `media_hosts`: from which
    the server may fetch media for clients."""

    def __init__(
        self,
        clock: Clock,
        address: ServerAddress,
        kind: BodyKind,
        *,
        context_length: int | None = None,
        served_name: str = "",
        media_hosts: Collection[str] = (),
    ) -> None:
        super().__init__(clock, address)
        self._kind = kind
        self._media_hosts = media_hosts
        self._context_length = context_length
        self._serves_as = served_name

    async def start(self, worker_id: str) -> EngineConfig:
        """Wait for the server and check that it answers. Raises EngineError with advice."""
        introduction = await self._connect(worker_id)
        known = await introduction.look_up_model(self._where.model)
        dialect = self._dialect = known.dialect
        self._versions = known.versions
        await self._check_answers()
        await self._start_monitoring()
        log.info("%s: %s for %s requests", self._where.url, dialect.model, self._kind)
        return EngineConfig(
            model=dialect.model,
            served_model_name=self._serves_as or dialect.model,
            context_length=known.context_length or self._context_length,
            lora_names=tuple(sorted(dialect.adapters)) or None,
            gives_tokens=False,
            kind=self._kind,
        )

    async def _check_answers(self) -> None:
        """Send one trial request of this kind. Raises EngineError."""
        context = GenerateContext("introduction")
        try:
            async with aclosing(self.generate(Request(id="", is_probe=True), context)) as outputs:
                async for _ in outputs:
                    pass
        except EngineError as e:
            raise EngineError(
                f"KVLANE_ATTACH_KIND: the server at {self._where.url} does not answer POST "
                f"{API_PATHS[self._kind]} ({e}). Set the kind that it answers, or see its own log"
            ) from e

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`. Raises ServerFailed and InvalidRequest, besides EngineDead."""
        reading = (
            EmbeddingsResponse()
            if self._kind == "embedding"
            else PassthroughStream(is_chat=self._kind == "chat")
        )
        body = self._body(request)
        form = form_key(request, body)
        answering = self._answer(
            API_PATHS[self._kind], body, MAX_EVENT_BYTES, reading, context, form
        )
        async with aclosing(answering) as outputs:
            async for output in outputs:
                yield output

    def _body(self, request: Request) -> dict[str, Any]:
        if request.is_probe:
            body = OpenAiBody(kind=self._kind, json=msgspec.json.encode(_PROBES[self._kind]))
            request = replace(request, body=body)
        if request.kind != self._kind:
            raise InvalidRequest(
                f"body: this model accepts OpenAI bodies of kind {self._kind} only"
            )
        return passthrough_body(request, self._dialect, self._media_hosts)
