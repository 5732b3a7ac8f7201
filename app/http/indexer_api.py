"""HTTP API of an indexer: cached blocks of a prompt by worker, and contents of each cache.

Hashes and keys are u64: numbers in requests, where signed ones mean the same bits, and decimal
strings in responses, for readers without 64-bit integers.
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

from kvlane.app.http.api_errors import ApiError
from kvlane.app.http.batches.listing import json_response
from kvlane.app.http.gateway_api import answer_errors
from kvlane.app.http.server.authentication import AccessControl, Authentication
from kvlane.app.http.server.middleware import BodyLimiter
from kvlane.app.http.server.probes import Probes, catch_up_checks
from kvlane.app.metrics.indexer_metrics import IndexerMetrics
from kvlane.app.preprocess.json_limits import json_error, without_mark
from kvlane.app.routing.selection.eligibility import block_size_of, worker_number
from kvlane.app.routing.selection.prompt_hashes import PromptHashes
from kvlane.app.routing.state.fleet import Fleet
from kvlane.app.routing.state.kv_index import KvIndexView
from kvlane.indexer.epochs import CacheSize
from kvlane.indexer.events import Tier
from kvlane.streams.clock import Clock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.ids import TenantTag
from kvlane.streams.request import Hints
from kvlane.streams.request import Request as Asked
from kvlane.streams.views.follower import Follower

U64_MAX = 2**64 - 1
TIERS = [tier.name.lower() for tier in Tier]
EMPTY_CACHE = CacheSize((0,) * len(TIERS), complete=False)
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class TokenQuery(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[TokenId]
    model: str = ""
    lora_name: str = ""
    cache_salt: str = ""
    tenant: str = ""


class HashQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Query by local block hashes, which include adapter and salt."""

    block_hashes: list[int]
    model: str = ""


B = TypeVar("B", TokenQuery, HashQuery)


class IndexerApi:
    """The endpoints. Two followers keep `index` and `fleet` up to date. `seal`: that of the
    gateways, if there are tenants."""

    def __init__(
        self,
        index: KvIndexView,
        fleet: Fleet,
        followers: Mapping[str, Follower],
        metrics: IndexerMetrics,
        clock: Clock,
        body_bytes: int,
        *,
        is_alive: Callable[[], bool],
        log_answers: Callable[[], bool],
        access: AccessControl,
        seal: TenantTag | None,
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._bodies = BodyLimiter(body_bytes)
        self._access = access
        self._seal = seal
        self._probes = Probes(
            lambda: {**catch_up_checks(followers), "log_answers": log_answers()},
            metrics.page,
            is_alive,
        )

    def build_app(self) -> FastAPI:
        api = FastAPI(title="kvlane indexer", docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, handler in (
            ("POST", "/query", self.query),
            ("POST", "/query_by_hash", self.query_by_hash),
            ("GET", "/workers", self.workers),
            ("GET", "/dump", self.dump),
        ):
            methods = [method, "HEAD"] if method == "GET" else [method]
            api.add_api_route(path, handler, methods=methods)
        self._probes.add_to(api)
        answer_errors(api)
        api.add_middleware(Authentication, access=self._access, needs="operator")
        return api

    async def query(self, request: Request) -> Response:
        """Blocks by worker, rank and tier, of a prompt's tokens."""
        query = await self._read(request, TokenQuery)
        began = self._clock.now()
        prompt = Asked(
            id="", token_ids=pack_tokens(query.token_ids), cache_salt=self._salt(query),
            hints=Hints(lora_name=query.lora_name),
        )  # fmt: skip
        size = self._block_size(query.model)
        answer = self._found(query.model, size, PromptHashes(prompt).local_hashes(size))
        self._metrics.query_s.labels("query").observe(self._clock.now() - began)
        return answer

    async def query_by_hash(self, request: Request) -> Response:
        """Blocks by worker, rank and tier, of a prompt's local hashes."""
        query = await self._read(request, HashQuery)
        began = self._clock.now()
        if any(not -(2**63) <= each <= U64_MAX for each in query.block_hashes):
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "hashes are numbers of 64 bits",
                code="invalid_request", param="block_hashes",
            )  # fmt: skip
        local = np.array([each & U64_MAX for each in query.block_hashes], np.uint64)
        answer = self._found(query.model, self._block_size(query.model), local)
        self._metrics.query_s.labels("query_by_hash").observe(self._clock.now() - began)
        return answer

    async def workers(self) -> Response:
        sizes = {(h.worker, h.rank): size for h, size in self._index.cache_sizes().items()}
        rows = []
        for worker, member in sorted(self._fleet.live_members()):
            ranks = [
                (rank, sizes.get((worker, rank), EMPTY_CACHE)) for rank in range(member.card.ranks)
            ]
            rows.append(
                {
                    "worker": worker,
                    "number": worker_number(worker),
                    "epoch": member.epoch,
                    "model": member.card.model,
                    "role": member.card.role,
                    "versions": member.card.versions,
                    "block_size": member.card.config.kv_cache_block_size,
                    "known": worker not in self._index.wrong_secret_workers,
                    "ranks": [
                        {"rank": rank, "blocks": size.total_blocks, "complete": size.complete}
                        | dict(zip(TIERS, size.tiers, strict=True))
                        for rank, size in ranks
                    ],
                }
            )
        return json_response({"workers": rows})

    async def dump(self) -> Response:
        """Every key in every cache, one JSON object a line: worker, rank, tier, keys, positions."""
        return StreamingResponse(self._lines(), media_type="application/x-ndjson")

    async def _lines(self) -> AsyncIterator[bytes]:
        for holder in sorted(self._index.cache_sizes()):
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
                return msgspec.json.decode(without_mark(body.content), type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
                message = json_error(body.content, e)
                raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_request") from None

    def _salt(self, query: TokenQuery) -> str:
        """The salt of the prompt's blocks; for a tenant, the one that gateways give it."""
        if not query.tenant:
            return query.cache_salt
        if self._seal is None:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "there are no tenants without KVLANE_API_KEYS_FILE",
                code="invalid_request", param="tenant",
            )  # fmt: skip
        return self._seal.cache_salt(query.tenant, query.cache_salt)

    def _members(self, model: str) -> Iterator[Any]:
        return (m for _, m in self._fleet.live_members() if model in ("", m.card.model))

    def _block_size(self, model: str) -> int:
        return block_size_of(self._fleet, model, self._members(model))

    def _found(self, model: str, block_size: int, local: NDArray[np.uint64]) -> Response:
        serving = {m.card.id for m in self._members(model)}
        overlaps = self._index.overlaps(local)
        found: Iterable[Any] = (
            {
                "worker": holder.worker,
                "rank": holder.rank,
                "blocks": size.total_blocks,
                **size._asdict(),
            }
            for holder, size in overlaps.items()
            if not model or holder.worker in serving
        )
        holders = sorted(found, key=lambda each: (-each["blocks"], each["worker"], each["rank"]))
        return json_response({"block_size": block_size, "blocks": len(local), "holders": holders})
