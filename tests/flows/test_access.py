"""Tests of API keys at the gateway, on the log in memory: rights, tenants and limits."""

from __future__ import annotations

import logging
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from kvlane.app.access import key_file
from kvlane.app.access.key_file import KeyFile, KeyFileError
from kvlane.app.access.quota import LIMIT_NAMES
from kvlane.app.gateway import Gateway
from kvlane.app.http.server.authentication import AccessControl, Authentication
from kvlane.app.indexer import Indexer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.router import Router
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings, SettingsError
from kvlane.streams.codecs import decode, unpack_tokens
from kvlane.streams.record_base import ModelKind
from kvlane.streams.records import ModelCard, RequestUsage
from kvlane.streams.request import Request
from kvlane.streams.topics import REGISTRY, REQUESTS, USAGE
from tests.flows.test_gateway_models import publish_model
from tests.harness.cluster_harness import BLOCK, ClusterHarness, session_hint
from tests.harness.gateway_harness import CONTEXT, GatewayHarness, memory_settings
from tests.harness.http_exchange import HttpExchange
from tests.harness.key_files import KeyFileHarness, auth_headers, start_guarded
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.tenant_times import CountingLibrary

DRY = {"annotations": ["query_instance_id:x"]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def keys(tmp_path: Path) -> KeyFileHarness:
    return KeyFileHarness(tmp_path)


def refusal(answer: HttpExchange) -> tuple[int, str]:
    return answer.status, answer.error["code"]


def cached(answer: HttpExchange) -> int:
    tokens: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


# --- who is let in --------------------------------------------------------------------------------


@scenario_test
async def test_without_a_valid_key_all_but_probes_and_docs_is_refused(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    good = keys.add("acme")
    revoked = keys.add("acme")
    keys.revoke(revoked)
    expired = keys.add("acme", expires=datetime.fromtimestamp(1, UTC))
    wrong = (
        {}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": good},
        {"authorization": f"Basic {good}"}, auth_headers(good + "x"), auth_headers(revoked),
        auth_headers(expired),
        {"x-api-key": "kvl_no"}, {"x-api-key": good, "authorization": "Bearer"},
        {"authorization": f"Bearer kvl_{'0' * 12}_{'A' * 43}"},
    )  # fmt: skip
    harness = await GatewayHarness.with_card(world, **keys.settings)
    for headers in wrong:
        for method, path in (
            ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/streams/a"),
            ("GET", "/metrics"), ("DELETE", "/v1/streams/a"),
            ("GET", "/nowhere"), ("GET", "/docs/nowhere"),
        ):  # fmt: skip
            answer = await harness.send(method, path, headers=headers).wait_done()
            assert refusal(answer) == (401, "invalid_api_key")
            assert answer.error["type"] == "invalid_request_error"
            assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/livez", "/readyz", "/openapi.json", "/docs"):
        assert (await harness.send("GET", path).wait_done()).status == 200
    for headers in (
        {"authorization": f"Bearer {good}"},
        {"authorization": f"bearer {good}"},
        {"x-api-key": good},
    ):
        assert (await harness.send("GET", "/v1/models", headers=headers).wait_done()).status == 200


@scenario_test
async def test_request_without_a_key_is_refused_before_its_body_is_sent(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    harness = await GatewayHarness.open(world, **keys.settings)
    answer = HttpExchange(harness.gateway.http, "POST", CHAT, upload=False)
    assert refusal(await answer.wait_done()) == (401, "invalid_api_key")
    assert world.clock.now() == 0


@scenario_test
async def test_changed_file_is_applied_within_two_seconds(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    first = keys.add("acme")
    harness = await GatewayHarness.open(world, **keys.settings)

    async def status(token: str) -> int:
        return (
            await harness.send("GET", "/v1/models", headers=auth_headers(token)).wait_done()
        ).status

    second = keys.add("acme")
    assert [await status(first), await status(second)] == [200, 401]
    await world.sleep(2)
    assert [await status(first), await status(second)] == [200, 200]
    keys.revoke(first)
    await world.sleep(2)
    assert [await status(first), await status(second)] == [401, 200]
    keys.change(KeyFile())
    await world.sleep(2)
    assert [await status(first), await status(second)] == [401, 401]


@scenario_test
async def test_key_that_is_revoked_while_the_gateway_waits_for_its_broker_is_refused_from_the_start(
    world: MemoryWorld, keys: KeyFileHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, start = keys.add("acme"), Gateway.open

    async def revoke_and_start(gateway: Gateway) -> None:
        keys.revoke(token)
        await start(gateway)

    monkeypatch.setattr(Gateway, "open", revoke_and_start)
    harness = await GatewayHarness.open(world, **keys.settings)
    answer = harness.send("GET", "/v1/models", headers=auth_headers(token))
    assert refusal(await answer.wait_done()) == (401, "invalid_api_key")


@pytest.mark.parametrize("damage", ["{", "{}{}", None])
@scenario_test
async def test_file_that_cannot_be_read_leaves_the_keys_and_is_logged_once(
    world: MemoryWorld, keys: KeyFileHarness, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    good = keys.add("acme")
    harness = await GatewayHarness.open(world, **keys.settings)
    if damage is None:
        keys.path.unlink()
    else:
        keys.path.write_text(damage)
    await world.sleep(10)
    answer = await harness.send("GET", "/v1/models", headers=auth_headers(good)).wait_done()
    assert answer.status == 200
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith(f"keeping the previous API keys: {keys.path}")
    keys.change(KeyFile())
    await world.sleep(2)
    answer = await harness.send("GET", "/v1/models", headers=auth_headers(good)).wait_done()
    assert answer.status == 401


@scenario_test
async def test_running_stream_of_a_revoked_key_continues(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    answer = harness.chat("hello", auth_headers(token), stream=True, max_tokens=300)
    await world.wait_until(lambda: len(answer.text) > 3)
    keys.revoke(token)
    await world.sleep(2)
    assert not answer.complete
    await answer.wait_done()
    assert answer.events[-1] == "[DONE]"


@scenario_test
async def test_authenticated_request_is_passed_on_without_its_key(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    access = AccessControl(memory_settings(**keys.settings), ProcessContext("p", world.clock))
    await HttpExchange(
        Authentication(app, access), "GET", "/x", headers=auth_headers(token)
    ).wait_done()
    (scope,) = seen
    assert token not in repr(scope)
    assert b"authorization" not in dict(scope["headers"])


# --- roles ----------------------------------------------------------------------------------------


@scenario_test
async def test_each_role_has_its_rights(world: MemoryWorld, keys: KeyFileHarness) -> None:
    tokens = {
        "user": keys.add("acme"),
        "operator": keys.add("acme", "operator"),
        "metrics": keys.add("acme", "metrics"),
    }
    forbidden = (403, "permission_denied")
    cluster = await start_guarded(world, keys)
    ctx = ProcessContext("i1", world.clock, random.Random(1))
    indexer = Indexer(
        await world.connect("i1"), memory_settings(**keys.settings), ctx, InlinePool()
    )
    await indexer.open()

    async def outcome(app: Any, role: str, method: str, path: str, body: Any = None) -> Any:
        answer = await HttpExchange(app, method, path, body, auth_headers(tokens[role])).wait_done()
        return answer.status if answer.status < 400 else refusal(answer)

    gateway = cluster.gateway.http
    query = {"token_ids": [1, 2, 3]}
    rights: list[tuple[Any, str, str, Any, set[str]]] = [
        (gateway, "GET", "/v1/models", None, {"user", "operator"}),
        (gateway, "GET", "/metrics", None, {"operator", "metrics"}),
        (gateway, "POST", "/v1/completions", _prompt(), {"user", "operator"}),
        (gateway, "POST", "/v1/completions", _prompt(nvext=DRY), {"operator"}),
        (indexer.http, "POST", "/query", query, {"operator"}),
        (indexer.http, "POST", "/query_by_hash", {"block_hashes": []}, {"operator"}),
        (indexer.http, "GET", "/dump", None, {"operator"}),
        (indexer.http, "GET", "/workers", None, {"operator"}),
        (indexer.http, "GET", "/metrics", None, {"operator", "metrics"}),
    ]
    for app, method, path, body, roles in rights:
        for role in tokens:
            got = await outcome(app, role, method, path, body)
            assert got == (200 if role in roles else forbidden), (path, role)
    assert refusal(await HttpExchange(indexer.http, "GET", "/dump").wait_done())[0] == 401


@scenario_test
async def test_metrics_can_be_public(world: MemoryWorld, keys: KeyFileHarness) -> None:
    harness = await GatewayHarness.open(world, **keys.settings, metrics_allow_anonymous=True)
    assert (await harness.send("GET", "/metrics").wait_done()).status == 200
    assert (await harness.send("GET", "/v1/models").wait_done()).status == 401


# --- tenants --------------------------------------------------------------------------------------


def _prompt(**over: Any) -> dict[str, Any]:
    prompt = "".join(chr(97 + n % 26) for n in range(8 * BLOCK))
    return {"model": "demo", "prompt": prompt, "max_tokens": 2} | over


@scenario_test
async def test_tenants_share_no_cached_blocks(world: MemoryWorld, keys: KeyFileHarness) -> None:
    """What one has asked shows neither in the usage nor in the dry runs of another."""
    ours, theirs = keys.add("acme"), keys.add("globex")
    operator = keys.add("globex", "operator")
    cluster = await start_guarded(world, keys)

    async def tokens(token: str, **over: Any) -> int:
        body = _prompt(**over)
        answer = await cluster.send(
            "POST", "/v1/completions", body, auth_headers(token)
        ).wait_done()
        await world.sleep(1)
        return cached(answer)

    assert await tokens(ours) == 0
    assert await tokens(ours) == 8 * BLOCK
    assert await tokens(operator, nvext=DRY) == 0
    assert await tokens(theirs) == 0
    assert await tokens(theirs) == 8 * BLOCK
    assert await tokens(operator, nvext=DRY) == 8 * BLOCK
    for salt in _salts(world):
        assert await tokens(theirs, cache_salt=salt) == 0
        assert await tokens(operator, cache_salt=salt, nvext=DRY) == 8 * BLOCK
    assert await tokens(ours, cache_salt="mine") == 0
    assert await tokens(ours, cache_salt="mine") == 8 * BLOCK
    assert await tokens(theirs, cache_salt="mine") == 0


@scenario_test
async def test_operator_queries_the_indexer_for_the_prompts_of_a_tenant(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    user, operator = keys.add("acme"), keys.add("platform", "operator")
    cluster = await start_guarded(world, keys)
    for salt in ("", "mine"):
        body = _prompt(cache_salt=salt)
        assert (
            await cluster.send("POST", "/v1/completions", body, auth_headers(user)).wait_done()
        ).status == 200
    await world.sleep(1)
    tokens = list(unpack_tokens(cluster.requests()[0].token_ids))
    ctx = ProcessContext("i1", world.clock, random.Random(1))
    indexer = Indexer(
        await world.connect("i1"), memory_settings(**keys.settings), ctx, InlinePool()
    )
    await indexer.open()

    async def blocks(**over: Any) -> list[int]:
        body = {"token_ids": tokens, "model": "demo"} | over
        answer = await HttpExchange(
            indexer.http, "POST", "/query", body, auth_headers(operator)
        ).wait_done()
        return [holder["blocks"] for holder in answer.json["holders"]]

    assert await blocks() == await blocks(tenant="globex") == []
    assert await blocks(tenant="acme") == await blocks(tenant="acme", cache_salt="mine") == [8]
    assert await blocks(tenant="acme", cache_salt="other") == []


def _salts(world: MemoryWorld) -> set[str]:
    """All salts on the log: a tenant that knows them wins nothing."""
    requests = [decode(r) for r in world.all_records(REQUESTS)]
    salts = {r.cache_salt for r in requests if isinstance(r, Request)}
    assert len(salts) == 2
    assert all(len(salt) == 32 for salt in salts)
    return salts


@scenario_test
async def test_tenants_that_are_to_share_blocks_do(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    tokens = [keys.add(name) for name in ("acme", "globex", "alone")]
    for name in ("acme", "globex"):
        keys.limit(name, share_cache=True)
    cluster = await start_guarded(world, keys)
    counts = []
    for token in tokens:
        answer = await cluster.send(
            "POST", "/v1/completions", _prompt(), auth_headers(token)
        ).wait_done()
        counts.append(cached(answer))
        await world.sleep(1)
    assert counts == [0, 8 * BLOCK, 0]


@pytest.mark.parametrize(("shares", "is_found"), [(False, False), (True, True)])
@scenario_test
async def test_text_of_another_tenant_costs_the_gateway_as_much_as_a_new_one(
    world: MemoryWorld, keys: KeyFileHarness, *, shares: bool, is_found: bool
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex")
    for name in ("acme", "globex"):
        keys.limit(name, share_cache=shares)
    harness = await GatewayHarness.open(world, **keys.settings)
    await publish_model(world)
    await harness.register_and_wait()
    (load,) = harness.gateway._library._loader._loads.values()
    await world.wait_until(load.done)
    library = CountingLibrary(load.result())
    sent, fresh = (f"{word} " * 100 for word in ("merger", "orchid"))
    costs = []
    for token, text in ((ours, sent), (theirs, sent), (theirs, fresh)):
        library.chars = 0
        answer = harness.chat(text, auth_headers(token), max_tokens=10**6)
        assert refusal(await answer.wait_done()) == (400, "context_length_exceeded")
        costs.append(library.chars)
    assert costs[0] == costs[2]
    assert (costs[1] < costs[2]) == is_found


@scenario_test
async def test_streams_of_another_tenant_are_not_found(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex")
    boss = keys.add("globex", "operator")
    harness = await GatewayHarness.open(world, **keys.settings)
    other = await GatewayHarness.open(world, "g2", **keys.settings)
    await harness.start_backend()
    answer = harness.chat("hello", auth_headers(ours), stream=True, max_tokens=400)
    await world.wait_until(lambda: len(answer.text) > 3)
    name = answer.headers["x-kvlane-id"]
    for at in (harness, other):
        for token in (theirs, boss):
            for method in ("GET", "DELETE"):
                refused = await at.send(
                    method, f"/v1/streams/{name}", None, auth_headers(token)
                ).wait_done()
                assert refusal(refused) == (404, "stream_not_found")
    assert harness.cancels() == []
    whole = other.send("GET", f"/v1/streams/{name}", None, auth_headers(keys.add("acme")))
    assert refusal(await whole.wait_done()) == (401, "invalid_api_key")
    await world.sleep(2)
    again = other.send("GET", f"/v1/streams/{name}", None, auth_headers(keys.tokens[-1]))
    await world.wait_until(lambda: len(again.text) > 3)
    ended = await other.send("DELETE", f"/v1/streams/{name}", None, auth_headers(ours)).wait_done()
    assert ended.status == 202
    await answer.wait_done()
    assert answer.events[-2]["error"]["code"] == "cancelled"
    (request,) = harness.requests()
    assert request.tenant == "acme"


@scenario_test
async def test_ids_of_kafka_clients_belong_to_no_tenant_over_http(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    harness = await GatewayHarness.open(world, **keys.settings)
    harness.end_request("job-1", "stop")
    answer = await harness.send("GET", "/v1/streams/job-1", None, auth_headers(token)).wait_done()
    assert refusal(answer) == (404, "stream_not_found")


@scenario_test
async def test_sessions_and_classes_are_the_tenants(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex")
    boss = keys.add("acme", "operator")
    keys.limit("acme", queue_class="batch")
    cluster = await start_guarded(world, keys)
    for token in (ours, theirs):
        assert (
            await cluster.complete_with(auth_headers(token), None, **session_hint("s")).wait_done()
        ).status == 200
    first, second = cluster.requests()
    ids = [r.hints.session_control.session_id for r in (first, second)]  # type: ignore[union-attr]
    assert ids == ["acme/s", "globex/s"]
    assert [r.hints.queue_class for r in (first, second)] == ["batch", None]
    for token, name, status in (
        (ours, "batch", 200), (ours, "gold", 403), (theirs, "batch", 403), (boss, "gold", 200),
    ):  # fmt: skip
        answer = await cluster.complete_with(
            auth_headers(token, **{"x-queue-class": name})
        ).wait_done()
        assert answer.status == status


# --- limits ---------------------------------------------------------------------------------------


@scenario_test
async def test_requests_in_flight_are_limited_by_tenant(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, same, theirs = keys.add("acme"), keys.add("acme"), keys.add("globex")
    keys.limit("acme", requests=2)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    running = [harness.chat("hello", auth_headers(each), stream=True) for each in (ours, same)]
    await world.wait_until(lambda: all(answer.text for answer in running))
    for token in (ours, same):
        refused = await harness.chat("hello", auth_headers(token)).wait_done()
        assert refusal(refused) == (429, "rate_limit_exceeded")
        assert refused.error["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
    assert (await harness.chat("hello", auth_headers(theirs)).wait_done()).status == 200
    running[0].disconnect()
    await running[0].task
    assert (await harness.chat("hello", auth_headers(ours)).wait_done()).status == 200
    await running[1].wait_done()


@scenario_test
async def test_refusals_are_counted_by_limit_and_logged_once_a_minute_for_each_tenant(
    world: MemoryWorld, keys: KeyFileHarness, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [keys.add("acme"), keys.add("globex")]
    keys.limit("acme", requests=0)
    keys.limit("globex", tokens=1)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    for wait_s in (0, 0, 61):
        await world.sleep(wait_s)
        for token in tokens:
            refused = await harness.chat("hello", auth_headers(token)).wait_done()
            assert refusal(refused) == (429, "rate_limit_exceeded")
    lines = [line for line in caplog.messages if line.startswith("refused a request")]
    assert [line.split(":")[0] for line in lines] == [
        "refused a request of tenant acme, limit requests",
        "refused a request of tenant globex, limit tokens",
    ] * 2
    headers = auth_headers(keys.add("ops", "operator"))
    await world.sleep(2)
    page = (await harness.send("GET", "/metrics", headers=headers).wait_done()).content.decode()
    found = re.findall(
        r'^kvlane_gateway_refused_requests_total{limit="(.*)"} (.*)$', page, re.MULTILINE
    )
    assert dict(found) == dict.fromkeys(LIMIT_NAMES, "0.0") | {"requests": "3.0", "tokens": "3.0"}


@scenario_test
async def test_client_that_never_sends_its_body_releases_its_place(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", requests=1, tokens=400)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    slow = HttpExchange(harness.gateway.http, "POST", CHAT, None, auth_headers(token), upload=False)
    await world.sleep(1)
    assert refusal(await harness.chat("hello", auth_headers(token)).wait_done())[0] == 429
    slow.disconnect()
    await slow.task
    for bad in (b"{", b"{}", b'{"model": "none", "messages": []}'):
        assert (await harness.send("POST", CHAT, bad, auth_headers(token)).wait_done()).status in (
            400,
            404,
        )
    for _ in range(3):
        ok = await harness.chat("hello", auth_headers(token), max_tokens=50).wait_done()
        assert ok.status == 200, ok.content


@scenario_test
async def test_tokens_in_flight_are_limited(world: MemoryWorld, keys: KeyFileHarness) -> None:
    token = keys.add("acme")
    keys.limit("acme", tokens=120)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    answer = harness.chat("hello", auth_headers(token), stream=True, max_tokens=80)
    await world.wait_until(lambda: bool(answer.text))
    refused = await harness.chat("hello", auth_headers(token), max_tokens=80).wait_done()
    assert refusal(refused) == (429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    never = await harness.chat("hello", auth_headers(token), max_tokens=300).wait_done()
    assert refusal(never) == (429, "rate_limit_exceeded")
    assert "retry-after" not in never.headers
    await answer.wait_done()
    assert (
        await harness.chat("hello", auth_headers(token), max_tokens=80).wait_done()
    ).status == 200


@scenario_test
async def test_answer_without_a_limit_counts_as_the_rest_of_the_context(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", tokens=CONTEXT - 1)
    harness = await GatewayHarness.open(world, **keys.settings)
    kinds: dict[str, ModelKind] = {"demo": "chat", "vectors": "embedding"}
    for model, kind in kinds.items():
        card = ModelCard(name=model, kind=kind)
        world.append(REGISTRY, 0, card, key=f"model/{model}")
        await harness.register_and_wait(model, name=f"worker of {model}")
    refused = await harness.chat("hello", auth_headers(token)).wait_done()
    assert refusal(refused) == (429, "rate_limit_exceeded")
    limited = harness.chat("hello", auth_headers(token), max_tokens=8)
    body = {"model": "vectors", "input": "hello"}
    embedding = harness.send("POST", "/v1/embeddings", body, auth_headers(token))
    assert {r.model for r in await harness.published(2)} == {"demo", "vectors"}
    for each in (limited, embedding):
        each.disconnect()


@scenario_test
async def test_rate_limits_are_enforced_and_in_headers(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", requests_per_minute=2, tokens_per_minute=100_000)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    first = await harness.chat("hello", auth_headers(token), max_tokens=3).wait_done()
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "100000"
    await harness.chat("hello", auth_headers(token), max_tokens=3).wait_done()
    refused = await harness.chat("hello", auth_headers(token), max_tokens=3).wait_done()
    assert refusal(refused) == (429, "rate_limit_exceeded")
    wait_s = int(refused.headers["retry-after"])
    assert 25 < wait_s <= 30
    await world.sleep(wait_s)
    last = await harness.chat("hello", auth_headers(token), max_tokens=3).wait_done()
    assert last.status == 200
    used = sum(first.json["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
    assert int(first.headers["x-ratelimit-remaining-tokens"]) > 100_000 - used


@scenario_test
async def test_tokens_of_answers_count_towards_the_rate(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", tokens_per_minute=60)
    harness = await GatewayHarness.with_backend(world, **keys.settings)

    async def complete(prompt: str) -> HttpExchange:
        body = {"model": "demo", "prompt": prompt}
        return await harness.send("POST", "/v1/completions", body, auth_headers(token)).wait_done()

    first = await complete("a" * 40)
    assert first.status == 200
    used = first.json["usage"]["total_tokens"]
    assert used > 60
    refused = await complete("a")
    assert refusal(refused) == (429, "rate_limit_exceeded")
    await world.sleep(int(refused.headers["retry-after"]))
    assert (await complete("a")).status == 200


async def detached_answer(harness: GatewayHarness, text: str, token: str) -> HttpExchange:
    """A stream whose client disconnects after the first text, without cancelling the request."""
    headers = auth_headers(token, **{"x-kvlane-detach": "true"})
    answer = harness.chat(text, headers, stream=True)
    await harness.world.wait_until(lambda: bool(answer.text))
    answer.disconnect()
    return answer


@scenario_test
async def test_detached_request_counts_until_it_ends_without_its_client(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", requests=1)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    text = "hello there, this is long enough to take a while"
    answer = await detached_answer(harness, text, token)
    await world.sleep(0.1)
    assert refusal(await harness.chat("hello", auth_headers(token)).wait_done())[0] == 429
    name = answer.headers["x-kvlane-id"]
    again = await harness.send("GET", f"/v1/streams/{name}", None, auth_headers(token)).wait_done()
    assert again.text == text
    assert (await harness.chat("hello", auth_headers(token)).wait_done()).status == 200
    assert harness.cancels() == []


@scenario_test
async def test_response_in_the_background_counts_until_it_ends_and_is_its_tenants(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token, other = keys.add("acme"), keys.add("other")
    keys.limit("acme", requests=1)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    text = "hello there, this is long enough to take a while"
    body = {"model": "demo", "input": text, "background": True}
    begun = harness.send("POST", "/v1/responses", body, auth_headers(token))
    await world.wait_until(lambda: bool(begun.content))
    assert begun.json["status"] == "queued"
    assert refusal(await harness.chat("hello", auth_headers(token)).wait_done())[0] == 429
    await begun.wait_done()
    url = f"/v1/responses/{begun.json['id']}"
    state = await harness.send("GET", url, None, auth_headers(token)).wait_done()
    assert state.json["output"][0]["content"][0]["text"] == text
    assert (await harness.chat("hello", auth_headers(token)).wait_done()).status == 200
    assert harness.cancels() == []
    for method, path in (("GET", url), ("POST", f"{url}/cancel")):
        answer = await harness.send(method, path, None, auth_headers(other)).wait_done()
        assert refusal(answer) == (404, "stream_not_found")


@scenario_test
async def test_detached_request_counts_towards_the_rate_without_its_client(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", tokens_per_minute=60)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    await detached_answer(harness, "hello there, this is an answer", token)
    await world.sleep(5)
    assert harness.gateway.parts.streams.open_streams == 0
    assert refusal(await harness.chat("hello", auth_headers(token)).wait_done())[0] == 429


@scenario_test
async def test_used_budget_refuses_every_kind_of_request_until_it_begins_anew(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token, other = keys.add("acme"), keys.add("globex")
    keys.limit("acme", tokens_per_day=10, tokens_per_month=10**6)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    first = await harness.chat("hello", auth_headers(token)).wait_done()
    assert first.status == 200
    used = sum(first.json["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
    assert used >= 10
    chat = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: chat,
        "/v1/messages": chat,
        "/v1/completions": {"model": "demo", "prompt": "a", "max_tokens": 3},
        "/v1/responses": {"model": "demo", "input": "a", "max_output_tokens": 3},
        "/v1/batches": {},
    }
    left_s = 86_400 - world.clock.wall_ms() % 86_400_000 // 1000
    for path, body in bodies.items():
        refused = await harness.send("POST", path, body, auth_headers(token)).wait_done()
        assert refused.status == 429, path
        assert left_s - 60 <= int(refused.headers["retry-after"]) <= left_s
        message = refused.json["error"]["message"]
        assert "its 10 tokens a day (tokens_per_day): they begin anew at" in message
        if path != "/v1/messages":
            assert refused.error["code"] == "insufficient_quota"
    assert (await harness.chat("hello", auth_headers(other)).wait_done()).status == 200
    request_id = first.headers["x-kvlane-id"]
    usage = RequestUsage(
        id=request_id, code="stop", ended_ms=world.clock.wall_ms(), tenant="acme",
        prompt_tokens=used,
    )  # fmt: skip
    world.append(USAGE, 0, usage, key=request_id)
    await world.sleep(left_s - 60)
    assert refusal(await harness.chat("a", auth_headers(token)).wait_done())[0] == 429
    await world.sleep(61)
    assert (await harness.chat("a", auth_headers(token), max_tokens=3).wait_done()).status == 200


@scenario_test
async def test_used_budget_refuses_embeddings(world: MemoryWorld, keys: KeyFileHarness) -> None:
    token = keys.add("acme")
    keys.change(key_file.read_key_file(keys.path).with_defaults({"tokens_per_month": 5}))
    harness = await GatewayHarness.open(world, **keys.settings)
    world.append(REGISTRY, 0, ModelCard(name="vectors", kind="embedding"), key="model/vectors")
    await harness.register_and_wait("vectors", name="w1")
    usage = RequestUsage(
        id="r", code="stop", ended_ms=world.clock.wall_ms(), tenant="acme", prompt_tokens=5
    )
    world.append(USAGE, 0, usage, key="r")
    await world.sleep(2)
    body = {"model": "vectors", "input": "hello"}
    refused = await harness.send("POST", "/v1/embeddings", body, auth_headers(token)).wait_done()
    assert refusal(refused) == (429, "insufficient_quota")
    assert "tokens_per_month" in refused.error["message"]


@scenario_test
async def test_monthly_budget_needs_the_usage_of_a_month(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    keys.add("acme")
    keys.limit("acme", tokens_per_month=5)
    with pytest.raises(KeyFileError, match="set KVLANE_USAGE_RETENTION_S to 2764800 at least"):
        await GatewayHarness.open(world, **keys.settings, usage_retention_s=31 * 86_400)


@scenario_test
async def test_readers_of_streams_are_limited(world: MemoryWorld, keys: KeyFileHarness) -> None:
    token = keys.add("acme")
    keys.limit("acme", requests=1)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    answer = harness.chat("hello" * 20, auth_headers(token), stream=True)
    await world.wait_until(lambda: bool(answer.text))
    url = f"/v1/streams/{answer.headers['x-kvlane-id']}"
    reader = harness.send("GET", url, None, auth_headers(token))
    await world.wait_until(lambda: bool(reader.text))
    assert refusal(await harness.send("GET", url, None, auth_headers(token)).wait_done())[0] == 429
    await reader.wait_done()
    await answer.wait_done()
    assert (
        await harness.send("GET", url, None, auth_headers(token)).wait_done()
    ).text == "hello" * 20


@scenario_test
async def test_new_limits_apply_as_soon_as_they_are_read(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    assert (await harness.chat("hello", auth_headers(token)).wait_done()).status == 200
    keys.limit("acme", requests=0)
    await world.sleep(2)
    assert refusal(await harness.chat("hello", auth_headers(token)).wait_done())[0] == 429


@scenario_test
async def test_requests_in_flight_still_count_after_a_reload_of_the_key_file(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", requests=1)
    harness = await GatewayHarness.with_backend(world, **keys.settings)
    answer = harness.chat("hello" * 30, auth_headers(token), stream=True)
    await world.wait_until(lambda: bool(answer.text))
    keys.add("globex")
    await world.sleep(1.5)
    assert not answer.complete
    assert refusal(await harness.chat("hello", auth_headers(token)).wait_done())[0] == 429
    await answer.wait_done()
    assert (await harness.chat("hello", auth_headers(token)).wait_done()).status == 200


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Gateway, Indexer])
@scenario_test
async def test_without_keys_only_loopback_is_served(
    world: MemoryWorld, build: Any, keys: KeyFileHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvlane.app")

    async def begin(**over: Any) -> str:
        caplog.clear()
        ctx = ProcessContext("p", world.clock, random.Random(1))
        part = build(await world.connect("p"), memory_settings(**over), ctx, pool=InlinePool())
        await part.open()
        return caplog.text

    far: dict[str, Any] = {"http_host": "0.0.0.0", "stream_secret": "s"}
    with pytest.raises(SettingsError, match="without API keys: set KVLANE_API_KEYS_FILE"):
        await begin(**far)
    assert "open to all on this machine" in await begin()
    assert "no API keys: HTTP on 0.0.0.0 is open to all" in await begin(
        **far, http_allow_anonymous=True
    )
    assert "0 API keys in" in await begin(**keys.settings)
    assert "clear text" in await begin(**(far | keys.settings))


@scenario_test
async def test_router_that_other_machines_reach_needs_keys_for_its_port(world: MemoryWorld) -> None:
    for over in ({"status_port": 0}, {}):
        ctx = ProcessContext("r", world.clock, random.Random(1))
        settings = memory_settings(http_host="0.0.0.0", **over)
        router = Router(await world.connect("r"), settings, ctx)
        if over:
            with pytest.raises(SettingsError, match="without API keys"):
                await router.start()
        else:
            await router.start()


@scenario_test
async def test_keys_need_a_secret_and_a_file(
    world: MemoryWorld, keys: KeyFileHarness, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="KVLANE_API_KEYS_FILE needs KVLANE_STREAM_SECRET"):
        Settings(api_keys_file=keys.path).tenant_tag()
    with pytest.raises(KeyFileError, match="no such file"):
        await GatewayHarness.open(world, api_keys_file=tmp_path / "none.json", stream_secret="s")


@scenario_test
async def test_gateway_without_keys_requires_no_authentication(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    cluster = await ClusterHarness.start(world, ("w1",))
    answer = await cluster.complete_with(
        auth_headers("kvl_what_ever"), **DRY, cache_salt="mine"
    ).wait_done()
    assert answer.status == 200
    (request,) = cluster.requests()
    assert (request.tenant, request.cache_salt) == ("", "mine")


@scenario_test
async def test_key_expires_while_a_gateway_runs(world: MemoryWorld, keys: KeyFileHarness) -> None:
    now = datetime.fromtimestamp(world.clock.wall_ms() / 1000, UTC)
    token = keys.add("acme", expires=now + timedelta(seconds=10))
    harness = await GatewayHarness.open(world, **keys.settings)
    for status in (200, 401):
        answer = await harness.send("GET", "/v1/models", headers=auth_headers(token)).wait_done()
        assert answer.status == status
        await world.sleep(10)
