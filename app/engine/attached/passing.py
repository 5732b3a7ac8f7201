"""A server asked in OpenAI's own words: bodies go to it as they came, for one kind of request.

    Request.body ─► dialect.py ─► server.py ─HTTP─► the server ─► verbatim.py ─► EngineOutputs

No tokenizer is needed and no token is known: templates, tools, reasoning and images are the
server's. So nothing is known of its cache either, and nobody can go on with an answer that it broke
off. All else is as with `engine.py`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from app.engine.attached.beside import Attachment, Beside
from app.engine.attached.dialect import as_it_came
from app.engine.attached.verbatim import EVENT_BYTES, Embeddings, Verbatim
from app.engine.contract import EngineError, EngineOutput, GenerateContext, InvalidRequest
from streams.clock import Clock
from streams.records import EngineConfig, OpenAiBody, Request

log = logging.getLogger(__name__)

Kind = Literal["chat", "completion", "embedding"]

PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions", "completion": "/v1/completions", "embedding": "/v1/embeddings",
}  # fmt: skip
_PROBES: Mapping[Kind, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "completion": {"prompt": "a", "max_tokens": 1},
    "embedding": {"input": "a"},
}


class PassingEngine(Beside):
    """See the module. `context_length`: of a server that does not say, if somebody knows it;
    `serves_as`: the model's name for clients; "" for that of the server."""

    def __init__(
        self,
        clock: Clock,
        where: Attachment,
        kind: Kind,
        *,
        context_length: int | None = None,
        serves_as: str = "",
    ) -> None:
        super().__init__(clock, where)
        self._kind = kind
        self._context_length = context_length
        self._serves_as = serves_as

    async def start(self, worker_id: str) -> EngineConfig:
        """Wait for the server and see that it answers. Raises EngineError, with what to do."""
        introduction = await self._meet(worker_id)
        known = await introduction.look_up(self._where.model)
        speech = self._speech = known.speech
        self._versions = known.versions
        await self._try_out()
        await self._look_after()
        log.info("%s: %s for %s requests", self._where.url, speech.model, self._kind)
        return EngineConfig(
            model=speech.model,
            served_model_name=self._serves_as or speech.model,
            context_length=known.context_length or self._context_length,
            lora_names=tuple(sorted(speech.adapters)) or None,
            gives_tokens=False,
            kind=self._kind,
        )

    async def _try_out(self) -> None:
        """Have it answer once, asked as it will be asked. Raises EngineError."""
        context = GenerateContext("introduction")
        try:
            async with aclosing(self.generate(Request(id="", is_probe=True), context)) as outputs:
                async for _ in outputs:
                    pass
        except EngineError as e:
            raise EngineError(
                f"KVLANE_ATTACH_KIND: the server at {self._where.url} does not answer POST "
                f"{PATHS[self._kind]} ({e}). Say what it does answer, or see its own log"
            ) from e

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """As `Engine.generate`. Raises ServerFailed and InvalidRequest, besides EngineDead."""
        reading = (
            Embeddings() if self._kind == "embedding" else Verbatim(is_chat=self._kind == "chat")
        )
        answering = self._answer(
            PATHS[self._kind], self._body(request), EVENT_BYTES, reading, context
        )
        async with aclosing(answering) as outputs:
            async for output in outputs:
                yield output

    def _body(self, request: Request) -> dict[str, Any]:
        if request.is_probe:
            body = OpenAiBody(kind=self._kind, json=msgspec.json.encode(_PROBES[self._kind]))
            request = replace(request, body=body)
        if request.kind != self._kind:
            raise InvalidRequest(f"body: this model takes {self._kind} requests as they come")
        return as_it_came(request, self._speech)
