"""Tests of the preprocessor on the log in memory: prompts become requests."""

from __future__ import annotations

import json
import random
from typing import Any, TypeVar

import pytest

from kvlane.app.preprocess.models.artifacts import ArtifactStore
from kvlane.app.preprocess.models.model import publish_files as publish_model
from kvlane.app.preprocess.models.model_folder import DEMO_MODEL_FOLDER, read_folder
from kvlane.app.preprocess.text.tokenizer import Tokenizer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.settings import Settings
from kvlane.app.text.byte_level import render_chat
from kvlane.streams.codecs import AnyRecord, decode, pack_tokens, unpack_tokens
from kvlane.streams.memory.memory_broker import AppendFate
from kvlane.streams.ports import Entry
from kvlane.streams.records import (
    Artifact,
    Cancel,
    EngineConfig,
    ModelCard,
    Refused,
    Tombstone,
    WorkerCard,
)
from kvlane.streams.request import Request
from kvlane.streams.topics import DEAD_LETTERS, PROMPTS, REGISTRY, REQUESTS, lane_of, partition_of
from tests.harness.memory_world import MemoryWorld, scenario_test

R = TypeVar("R", bound=AnyRecord)
TOKENIZER = Tokenizer((DEMO_MODEL_FOLDER / "tokenizer.json").read_bytes(), InlinePool())


async def begin(
    world: MemoryWorld, name: str = "p1", *, models: bool = True, **over: Any
) -> tuple[Preprocessor, ProcessContext]:
    """A preprocessor; `models`: of a deployment that serves a model of bytes."""
    if models and not world.all_records(REGISTRY):
        serve(world, "m")
    ids = {"worker_id": "-", "router_id": "-"}
    nowhere = ids | {"cache_dir": "/dev/null/cache", "status_port": None}
    ctx = ProcessContext(name, world.clock, random.Random(1))
    preprocessor = Preprocessor(
        await world.connect(name), Settings(**(nowhere | over)), ctx, InlinePool()
    )
    await preprocessor.start()
    return preprocessor, ctx


def serve(world: MemoryWorld, model: str, context: int | None = None, **engine: Any) -> None:
    config = EngineConfig(model=model, context_length=context, **engine)
    card = WorkerCard(id=f"w-{model}", slot=0, model=model, config=config)
    world.append(REGISTRY, 0, card, key=f"worker/{card.id}")


async def serve_demo(world: MemoryWorld, name: str = "demo", context: int = 512) -> ModelCard:
    """The demo model, with its files in the log."""
    artifacts = ArtifactStore(await world.connect("publisher"), world.clock, InlinePool(), None)
    card = await publish_model(
        name, read_folder(DEMO_MODEL_FOLDER), artifacts, context_length=context
    )
    world.append(REGISTRY, 0, card, key=f"model/{name}")
    serve(world, name, context)
    return card


def publish(world: MemoryWorld, key: bytes | None, value: bytes | None) -> None:
    partition = 0 if key is None else partition_of(key, world.broker.partitions[PROMPTS])
    world.append_raw(PROMPTS, partition, Entry(key, value))


def send(world: MemoryWorld, request_id: str, text: str = "hi", **fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    prompt = {"id": request_id, "body": body} | fields
    publish(world, request_id.encode(), json.dumps(prompt).encode())


def sent(world: MemoryWorld, kind: type[R]) -> list[R]:
    return [r for r in map(decode, world.all_records(REQUESTS)) if isinstance(r, kind)]


@scenario_test
async def test_prompt_becomes_a_request_in_the_lane_of_its_id(world: MemoryWorld) -> None:
    await begin(world)
    send(world, "a")
    await world.wait_until(lambda: bool(sent(world, Request)))
    (record,) = world.records(REQUESTS, lane_of("a", world.lanes))
    assert record.key == b"a"
    request = decode(record)
    assert isinstance(request, Request)
    assert request.token_ids == pack_tokens(render_chat([("user", "hi")]))
    assert request.received_ms == world.all_records(PROMPTS)[0].timestamp


@scenario_test
async def test_cancel_stays_behind_its_request(world: MemoryWorld) -> None:
    for n in range(50):
        send(world, f"r{n}")
        send(world, f"r{n}", kind="cancel")
    await begin(world)
    await world.wait_until(lambda: len(sent(world, Cancel)) == 50)
    for n in range(50):
        lane = [decode(r) for r in world.all_records(REQUESTS) if r.key == f"r{n}".encode()]
        assert [type(r) for r in lane] == [Request, Cancel]


@scenario_test
async def test_bad_prompts_are_answered_and_stop_nothing(world: MemoryWorld) -> None:
    await begin(world)
    publish(world, b"b1", b'{"id":"b1","body":{"messages":[]}}')
    publish(world, b"b2", b"not json")
    publish(world, b"b3", b"\xff\xfe")
    publish(world, b"b4", None)
    publish(world, None, b"nobody")
    publish(world, b"\xff", b"{}")
    send(world, "good")
    await world.wait_until(
        lambda: bool(sent(world, Request)) and len(world.all_records(DEAD_LETTERS)) == 5
    )
    await world.sleep(5)
    refused = {r.id: r for r in sent(world, Refused)}
    assert sorted(refused) == ["b1", "b2", "b3", "b4"]
    assert {r.code for r in refused.values()} == {"invalid"}
    assert "body.messages" in refused["b1"].message
    assert [r.id for r in sent(world, Request)] == ["good"]
    dead_letters = world.all_records(DEAD_LETTERS)
    assert sorted(letter.key or b"" for letter in dead_letters) == [
        b"",
        b"b2",
        b"b3",
        b"b4",
        b"\xff",
    ]
    assert {dict(letter.headers)["origin_topic"] for letter in dead_letters} == {PROMPTS.encode()}
    reasons = {letter.key: dict(letter.headers)["reason"] or b"" for letter in dead_letters}
    assert b"JSON" in reasons[b"b2"]


@scenario_test
async def test_dead_letters_are_redacted_unless_content_is_kept(world: MemoryWorld) -> None:
    await begin(world)
    publish(world, None, b"private")
    await world.wait_until(lambda: len(world.all_records(DEAD_LETTERS)) == 1)
    assert b"private" not in (world.all_records(DEAD_LETTERS)[0].value or b"")


@scenario_test
async def test_features_that_the_engine_lacks_are_refused_by_their_field(
    world: MemoryWorld,
) -> None:
    serve(world, "m", unsupported=("guided_decoding", "logprobs"))
    await begin(world)
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    send(world, "a", body=messages | {"logprobs": True})
    send(world, "b", body=messages | {"response_format": {"type": "json_object"}})
    await world.wait_until(lambda: len(sent(world, Refused)) == 2)
    got = {r.id: r.message for r in sent(world, Refused)}
    assert got["a"].startswith("body.logprobs: the engine of this model")
    assert got["b"].startswith("body.response_format: the engine of worker w-m")


@scenario_test
async def test_context_of_the_served_model_is_used_from_the_start(world: MemoryWorld) -> None:
    serve(world, "m", 10)
    await begin(world)
    send(world, "a", "x" * 20)
    await world.wait_until(lambda: bool(sent(world, Refused)))
    assert "the prompt has 22 " in sent(world, Refused)[0].message
    assert "length is 10 tokens" in sent(world, Refused)[0].message


@scenario_test
async def test_prompts_are_rendered_and_tokenised_by_their_model(world: MemoryWorld) -> None:
    card = await serve_demo(world)
    await begin(world)
    send(world, "a", "how are you?")
    await world.wait_until(lambda: bool(sent(world, Request)))
    (request,) = sent(world, Request)
    tokens = unpack_tokens(request.token_ids)
    text = TOKENIZER.decode(tokens, skip_special=False)
    assert text == "<|user|>how are you?<|end|><|assistant|>"
    assert (request.model, request.mdc_sum) == ("demo", card.checksum)
    assert request.stop.max_tokens == 512 - len(tokens)
    assert request.eos_token_ids == card.eos_token_ids


@scenario_test
async def test_each_model_prepares_its_own_prompts(world: MemoryWorld) -> None:
    await serve_demo(world)
    serve(world, "bytes")
    await begin(world)
    for model in ("demo", "bytes", "other", ""):
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        prompt = {"id": f"for {model}", "body": body}
        publish(world, prompt["id"].encode(), json.dumps(prompt).encode())  # type: ignore[attr-defined]
    await world.wait_until(lambda: len(world.all_records(REQUESTS)) == 4)
    tokens = {r.model: list(unpack_tokens(r.token_ids)) for r in sent(world, Request)}
    assert tokens["bytes"] == render_chat([("user", "hello")])
    assert TOKENIZER.decode(tokens["demo"]) == "hello"
    refused = {r.id: r for r in sent(world, Refused)}
    unknown, unnamed = refused["for other"], refused["for "]
    assert (unknown.code, unnamed.code) == ("model_not_found", "invalid")
    assert unknown.message.startswith("body.model: the model 'other' does not exist; available: ")
    assert unnamed.message.startswith("body.model: is needed")


@scenario_test
async def test_prompts_wait_until_there_is_a_model(world: MemoryWorld) -> None:
    await begin(world, models=False)
    send(world, "a")
    await world.sleep(20)
    assert not world.all_records(REQUESTS)
    await serve_demo(world)
    await world.wait_until(lambda: bool(sent(world, Request)))
    assert sent(world, Request)[0].model == "demo"


@scenario_test
async def test_later_model_is_recognised(world: MemoryWorld) -> None:
    await begin(world)
    await serve_demo(world)
    await world.sleep(1)
    send(world, "a", body={"model": "demo", "messages": [{"role": "user", "content": "x"}]})
    await world.wait_until(lambda: bool(sent(world, Request)))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("named", [False, True])
@scenario_test
async def test_prompt_for_a_model_whose_only_worker_restarts_is_accepted(
    world: MemoryWorld, restarted: bool, named: bool
) -> None:
    serve(world, "m", 512)
    if not restarted:
        await begin(world, models=False)
    await world.sleep(1.0)
    world.append(REGISTRY, 0, Tombstone(key="worker/w-m"), key="worker/w-m")
    if restarted:  # it knows what was there from the registry's past
        await begin(world, models=False)
        serve(world, "other")
        world.append(REGISTRY, 0, Tombstone(key="worker/w-other"), key="worker/w-other")
    await world.sleep(1.0)
    body = {"messages": [{"role": "user", "content": "hi"}]} | ({"model": "m"} if named else {})
    send(world, "a", body=body)
    if restarted and not named:  # there were two
        await world.wait_until(lambda: bool(sent(world, Refused)))
    else:
        await world.wait_until(lambda: bool(sent(world, Request)))
        assert sent(world, Request)[0].model in ("m", "")


@scenario_test
async def test_departed_model_is_no_candidate_for_an_unnamed_prompt(world: MemoryWorld) -> None:
    serve(world, "old")
    await begin(world, models=False)
    await world.sleep(1.0)
    world.append(REGISTRY, 0, Tombstone(key="worker/w-old"), key="worker/w-old")
    serve(world, "new")
    await world.sleep(1.0)
    send(world, "a")
    await world.wait_until(lambda: bool(sent(world, Request)))
    assert sent(world, Request)[0].model == "new"


@scenario_test
async def test_model_without_its_files_is_refused_and_others_continue(world: MemoryWorld) -> None:
    missing = ModelCard(name="broken", tokenizer=Artifact(sha256="0" * 64, size=9), checksum="x")
    world.append(REGISTRY, 0, missing, key="model/broken")
    serve(world, "m")
    await begin(world)
    for model in ("broken", "m"):
        send(world, model, body={"model": model, "prompt": "x"}, kind="completion")
    await world.wait_until(lambda: len(world.all_records(REQUESTS)) == 2)
    (refused,) = sent(world, Refused)
    assert (refused.id, refused.code) == ("broken", "internal")


@scenario_test
async def test_files_unreadable_in_an_outage_are_awaited(world: MemoryWorld) -> None:
    await serve_demo(world)
    preprocessor, ctx = await begin(world)
    world.faults.unanswered.add("offsets")
    preprocessor._loader._loads.clear()
    send(world, "a")
    await world.sleep(60)
    assert ctx.error is None
    assert not world.all_records(REQUESTS)
    world.faults.unanswered.clear()
    await world.wait_until(lambda: bool(sent(world, Request)))


@scenario_test
async def test_request_too_large_for_a_record_is_refused(world: MemoryWorld) -> None:
    await begin(world)
    send(world, "a", "x" * 3_000_000)  # four bytes a token
    await world.wait_until(lambda: bool(sent(world, Refused)))
    assert sent(world, Refused)[0].code == "too_large"


@scenario_test
async def test_committed_prompts_are_not_read_again(world: MemoryWorld) -> None:
    first, ctx = await begin(world)
    send(world, "a")
    await world.wait_until(lambda: bool(sent(world, Request)))
    await world.sleep(1)
    await first.stop()
    await ctx.cancel_tasks()
    await begin(world, "p2")
    send(world, "b")
    await world.wait_until(lambda: len(sent(world, Request)) == 2)
    await world.sleep(5)
    assert sorted(r.id for r in sent(world, Request)) == ["a", "b"]


@scenario_test
async def test_reading_continues_while_commits_are_unanswered(world: MemoryWorld) -> None:
    await begin(world)
    send(world, "a")
    await world.wait_until(lambda: bool(sent(world, Request)))
    world.faults.unanswered = {"commit"}
    begun = world.clock.now()
    for n in range(4):
        send(world, f"r{n}")
        await world.wait_until(lambda: f"r{n}" in {r.id for r in sent(world, Request)})  # noqa: B023
    assert world.clock.now() - begun < 4


@scenario_test
async def test_accumulated_prompts_of_a_lane_are_published_in_one_batch(world: MemoryWorld) -> None:
    serve(world, "m")
    lanes = world.broker.partitions[REQUESTS]
    ids = [name for n in range(40 * lanes) if lane_of(name := f"r{n}", lanes) == 0]
    for name in ids:
        send(world, name)
    world.faults.next_fates(REQUESTS, AppendFate.UNREPORTED)
    await begin(world)
    await world.wait_until(lambda: len(sent(world, Request)) == 2 * len(ids))
    found = [request.id for request in sent(world, Request)]
    assert found == 2 * found[: len(ids)]


@scenario_test
async def test_batch_beyond_the_size_limit_is_published_in_parts(world: MemoryWorld) -> None:
    serve(world, "m")
    lanes = world.broker.partitions[REQUESTS]
    ids = [name for n in range(9 * lanes) if lane_of(name := f"r{n}", lanes) == 0]
    for name in ids:
        send(world, name, "x" * 100_000)
    await begin(world)
    await world.wait_until(lambda: len(sent(world, Request)) == len(ids))
    assert {r.id for r in sent(world, Request)} == set(ids)


@scenario_test
async def test_unacknowledged_prompts_are_read_again_by_the_next_owner(world: MemoryWorld) -> None:
    first, ctx = await begin(world)
    world.faults.next_fates(REQUESTS, *[AppendFate.LOST] * 10**4)
    send(world, "a")
    await world.sleep(10)
    await first.stop()
    await ctx.cancel_tasks()
    world.faults.fates.clear()
    assert not sent(world, Request)
    await begin(world, "p2")
    await world.wait_until(lambda: [r.id for r in sent(world, Request)] == ["a"])


@scenario_test
async def test_two_share_the_prompts_and_take_over_from_each_other(world: MemoryWorld) -> None:
    first, ctx = await begin(world, "p1")
    await begin(world, "p2")
    await world.sleep(5)
    for n in range(40):
        send(world, f"r{n}")
    await world.wait_until(lambda: len(sent(world, Request)) == 40)
    await first.stop()
    await ctx.cancel_tasks()
    for n in range(40, 80):
        send(world, f"r{n}")
    await world.wait_until(lambda: len({r.id for r in sent(world, Request)}) == 80)


@scenario_test
async def test_lost_append_is_repeated(world: MemoryWorld) -> None:
    await begin(world)
    world.faults.next_fates(REQUESTS, AppendFate.LOST, AppendFate.UNREPORTED)
    send(world, "a")
    await world.wait_until(lambda: len(sent(world, Request)) == 2)
