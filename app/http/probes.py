"""What an orchestrator asks of a process that follows the log: /livez, /readyz, /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from streams.follow import Follower

JSON = "application/json"


class Probes:
    """The three endpoints. Ready is who has read its topics to where they ended at the start."""

    def __init__(
        self,
        followers: Mapping[str, Follower],
        page: Callable[[], Awaitable[bytes]],
        is_alive: Callable[[], bool],
    ) -> None:
        """`page`: the figures in Prometheus' text format."""
        self._followers = followers
        self._page = page
        self._is_alive = is_alive

    def add_to(self, api: FastAPI) -> None:
        """Answer them in an application."""
        for path, handler in (
            ("/livez", self.livez),
            ("/readyz", self.readyz),
            ("/metrics", self.metrics),
        ):
            api.add_api_route(path, handler, methods=["GET"])

    async def livez(self) -> Response:
        """Whether this process is worth keeping."""
        return _judged("alive", is_good=self._is_alive())

    async def readyz(self) -> Response:
        """Whether what it knows is what the log held at the start, or later."""
        read = {f"{name}_read": follower.caught_up for name, follower in self._followers.items()}
        left = {f"{name}_left": follower.left for name, follower in self._followers.items()}
        is_good = bool(read) and all(read.values())
        return _judged("ready", is_good=is_good, **read, **left)

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(await self._page(), headers={"content-type": CONTENT_TYPE_LATEST})


def _judged(name: str, *, is_good: bool, **more: bool | int) -> Response:
    status = HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(msgspec.json.encode({name: is_good} | more), status, media_type=JSON)
