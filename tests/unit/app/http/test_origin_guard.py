"""Tests of the origin guard: web pages that a server on loopback answers."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvlane.app.http.server.origin_guard import OriginGuard, OriginRules
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.memory_world import MemoryWorld, scenario_test


def code(
    origin: str | None = None,
    host: str | None = "127.0.0.1:8000",
    listens: str = "127.0.0.1",
    origins: tuple[str, ...] = (),
) -> str:
    headers = {"origin": origin, "host": host}
    given = {name: value for name, value in headers.items() if value is not None}
    wrong = OriginRules(listens, origins).violation(given)
    assert wrong is None or wrong.status == 403
    return "" if wrong is None else wrong.code


def test_page_without_origin_is_refused_also_without_a_host() -> None:
    assert code("null", host=None) == code("null", host="") == "origin_not_allowed"


def test_programs_send_no_origin_and_are_answered() -> None:
    assert code() == ""
    assert code(host=None) == ""


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://127.0.0.1:9000"])
def test_pages_of_other_sites_are_refused(origin: str) -> None:
    assert code(origin) == "origin_not_allowed"
    assert code(origin, listens="0.0.0.0") == "origin_not_allowed"


def test_page_of_the_gateways_own_is_answered() -> None:
    assert code("http://127.0.0.1:8000") == ""
    assert code("https://models.example", host="models.example", listens="::") == ""


def test_pages_that_are_allowed_are_answered() -> None:
    allowed = ("https://app.example", "http://Localhost:3000")
    assert code("https://app.example", origins=allowed) == ""
    assert code("http://localhost:3000", origins=allowed) == ""
    assert code("http://app.example", origins=allowed) == "origin_not_allowed"
    assert code("https://evil.example", origins=("*",)) == ""


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", ""]
)
def test_foreign_host_name_on_loopback_is_refused(host: str) -> None:
    assert code(host=host) == "host_not_allowed"
    assert code(host=host, listens="localhost") == "host_not_allowed"
    assert code(f"http://{host}", host=host)  # whichever of the two is looked at first
    assert code(host=host, listens="0.0.0.0") == ""


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "[::1]:8000", "10.1.0.7",
     "host.docker.internal", "a.localhost"],
)  # fmt: skip
def test_on_loopback_addresses_and_local_names_are_answered(host: str) -> None:
    assert code(host=host) == ""


def test_name_of_a_proxy_is_answered_when_its_origin_is_allowed() -> None:
    assert code(host="models.example") == "host_not_allowed"
    assert code(host="models.example", origins=("https://models.example",)) == ""


async def _hello(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(b"hello")(scope, receive, send)


def guarded(*origins: str) -> ASGIApp:
    return OriginGuard(_hello, host="127.0.0.1", origins=origins)


async def sent(app: ASGIApp, method: str = "GET", **headers: str) -> HttpExchange:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return await HttpExchange(app, method, "/", None, given).wait_done()


@scenario_test
async def test_allowed_origins_are_in_cors_headers(world: MemoryWorld) -> None:
    app = guarded("https://app.example")
    answer = await sent(app, origin="https://app.example")
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    before = await sent(
        app, "OPTIONS", origin="https://app.example", access_control_request_method="POST",
        access_control_request_headers="content-type,authorization",
    )  # fmt: skip
    assert before.status == 200
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "authorization" in before.headers["access-control-allow-headers"]
    refused = await sent(app, origin="https://evil.example")
    assert (refused.status, "access-control-allow-origin" in refused.headers) == (403, False)


@scenario_test
async def test_gateway_refuses_before_it_reads_a_body(world: MemoryWorld) -> None:
    harness = await GatewayHarness.with_card(world)
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        answer = await harness.chat(headers=headers).wait_done()
        assert answer.status == 403
        assert answer.error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"]
    assert harness.requests() == []


@scenario_test
async def test_gateway_allows_the_origins_of_its_setting(world: MemoryWorld) -> None:
    harness = await GatewayHarness.open(
        world, http_allowed_origins="https://app.example, https://b.example"
    )
    await harness.register_and_wait()
    answer = await harness.send(
        "GET", "/v1/models", headers={"origin": "https://b.example"}
    ).wait_done()
    assert answer.status == 200


@pytest.mark.parametrize("wrong", ["app.example", "https://app.example/path", "ws://a"])
def test_malformed_origin_is_refused_as_a_setting(wrong: str) -> None:
    fields: dict[str, Any] = {"http_allowed_origins": wrong}
    with pytest.raises(ValueError, match="without a path"):
        memory_settings(**fields)
