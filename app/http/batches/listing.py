"""Responses that files and batches share: objects, pages of lists, and errors of the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response

from kvlane.app.batches.file_store import FileDamaged
from kvlane.app.http.api_errors import ApiError, error_of_stream, invalid_request
from kvlane.app.http.server.probes import JSON
from kvlane.streams.errors import StreamError
from kvlane.streams.record_types.batch_records import BatchJob, FileCard

Entity = TypeVar("Entity", FileCard, BatchJob)


def page_of(
    entities: Iterable[Entity], query: QueryParams, default: int, most: int
) -> tuple[list[Entity], bool]:
    """The entities of a page, and whether there are more, by `limit`, `after` and `order`. Ids are
    ordered by time, so `after` may have been deleted. Raises ApiError."""
    after = query.get("after", "")
    limit, is_ascending = limit_of(query, default, most)
    newest_first = not is_ascending
    chosen = [
        entity for entity in entities
        if not after or (entity.id < after if newest_first else entity.id > after)
    ]  # fmt: skip
    chosen.sort(key=lambda entity: entity.id, reverse=newest_first)
    return chosen[:limit], len(chosen) > limit


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except StreamError as e:
        raise error_of_stream(e) from e
    except FileDamaged as e:
        raise ApiError(HTTPStatus.GONE, str(e), code="file_damaged") from e


def list_response(objects: list[dict[str, Any]], *, has_more: bool) -> Response:
    return json_response({
        "object": "list", "data": objects, "has_more": has_more,
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
    })  # fmt: skip


def json_response(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


def limit_of(query: QueryParams, default: int, most: int) -> tuple[int, bool]:
    """The number of objects of a page, and whether its order is ascending. Raises ApiError."""
    order = query.get("order")
    if order not in (None, "asc", "desc"):
        raise invalid_request("order: asc or desc", "order")
    given = query.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise invalid_request(f"limit: a number from 1 to {most}", "limit")
    return int(given), order == "asc"
