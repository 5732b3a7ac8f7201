"""Tests of the reader of probes and metrics of `kvlane doctor`, against real HTTP servers."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvlane.app.audit.diagnosis.facts import ProcessAnswer
from kvlane.app.audit.diagnosis.process_reader import read_processes

GAPS = "kvlane_gateway_stream_gaps_total"
VIEW = 'view="index",topic="kv-events",partition="0"'


async def _answer_with(*parts: bytes) -> ProcessAnswer:
    """The answer of a process that sends its metrics in these parts."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.05)
        return response

    async def probe(_: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    app = web.Application()
    app.add_routes([
        web.get("/livez", probe), web.get("/readyz", probe), web.get("/metrics", metrics),
    ])  # fmt: skip
    async with TestServer(app) as server:
        (answer,) = await read_processes([str(server.make_url("/"))])
    return answer


async def test_metrics_that_come_in_parts_are_read_to_their_end() -> None:
    answer = await _answer_with(b"other_total 1.0\n", f"{GAPS} 3.0\n".encode())
    assert (answer.counts, answer.unmeasured) == ({GAPS: 3.0}, "")


@pytest.mark.parametrize(
    "page", ["<!doctype html>\n<title>Sign in</title>\n", f"kvlane_view_offset{{{VIEW}}} +Inf\n"]
)
async def test_page_without_metrics_is_no_error_of_the_command(page: str) -> None:
    answer = await _answer_with(page.encode())
    assert (answer.live, answer.counts) == (200, None)
    assert answer.unmeasured.startswith("/metrics: ")
