"""Tests of stored responses, in virtual time: the history of a conversation, bounds, deletion."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.http.responses import responses_endpoint, stored_responses
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import unpack_tokens
from kvlane.streams.ids import RequestIds
from kvlane.streams.ports import Entry
from kvlane.streams.topics import RESPONSES, RESULTS, partition_of
from kvlane.testing import ScriptedEngine
from tests.flows.test_agents import SCRIPT
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.http_exchange import HttpExchange
from tests.harness.key_files import KeyFileHarness, auth_headers
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

URL = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
REFUSED = "refused"


class Conversation:
    """Gateways with a scripted worker, and a collector."""

    def __init__(self, gateway: GatewayHarness, results: ResultsHarness) -> None:
        self.gateway = gateway
        self.results = results

    @staticmethod
    async def begin(world: MemoryWorld, **over: Any) -> Conversation:
        gateway = await GatewayHarness.open(world, **over)
        await gateway.start_router()
        await gateway.start_worker("w1", "scripted", ScriptedEngine(_answer, context_length=10**6))
        results = ResultsHarness(world)
        await results.start()
        return Conversation(gateway, results)

    async def ask(self, given: Any = "one", **more: Any) -> dict[str, Any]:
        response = await self.post(given, **more)
        assert response.status == 200, response.content
        answer: dict[str, Any] = response.json
        return answer

    async def post(self, given: Any, headers: Any = None, **more: Any) -> HttpExchange:
        body = {"model": "scripted", "input": given, "tools": [TOOL]} | more
        return await self.gateway.send("POST", URL, body, headers).wait_done()

    async def get(self, path: str, method: str = "GET", headers: Any = None) -> HttpExchange:
        return await self.gateway.send(method, f"{URL}/{path}", None, headers).wait_done()

    def last_prompt(self) -> list[int]:
        requests = sorted(self.gateway.requests(), key=lambda request: request.id)
        return list(unpack_tokens(requests[-1].token_ids))


def _answer(message: str) -> str | None:
    return None if message == REFUSED else SCRIPT.get(message, f"So: {message}.")


class FixedClock(SystemClock):
    """A clock that stands."""

    def __init__(self, at_ms: int) -> None:
        self._at_ms = at_ms

    def wall_ms(self) -> int:
        return self._at_ms


def unknown(answer: HttpExchange) -> tuple[int, str]:
    return answer.status, answer.error["code"]


def result_of(call: dict[str, Any], output: str = "rain") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


@pytest.mark.parametrize("carried_bytes", [0, 700, 64 * 1024])
def test_continued_response_has_the_prompt_of_its_whole_history(
    monkeypatch: pytest.MonkeyPatch, carried_bytes: int
) -> None:
    monkeypatch.setattr(stored_responses, "CARRIED_BYTES", carried_bytes)

    @scenario_test
    async def test(world: MemoryWorld) -> None:
        talk, rng = await Conversation.begin(world), random.Random(carried_bytes)
        history: list[Any] = []
        previous: dict[str, Any] = {}
        for turn in range(9):
            calls = [item for item in previous.get("output", ()) if item["type"] == "function_call"]
            given: Any = [result_of(call) for call in calls]
            if not calls or rng.random() < 0.3:
                text = rng.choice(["one", "two", "text", f"turn {turn}", "ü" * 90])
                given = [*given, {"role": "user", "content": text}]
                if not calls and rng.random() < 0.5:
                    given = text
            more = {"instructions": f"Rule {turn}."} if rng.random() < 0.5 else {}
            items = [{"role": "user", "content": given}] if isinstance(given, str) else given
            whole = await talk.ask([*history, *items], store=False, **more)
            sent_in_full = talk.last_prompt()
            linked = {"previous_response_id": previous["id"]} if previous else {}
            previous = await talk.ask(given, **linked, **more)
            assert talk.last_prompt() == sent_in_full
            assert [(i["type"], i.get("content")) for i in whole["output"]] == [
                (i["type"], i.get("content")) for i in previous["output"]
            ]
            history += [*items, *previous["output"]]
        listed = await talk.get(f"{previous['id']}/input_items?order=asc&limit=100")
        kinds = [item.get("type", "message") for item in history[: -len(previous["output"])]]
        assert [item["type"] for item in listed.json["data"]] == kinds
        sizes = [len(json.dumps(r.stored.input)) for r in talk.results.results() if r.stored]  # type: ignore[union-attr]
        assert max(sizes) < carried_bytes + 2500

    test()


@scenario_test
async def test_stored_response_is_that_of_its_answer_after_the_stream_is_gone(
    world: MemoryWorld,
) -> None:
    talk = await Conversation.begin(world)
    answer = await talk.ask("two", metadata={"a": "b"}, instructions="Be brief.")
    failed = await talk.ask("one", max_output_tokens=3)
    await world.sleep(640.0)  # no request of that age can begin
    for lane in range(world.lanes):
        world.broker.delete_records(RESPONSES, lane, before=10**6)
    for known in (answer, failed):
        assert (await talk.get(known["id"])).json == known
    assert answer["store"] is True


@scenario_test
async def test_expired_response_is_unknown(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world)
    seal = talk.gateway.gateway.parts.streams.seal
    old_ms = world.clock.wall_ms() - int(7.01 * 24 * 3_600_000)
    drawn = RequestIds(FixedClock(old_ms), random.Random(1)).new()
    old = seal.tagged(drawn, "", is_stored=True)
    assert unknown(await talk.get(old, "DELETE")) == (404, "response_not_found")
    continued = await talk.post("one", previous_response_id=old)
    assert unknown(continued) == (400, "previous_response_not_found")
    assert "no longer kept" in continued.error["message"]


@scenario_test
async def test_background_response_is_stored_without_its_client_or_gateway(
    world: MemoryWorld,
) -> None:
    talk = await Conversation.begin(world)
    begun = await talk.ask("two", background=True)
    await talk.gateway.ctx.cancel_tasks()
    talk.gateway = await GatewayHarness.open(world, "g2")
    await world.wait_until(lambda: "scripted" in talk.gateway.models())
    answer = await talk.ask("And now?", previous_response_id=begun["id"])
    assert answer["output"][0]["content"][0]["text"] == "So: And now?."
    assert (await talk.get(begun["id"])).json["background"] is True


@scenario_test
async def test_response_that_is_not_stored_cannot_be_continued(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world)
    answer = await talk.ask("one", store=False)
    assert answer["store"] is False
    began_at = world.clock.now()
    for previous in (answer["id"], "x", "01900000-0000-7000-8000-000000000000"):
        continued = await talk.post("one", previous_response_id=previous)
        assert unknown(continued) == (400, "previous_response_not_found")
        assert continued.error["param"] == "previous_response_id"
    assert world.clock.now() == began_at, "nothing is searched for such ids"
    assert talk.results.results() == []
    for path in ("", "/input_items"):
        assert (await talk.get(f"{answer['id']}{path}")).status == (404 if path else 200)
    assert unknown(await talk.get(answer["id"], "DELETE")) == (404, "response_not_found")


@scenario_test
async def test_deleted_response_stays_unknown_and_later_ones_keep_their_history(
    world: MemoryWorld,
) -> None:
    talk = await Conversation.begin(world)
    first = await talk.ask("one")
    second = await talk.ask([result_of(first["output"][-1])], previous_response_id=first["id"])
    deleted = await talk.get(first["id"], "DELETE")
    assert deleted.json == {"id": first["id"], "object": "response", "deleted": True}
    world.broker.compact_all(0)
    talk.gateway = await GatewayHarness.open(world, "g2")
    await world.wait_until(lambda: "scripted" in talk.gateway.models())
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = await talk.get(f"{first['id']}{path}", method)
        assert unknown(answer) == (404, "response_not_found")
    stream = talk.gateway.send("GET", f"/v1/streams/{first['id']}?form=response")
    assert unknown(await stream.wait_done()) == (404, "stream_not_found")
    continued = await talk.post("one", previous_response_id=first["id"])
    assert unknown(continued) == (400, "previous_response_not_found")
    third = await talk.ask("text", previous_response_id=second["id"])
    listed = await talk.get(f"{third['id']}/input_items?order=asc&limit=2")
    assert listed.json["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert listed.json["has_more"] is True
    after = f"&after={listed.json['last_id']}"
    rest = await talk.get(f"{third['id']}/input_items?order=asc{after}")
    assert [item["type"] for item in rest.json["data"]][-3:] == [
        "function_call_output", "message", "message",
    ]  # fmt: skip


@scenario_test
async def test_deletions_of_a_tenant_have_a_bound(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "MAX_DELETIONS", 1)
    talk = await Conversation.begin(world)
    first, second = [await talk.ask("one") for _ in range(2)]
    assert (await talk.get(first["id"], "DELETE")).status == 200
    refused = await talk.get(second["id"], "DELETE")
    assert unknown(refused) == (429, "too_many_deletions")
    assert (await talk.get(second["id"])).json["status"] == "completed"


@scenario_test
async def test_running_response_ends_when_it_is_deleted(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world)
    begun = await talk.ask("two", background=True)
    assert (await talk.get(begun["id"], "DELETE")).status == 200
    assert await talk.gateway.cancelled() == [begun["id"]]


@scenario_test
async def test_response_without_a_collector_is_reported_as_not_stored_yet(
    world: MemoryWorld,
) -> None:
    talk = await Conversation.begin(world)
    await talk.results.kill()
    first = await talk.ask("one")
    continued = await talk.post("one", previous_response_id=first["id"])
    assert unknown(continued) == (503, "response_not_stored_yet")
    assert "retry-after" in continued.headers
    assert (await talk.get(first["id"])).json["store"] is False
    await talk.results.start("c2")
    assert await talk.ask("text", previous_response_id=first["id"])


@scenario_test
async def test_request_that_is_too_large_to_be_stored_says_so(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses_endpoint, "MAX_STORED_BYTES", 500)
        assert (await talk.ask("a" * 500))["store"] is False
        refused = await talk.post("a" * 500, store=True)
    assert (refused.status, refused.error["param"]) == (400, "store")
    talk.gateway = await GatewayHarness.open(world, "g2", results="batch")
    await world.wait_until(lambda: "scripted" in talk.gateway.models())
    assert (await talk.ask("one"))["store"] is False
    refused = await talk.post("one", store=True)
    assert (refused.status, refused.error["param"]) == (400, "store")


@scenario_test
async def test_conversation_longer_than_a_body_is_refused(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world, http_max_body_bytes=4096)
    previous = await talk.ask("a" * 1000)
    for _ in range(9):
        more = await talk.post("a" * 1000, previous_response_id=previous["id"])
        if more.status != 200:
            break
        previous = more.json
    assert unknown(more) == (413, "too_large")
    assert more.error["param"] == "previous_response_id"


@scenario_test
async def test_failed_response_is_not_continued(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world)
    begun = await talk.ask(REFUSED, background=True)
    continued = await talk.post("one", previous_response_id=begun["id"])
    assert (continued.status, continued.error["param"]) == (400, "previous_response_id")
    assert "failed" in continued.error["message"]
    state = (await talk.get(begun["id"])).json
    assert (state["status"], state["error"]["code"]) == ("failed", "invalid")
    assert state["tools"][0]["name"] == "weather"


def test_response_is_that_of_its_tenant(tmp_path: Path) -> None:
    keys = KeyFileHarness(tmp_path)
    token, other = keys.add("acme"), keys.add("other")

    @scenario_test
    async def test(world: MemoryWorld) -> None:
        talk = await Conversation.begin(world, **keys.settings)
        answer = (await talk.post("one", auth_headers(token))).json
        assert (await talk.get(answer["id"], "GET", auth_headers(token))).json == answer
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            refused = await talk.get(f"{answer['id']}{path}", method, auth_headers(other))
            assert refused.status == 404
        refused = await talk.post("one", auth_headers(other), previous_response_id=answer["id"])
        assert unknown(refused) == (400, "previous_response_not_found")

    test()


@scenario_test
async def test_results_of_others_do_not_hide_a_response(world: MemoryWorld) -> None:
    talk = await Conversation.begin(world)
    answer = await talk.ask("one")
    partition = partition_of(answer["id"].encode(), world.broker.partitions[RESULTS])
    await world.wait_until(lambda: bool(talk.results.results()))
    [record] = [r for r in world.records(RESULTS, partition) if r.key == answer["id"].encode()]
    assert json.loads(record.value or b"")["kind"] == "response"
    for number in range(30):
        talk.results.ask(f"job-{number}")
        talk.results.answer(f"job-{number}", "a")
    await world.sleep(5.0)
    assert (await talk.get(answer["id"])).json == answer


@pytest.mark.parametrize("value", [b"{", b'{"stored":{"input":7}}', b'{"stored":5}', b"\xff"])
@scenario_test
async def test_response_whose_record_cannot_be_read_is_unknown(
    world: MemoryWorld, value: bytes
) -> None:
    talk = await Conversation.begin(world)
    await talk.results.kill()
    first = await talk.ask("one")
    key = first["id"].encode()
    partition = partition_of(key, world.broker.partitions[RESULTS])
    world.append_raw(RESULTS, partition, Entry(key, value))
    continued = await talk.post("one", previous_response_id=first["id"])
    assert unknown(continued) == (400, "previous_response_not_found")
    items = await talk.get(f"{first['id']}/input_items")
    assert unknown(items) == (404, "response_not_found")
