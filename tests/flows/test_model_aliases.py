"""Tests of aliases of models: over HTTP and Kafka, while they change, and by commands."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from typer.testing import CliRunner

from kvlane.app.audit.timeline import explain_request
from kvlane.app.cli import app
from kvlane.app.commands.model_commands import BadAlias, parse_alias
from kvlane.app.preprocess.models.model_aliases import choose_target
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import decode, encode
from kvlane.streams.memory.memory_broker import MemoryBroker
from kvlane.streams.ports import Entry
from kvlane.streams.records import (
    AliasTarget,
    Assigned,
    EngineConfig,
    ModelCard,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.topics import BATCH, LEDGER, PROMPTS, REGISTRY, partition_of
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.memory_commands import connect_commands
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

MODEL_HEADER = "x-kvlane-model"
SWITCHES = 20
EVEN = "chat=llama-a:1,llama-b:1"


def define(world: MemoryWorld, definition: str) -> None:
    found = parse_alias(definition)
    world.append(REGISTRY, 0, found, key=f"alias/{found.name}")


async def two_models(world: MemoryWorld) -> GatewayHarness:
    """A gateway, a router, and a worker for each of two models."""
    house = await GatewayHarness.open(world)
    await house.start_backend("llama-a")
    await house.start_worker("w2", "llama-b")
    return house


async def start_preprocessor(world: MemoryWorld, name: str = "p1") -> Preprocessor:
    ctx = ProcessContext(name, world.clock, random.Random(name))
    preprocessor = Preprocessor(await world.connect(name), memory_settings(), ctx)
    await preprocessor.start()
    return preprocessor


def send_prompt(world: MemoryWorld, name: str, topic: str = PROMPTS, **more: object) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]} | more
    value = json.dumps({"id": name, "body": body, "result": True}).encode()
    partition = partition_of(name.encode(), world.broker.partitions[topic])
    world.append_raw(topic, partition, Entry(name.encode(), value))


def decisions(world: MemoryWorld) -> list[str]:
    """The workers that requests were assigned to."""
    records = map(decode, world.all_records(LEDGER))
    return [record.worker for record in records if isinstance(record, Assigned)]


def of_models(house: GatewayHarness) -> dict[str, str]:
    return {request.id: request.model for request in house.requests()}


@scenario_test
async def test_answer_has_the_alias_and_its_header_the_model(world: MemoryWorld) -> None:
    house = await two_models(world)
    define(world, "chat=llama-b")
    await world.wait_until(lambda: "chat" in house.models())
    plain = await house.chat(model="llama-b").wait_done()
    whole = await house.chat(model="chat").wait_done()
    stream = await house.chat(model="chat", stream=True).wait_done()
    assert (whole.status, whole.json["model"]) == (200, "chat")
    assert whole.json["choices"] == plain.json["choices"]
    assert {event["model"] for event in stream.events[:-1]} == {"chat"}
    assert [each.headers.get(MODEL_HEADER) for each in (plain, whole, stream)] == [
        None, "llama-b", "llama-b",
    ]  # fmt: skip
    aliases = Counter((request.model, request.alias) for request in house.requests())
    assert aliases == {("llama-b", ""): 1, ("llama-b", "chat"): 2}
    url = f"/v1/streams/{stream.headers['x-kvlane-id']}?from=0"
    resumed = await house.send("GET", url).wait_done()
    assert {event["model"] for event in resumed.events[:-1]} == {"chat"}
    log = await world.connect("explain")
    timeline = await explain_request(log, world.clock, whole.headers["x-kvlane-id"])
    asked = next(step.fields for step in timeline.steps if step.name == "Request")
    assert (asked["model"], asked["alias"]) == ("llama-b", "chat")


@scenario_test
async def test_alias_is_listed_while_a_model_of_it_is_served(world: MemoryWorld) -> None:
    house = await GatewayHarness.open(world)
    await house.register_and_wait("llama-a")
    define(world, EVEN)
    await world.wait_until(lambda: "chat" in house.models())
    listed = await house.send("GET", "/v1/models").wait_done()
    one = await house.send("GET", "/v1/models/chat").wait_done()
    assert [model["id"] for model in listed.json["data"]] == ["llama-a", "chat"]
    assert one.json == listed.json["data"][1]
    assert one.json["max_model_len"] == listed.json["data"][0]["max_model_len"]
    world.append(REGISTRY, 0, Tombstone(key="alias/chat"), key="alias/chat")
    await world.wait_until(lambda: house.models() == ["llama-a"])
    gone = await house.chat(model="chat").wait_done()
    assert (gone.status, gone.error["code"]) == (404, "model_not_found")


@scenario_test
async def test_no_request_fails_while_an_alias_changes_20_times(world: MemoryWorld) -> None:
    house = await two_models(world)
    define(world, "chat=llama-a:50,llama-b:50")
    await world.wait_until(lambda: "chat" in house.models())
    answers = []
    for number in range(SWITCHES):
        weight = random.Random(number).randrange(101)
        define(world, f"chat=llama-a:{weight},llama-b:{101 - weight}")
        answers += [house.chat("hi", model="chat", max_tokens=3) for _ in range(10)]
        await world.sleep(0.03)
    for answer in answers:
        await answer.wait_done()
    assert {(answer.status, answer.json["model"]) for answer in answers} == {(200, "chat")}
    recorded = of_models(house)
    served = [answer.headers[MODEL_HEADER] for answer in answers]
    assert served == [recorded[answer.headers["x-kvlane-id"]] for answer in answers]
    assert set(served) == {"llama-a", "llama-b"}


@scenario_test
async def test_switched_alias_is_that_of_the_next_request(world: MemoryWorld) -> None:
    """Moved to the new model, and rolled back by one record."""
    house = await two_models(world)
    served = []
    for definition in ("chat=llama-a", "chat=llama-b:100,llama-a:0", "chat=llama-a"):
        define(world, definition)
        await world.sleep(0.5)
        served.append((await house.chat(model="chat").wait_done()).headers[MODEL_HEADER])
    assert served == ["llama-a", "llama-b", "llama-a"]


@scenario_test
async def test_new_version_serves_under_the_name_of_the_model(world: MemoryWorld) -> None:
    """Clients name the model all the time; Kafka prompts follow the same rule."""
    house = await two_models(world)
    await start_preprocessor(world)
    served = []
    for number, definition in enumerate(("", "llama-a=llama-b", "llama-a=llama-a:1,llama-b:0")):
        if definition:
            define(world, definition)
            await world.sleep(0.5)
        answer = await house.chat(model="llama-a").wait_done()
        send_prompt(world, f"p{number}", model="llama-a")
        await house.published(2 * number + 2)
        assert answer.json["model"] == "llama-a"
        of_prompt = of_models(house)[f"p{number}"]
        served.append((answer.headers.get(MODEL_HEADER, "llama-a"), of_prompt))
    assert served == [("llama-a",) * 2, ("llama-b",) * 2, ("llama-a",) * 2]
    assert house.models() == ["llama-a", "llama-b"]


@scenario_test
async def test_session_and_user_stay_with_one_model(world: MemoryWorld) -> None:
    house = await GatewayHarness.open(world)
    for model in ("llama-a", "llama-b"):
        await house.register_and_wait(model, name=f"w-{model}")
    define(world, EVEN)
    await world.wait_until(lambda: "chat" in house.models())
    for number in range(12):
        for _ in range(3):
            house.chat(model="chat", headers={"x-session-id": f"s{number}"})
            house.chat(model="chat", user=f"u{number}")
    requests = await house.published(72)
    by_session: dict[str, set[str]] = {}
    for request in requests:
        if (session := request.hints.session_control) is not None:
            by_session.setdefault(session.session_id, set()).add(request.model)
    assert {len(models) for models in by_session.values()} == {1}
    assert set.union(*by_session.values()) == {"llama-a", "llama-b"}
    users = Counter(request.model for request in requests if request.hints.session_control is None)
    assert all(count % 3 == 0 for count in users.values()), users


@scenario_test
async def test_answers_to_one_request_are_of_one_model(world: MemoryWorld) -> None:
    house = await two_models(world)
    define(world, EVEN)
    await world.wait_until(lambda: "chat" in house.models())
    for _ in range(8):
        answer = await house.chat(model="chat", n=4, max_tokens=2).wait_done()
        recorded = of_models(house)
        ids = answer.headers["x-kvlane-id"].split(",")
        assert {recorded[each] for each in ids} == {answer.headers[MODEL_HEADER]}
        chosen = choose_target("chat", parse_alias(EVEN).targets, f"id\0{ids[0]}")
        assert answer.headers[MODEL_HEADER] == chosen, "the log tells the choice"


@scenario_test
async def test_conversation_stays_with_the_model_of_its_first_response(world: MemoryWorld) -> None:
    house = await two_models(world)
    await ResultsHarness(world).start()
    define(world, EVEN)
    await world.wait_until(lambda: "chat" in house.models())
    first_models = set()
    for _ in range(8):
        served, previous = set(), {}
        for _ in range(3):
            body = {"model": "chat", "input": "hi", "max_output_tokens": 2, **previous}
            answer = await house.send("POST", "/v1/responses", body).wait_done()
            assert answer.json["model"] == "chat"
            served.add(answer.headers[MODEL_HEADER])
            previous = {"previous_response_id": answer.json["id"]}
        assert len(served) == 1
        first_models |= served
    assert first_models == {"llama-a", "llama-b"}


@scenario_test
async def test_failed_answer_is_continued_by_its_model(world: MemoryWorld) -> None:
    house = await two_models(world)
    await house.start_worker("w3", "llama-a", worker_timeout_s=2.0)
    define(world, "chat=llama-a")
    await world.wait_until(lambda: "chat" in house.models())
    running = house.chat("x" * 200, model="chat", stream=True)
    await world.wait_until(lambda: len(running.text) > 20)
    define(world, "chat=llama-b")
    (first,) = decisions(world)
    await house.kill(first)
    await running.wait_done()
    assert running.text.count("x") == 200
    assert sorted(decisions(world)) == ["w1", "w3"]
    assert {event["model"] for event in running.events[:-1]} == {"chat"}


@scenario_test
async def test_prompt_that_is_read_again_gets_the_same_model(world: MemoryWorld) -> None:
    """Two preprocessors read it, as after a crash; the gateway's choice is the same."""
    house = await GatewayHarness.open(world)
    for model in ("llama-a", "llama-b"):
        await house.register_and_wait(model, name=f"w-{model}")
    define(world, EVEN)
    await world.wait_until(lambda: "chat" in house.models())
    first = await start_preprocessor(world)
    for number in range(20):
        send_prompt(world, f"p{number}")
        send_prompt(world, f"s{number}", nvext={"session_control": {"session_id": str(number)}})
    await house.published(40)
    await first.stop()
    before = of_models(house)
    for number in range(20):
        send_prompt(world, f"p{number}")
        house.chat(model="chat", headers={"x-session-id": str(number)})
    await start_preprocessor(world, "p2")
    requests = await house.published(80)
    assert Counter(request.id for request in requests)["p0"] == 2, "both are on the log"
    assert set(before.values()) == {"llama-a", "llama-b"}
    for request in requests:
        session = request.hints.session_control
        name = request.id if session is None else f"s{session.session_id}"
        assert (request.model, request.alias) == (before[name], "chat")


@pytest.mark.parametrize("topic", [PROMPTS, BATCH])
@scenario_test
async def test_result_of_a_prompt_names_the_alias(world: MemoryWorld, topic: str) -> None:
    house = await two_models(world)
    await start_preprocessor(world)
    results = ResultsHarness(world)
    await results.start()
    define(world, "chat=llama-b")
    await world.wait_until(lambda: "chat" in house.models())
    send_prompt(world, "p", topic)
    await world.wait_until(lambda: bool(results.results()))
    (result,) = results.results()
    assert result.model == "chat", result
    assert result.body is not None
    assert result.body["model"] == "chat"
    (request,) = house.requests()
    assert (request.model, request.alias) == ("llama-b", "chat")


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("chat", "does not name an alias"),
        ("=a", "does not name an alias"),
        ("chat=", "does not name an alias"),
        ("chat=a:1,", "does not name an alias"),
        ("chat=a:1,b", "'b' has no weight"),
        ("chat=a:-1", "the weight of 'a' is -1"),
        ("chat=a:1000001", "give 0 to 1000000"),
        ("chat=a:0,b:0", "a weight above 0"),
        ("chat=a:1,a:2", "given twice"),
        ("ch\udcff=a", "cannot be printed"),
        ("chat\n=a", "cannot be printed"),
        (f"chat={'m' * 201}", "more than 200 characters"),
        (f"chat={','.join(f'm{n}:1' for n in range(101))}", "at most 100"),
    ],
)
def test_wrong_definition_is_named(definition: str, words: str) -> None:
    with pytest.raises(BadAlias, match=words):
        parse_alias(definition)


def test_colon_without_a_number_belongs_to_the_model() -> None:
    assert parse_alias("chat=qwen:7b").targets == (AliasTarget(model="qwen:7b", weight=1),)
    assert parse_alias("chat=qwen:7b:20,org/m:80").targets == (
        AliasTarget(model="qwen:7b", weight=20), AliasTarget(model="org/m", weight=80),
    )  # fmt: skip


def test_commands_define_show_and_remove_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = connect_commands(MemoryBroker(SystemClock()), monkeypatch)
    cards = [WorkerCard(id=f"w{m}", slot=0, model=m, config=EngineConfig(model=m)) for m in "ab"]
    for card in cards:
        broker.append(REGISTRY, 0, [encode(card, f"worker/{card.id}")])
    broker.append(REGISTRY, 0, [encode(ModelCard(name="c", kind="chat"), "model/c")])

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["models", *words])
        return result.exit_code, result.output

    for wrong, words in (
        ("chat=chat", "no model 'chat' is known"),
        ("chat=nobody", "no model 'nobody' is known"),
        ("chat=a:1,c:1", "different kinds: chat, tokens"),
    ):
        code, output = run("alias", wrong)
        assert code == 1
        assert words in output
    code, output = run("alias", "chat=a:90,b:10")
    assert code == 0
    assert "chat is served by a 90.0%, b 10.0%" in output
    assert "a has no worker that takes requests now" in output
    for wrong, words in (
        ("other=chat", "'chat' is an alias"),
        ("other=a:1,chat:1", "'chat' is an alias"),
    ):
        code, output = run("alias", wrong)
        assert (code, words in output) == (1, True)
    code, output = run("--json", "-")
    assert [row["share"] for row in json.loads(output)["aliases"]] == [0.0, 0.0], output
    assert "chat" in run()[1]
    assert run("unalias", "chat") == (0, "the alias chat is removed\n")
    assert run("unalias", "chat") == (0, "there is no alias chat\n")
    assert run("alias", "a=a:90,b:10")[0] == 0
    assert run("unalias", "a") == (0, "the alias a is removed: requests for it go to the model a\n")
    assert [decode(raw) for raw in broker.records(REGISTRY, 0)][3:] == [
        parse_alias("chat=a:90,b:10"),
        Tombstone(key="alias/chat"),
        parse_alias("a=a:90,b:10"),
        Tombstone(key="alias/a"),
    ]
