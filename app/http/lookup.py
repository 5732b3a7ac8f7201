"""The HTTP surface of an indexer: who holds which blocks of a prompt, and what each cache holds.

For routers of others, and for people who look. Answers are of the moment; nothing is kept here.
Hashes and keys are u64: numbers in requests, where signed ones mean the same bits, and strings of
decimals in answers, for readers without 64 bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.http.api import answer_errors
from app.http.errors import ApiError
from app.http.front import Bodies
from app.http.index_metrics import IndexMetrics
from app.http.probes import JSON, Probes
from app.routing.eligibility import block_size_of, number_of
from app.routing.fleet import Fleet
from app.routing.index import Index
from app.routing.prompt import Prompt
from indexer.events import Tier
from indexer.lives import Holding
from streams.clock import Clock
from streams.codecs import pack_tokens
from streams.follow import Follower
from streams.records import Hints
from streams.records import Request as Asked

M64 = 2**64 - 1
TIERS = [tier.name.lower() for tier in Tier]
NOTHING = Holding((0,) * len(TIERS), complete=False)
Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Query(msgspec.Struct, forbid_unknown_fields=True):
    """Whose caches have the leading blocks of these tokens?"""

    token_ids: list[Token]
    model: str = ""
    lora_name: str = ""
    cache_salt: str = ""


class HashQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The same by local hashes of blocks, which say by themselves of what adapter and salt."""

    block_hashes: list[int]
    model: str = ""


B = TypeVar("B", Query, HashQuery)


class Lookup:
    """The endpoints. `index` and `fleet` are kept up to date by the two followers."""

    def __init__(
        self,
        index: Index,
        fleet: Fleet,
        followers: Mapping[str, Follower],
        metrics: IndexMetrics,
        clock: Clock,
        body_bytes: int,
        is_alive: Callable[[], bool],
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._bodies = Bodies(body_bytes)
        self._probes = Probes(followers, metrics.page, is_alive)

    def build(self) -> FastAPI:
        """The application."""
        api = FastAPI(title="kvlane indexer", docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, handler in (
            ("POST", "/query", self.query),
            ("POST", "/query_by_hash", self.query_by_hash),
            ("GET", "/workers", self.workers),
            ("GET", "/dump", self.dump),
        ):
            api.add_api_route(path, handler, methods=[method])
        self._probes.add_to(api)
        answer_errors(api)
        return api

    async def query(self, request: Request) -> Response:
        """Blocks by worker, rank and tier, of a prompt's tokens."""
        asked = await self._read(request, Query)
        began = self._clock.now()
        prompt = Asked(
            id="", token_ids=pack_tokens(asked.token_ids), cache_salt=asked.cache_salt,
            hints=Hints(lora_name=asked.lora_name),
        )  # fmt: skip
        size = self._block_size(asked.model)
        answer = self._found(asked.model, size, Prompt(prompt).local(size))
        self._metrics.query_s.labels("query").observe(self._clock.now() - began)
        return answer

    async def query_by_hash(self, request: Request) -> Response:
        """Blocks by worker, rank and tier, of a prompt's local hashes."""
        asked = await self._read(request, HashQuery)
        began = self._clock.now()
        if any(not -(2**63) <= each <= M64 for each in asked.block_hashes):
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "hashes are numbers of 64 bits",
                code="invalid_request", param="block_hashes",
            )  # fmt: skip
        local = np.array([each & M64 for each in asked.block_hashes], np.uint64)
        answer = self._found(asked.model, self._block_size(asked.model), local)
        self._metrics.query_s.labels("query_by_hash").observe(self._clock.now() - began)
        return answer

    async def workers(self) -> Response:
        """The workers that live, and how much each of their caches is known to hold."""
        holdings = {(h.worker, h.rank): told for h, told in self._index.holdings().items()}
        told = []
        for worker, member in sorted(self._fleet.living()):
            ranks = [
                (rank, holdings.get((worker, rank), NOTHING)) for rank in range(member.card.ranks)
            ]
            told.append(
                {
                    "worker": worker,
                    "number": number_of(worker),
                    "epoch": member.epoch,
                    "model": member.card.model,
                    "role": member.card.role,
                    "versions": member.card.versions,
                    "block_size": member.card.config.kv_cache_block_size,
                    "known": worker not in self._index.foreign_workers,
                    "ranks": [
                        {"rank": rank, "blocks": held.blocks, "complete": held.complete}
                        | dict(zip(TIERS, held.tiers, strict=True))
                        for rank, held in ranks
                    ],
                }
            )  # fmt: skip
        return _json({"workers": told})

    async def dump(self) -> Response:
        """Every key in every cache, one JSON object a line: worker, rank, tier, keys, positions."""
        return StreamingResponse(self._lines(), media_type="application/x-ndjson")

    async def _lines(self) -> AsyncIterator[bytes]:
        for holder in sorted(self._index.holdings()):
            for tier in Tier:
                entries = self._index.entries(holder, tier)
                if not entries:
                    continue
                line = {
                    "worker": holder.worker,
                    "rank": holder.rank,
                    "tier": tier.name.lower(),
                    "keys": [str(key) for key in entries],
                    "positions": list(entries.values()),
                }
                yield msgspec.json.encode(line) + b"\n"
                await asyncio.sleep(0)

    # --- parts -----------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[B]) -> B:
        async with self._bodies.read(request) as body:
            try:
                return msgspec.json.decode(body, type=kind)
            except msgspec.DecodeError as e:
                raise ApiError(HTTPStatus.BAD_REQUEST, str(e), code="invalid_request") from None

    def _members(self, model: str) -> Iterator[Any]:
        return (m for _, m in self._fleet.living() if model in ("", m.card.model))

    def _block_size(self, model: str) -> int:
        return block_size_of(self._fleet, model, self._members(model))

    def _found(self, model: str, block_size: int, local: NDArray[np.uint64]) -> Response:
        serving = {m.card.id for m in self._members(model)}
        overlaps = self._index.overlaps(local)
        found: Iterable[Any] = (
            {"worker": holder.worker, "rank": holder.rank, "blocks": held.blocks, **held._asdict()}
            for holder, held in overlaps.items()
            if not model or holder.worker in serving
        )
        holders = sorted(found, key=lambda each: (-each["blocks"], each["worker"], each["rank"]))
        return _json({"block_size": block_size, "blocks": len(local), "holders": holders})


def _json(told: object, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(told), status, media_type=JSON)
