"""Tests of the table of changes: what fails for a new endpoint or field is named in its row."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI, Request, Response

from kvlane.app.http import openapi
from kvlane.app.http.server import middleware
from kvlane.app.lanes import remaining_work
from kvlane.streams import request as requests
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.memory_world import MemoryWorld, run_scenario
from tests.unit.app.lanes import test_continuation
from tests.unit.streams import test_codecs

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "architecture.md"
DUMMY = "/v1/dummies"


def row_of(change: str) -> set[str]:
    """The names of the files in the row of a change."""
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {change} |"))
    return {Path(path).name for path in re.findall(r"\]\(([^)#]+)", row)}


def failing_file(check: Callable[[], object]) -> str | None:
    """The file in which a check fails."""
    try:
        check()
    except (KeyError, AssertionError, AttributeError) as e:
        return Path(traceback.extract_tb(e.__traceback__)[-1].filename).name
    return None


async def labels(harness: GatewayHarness) -> set[str]:
    """The endpoints that metrics have counted."""
    metrics = (await harness.send("GET", "/metrics").wait_done()).content.decode()
    return set(re.findall(r'http_responses_total{.*endpoint="(\w+)"', metrics))


def test_new_endpoint_is_missed_in_files_of_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: Request) -> Response:
        return Response()

    async def scenario(world: MemoryWorld) -> None:
        harness = await GatewayHarness.open(world)
        api: FastAPI = harness.gateway.http
        api.router.add_api_route(DUMMY, answer, methods=["GET"])
        assert (await harness.send("GET", DUMMY).wait_done()).status == 200
        assert "dummies" not in await labels(harness)
        assert failing_file(api.openapi) == "openapi.py"
        described = openapi._OPERATIONS["/v1/models", "get"]
        monkeypatch.setitem(openapi._OPERATIONS, (DUMMY, "get"), described)
        monkeypatch.setitem(middleware._PREFIXES, DUMMY, "dummies")
        assert DUMMY in api.openapi()["paths"]
        await harness.send("GET", DUMMY).wait_done()
        assert "dummies" in await labels(harness)

    run_scenario(scenario)
    assert {"gateway_api.py", "openapi.py", "middleware.py"} <= row_of("an HTTP endpoint")


def test_new_field_of_a_request_is_missed_in_files_of_its_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wider = msgspec.defstruct("Request", [("dummy", str | None, None)], bases=(requests.Request,))
    checks = (
        test_continuation.test_every_option_of_a_request_is_classed,
        test_codecs.test_golden_request_sets_every_field,
    )
    assert [failing_file(check) for check in checks] == [None, None]
    monkeypatch.setattr(test_continuation, "Request", wider)
    monkeypatch.setattr(requests, "Request", wider)
    assert [failing_file(check) for check in checks] == ["test_continuation.py", "test_codecs.py"]
    monkeypatch.setitem(remaining_work.CONTINUATION, "dummy", "unaffected")
    assert failing_file(checks[0]) is None
    row = row_of("a field of a request")
    assert {"request.py", "remaining_work.py", "test_continuation.py", "golden_records.py"} <= row
