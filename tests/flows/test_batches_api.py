"""Tests of the Batch API on the log in memory: a gateway, runners that die, and a simulated
fleet."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.batches.job_prompts import WINDOW, JobPrompts
from kvlane.app.batches.job_run import GRACE_S, JobRun
from kvlane.streams.codecs import decode
from kvlane.streams.errors import BrokerUnavailable
from kvlane.streams.memory.memory_log import MemoryLog, MemoryReader
from kvlane.streams.record_types.batch_records import BatchJob
from kvlane.streams.topics import BATCH, BATCH_JOBS, FILE_PARTS, FILE_RETENTION_MS
from tests.harness.batch_harness import CHATS, BatchHarness, chat_line, jsonl
from tests.harness.gateway_harness import GatewayHarness
from tests.harness.key_files import KeyFileHarness, auth_headers
from tests.harness.memory_world import MemoryWorld, scenario_test
from workbench.testing.virtual_time import VirtualClock

HOUR_S = 3600


@pytest.fixture
def keys(tmp_path: Path) -> KeyFileHarness:
    return KeyFileHarness(tmp_path)


def names(count: int) -> list[str]:
    return [f"line-{n}" for n in range(count)]


def input_of(count: int) -> bytes:
    return jsonl(*(chat_line(name) for name in names(count)))


def readers(log: MemoryLog) -> set[object]:
    """The open readers of a process."""
    return {user for user in log._users if isinstance(user, MemoryReader)}


async def check_files(
    harness: BatchHarness, batch: dict[str, Any], count: int, token: str = ""
) -> None:
    """Each of `count` lines is in one of the two files, once, and the counts are theirs."""
    done = await harness.lines(batch["output_file_id"], token)
    failed = await harness.lines(batch["error_file_id"], token)
    assert sorted(x["custom_id"] for x in done + failed) == sorted(names(count))
    assert batch["request_counts"] == {
        "total": count,
        "completed": len(done),
        "failed": len(failed),
    }


# --- a batch --------------------------------------------------------------------------------------


@scenario_test
async def test_each_line_gets_its_answer(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.failing = {"line-3"}
    harness.fleet.delay_s = 3.0
    batch_id = await harness.submit(input_of(10), metadata={"job": "nightly"})
    batch = await harness.ended(batch_id)
    assert (batch["status"], batch["object"]) == ("completed", "batch")
    assert batch["metadata"] == {"job": "nightly"}
    assert batch["errors"] is None
    assert batch["expires_at"] - batch["created_at"] == 24 * HOUR_S
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"]
    assert batch["finalizing_at"] <= batch["completed_at"]
    await check_files(harness, batch, 10)
    done = {line["custom_id"]: line for line in await harness.lines(batch["output_file_id"])}
    line = done["line-7"]
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert line["response"]["body"] == {"object": "chat.completion", "text": "line-7"}
    assert line["id"] == f"batch_req_{line['response']['request_id']}"
    (failed,) = await harness.lines(batch["error_file_id"])
    assert failed["custom_id"] == "line-3"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["message"] == "no"
    file = (await harness.send("GET", f"/v1/files/{batch['output_file_id']}")).json
    assert file["purpose"] == "batch_output"
    assert file["filename"] == f"{batch_id}_output.jsonl"
    assert file["created_at"] == batch["in_progress_at"] < batch["finalizing_at"]


@scenario_test
async def test_prompts_name_their_batch_and_have_its_deadline(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    batch_id = await harness.submit(input_of(2), completion_window="90m")
    await harness.ended(batch_id)
    prompts = {p["custom_id"]: p for p in harness.fleet.prompts.values()}
    prompt = prompts["line-1"]
    assert prompt["batch_id"] == batch_id
    assert prompt["body"] == chat_line("line-1")["body"]
    assert 5390 <= prompt["deadline_s"] <= 5400


@scenario_test
async def test_null_in_an_optional_field_of_a_batch_is_not_given(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world)
    batch_id = await harness.submit(input_of(1), completion_window=None, metadata=None)
    batch = (await harness.send("GET", f"/v1/batches/{batch_id}")).json
    assert (batch["completion_window"], batch["metadata"]) == ("24h", None)
    assert batch["expires_at"] - batch["created_at"] == 24 * HOUR_S


@scenario_test
async def test_blank_lines_and_any_line_ends_are_accepted(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    first, last = (json.dumps(chat_line(name)).encode() for name in names(2))
    content = b"\xef\xbb\xbf\r\n\n" + first + b"\r\n \n\n" + last
    batch = await harness.ended(await harness.submit(content))
    assert batch["status"] == "completed", batch["errors"]
    await check_files(harness, batch, 2)


@scenario_test
async def test_line_that_is_nested_too_deep_fails_alone(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    lines = [json.dumps(chat_line(name)).encode() for name in names(3)]
    lines[1] = lines[1].replace(b'"model"', b'"metadata": %s, "model"' % (b"[" * 300 + b"]" * 300))
    batch = await harness.ended(await harness.submit(b"\n".join(lines)))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2)
    (failed,) = await harness.lines(batch["error_file_id"])
    assert (failed["custom_id"], failed["error"]["code"]) == ("line-1", "invalid_request")
    assert "nested too deep" in failed["error"]["message"]


@scenario_test
async def test_progress_counts_are_updated_once_a_second(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    allowed = 0
    harness.fleet.answers = lambda name: int(name.partition("-")[2]) < allowed
    batch_id = await harness.submit(input_of(100))
    seen = []
    for step in range(1, 11):
        allowed = 10 * step
        await world.sleep(2)
        seen.append((await harness.batch(batch_id))["request_counts"]["completed"])
    assert seen[:-1] == sorted(set(seen[:-1]))
    batch = await harness.ended(batch_id)
    await check_files(harness, batch, 100)
    puts = [r for r in world.all_records(BATCH_JOBS) if r.key == f"batch/{batch_id}".encode()]
    assert len(puts) < 30


@scenario_test
async def test_prompts_under_way_are_bounded(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = lambda _: False
    count = 2 * WINDOW + 500
    batch_id = await harness.submit(input_of(count))
    await world.sleep(20)
    assert WINDOW <= harness.fleet.seen <= WINDOW + 100
    assert (await harness.batch(batch_id))["request_counts"]["total"] == count
    harness.fleet.answers = lambda _: True
    batch = await harness.ended(batch_id)
    await check_files(harness, batch, count)
    assert harness.fleet.seen == count


# --- errors of the input --------------------------------------------------------------------------


@scenario_test
async def test_invalid_input_fails_with_the_numbers_of_its_lines(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    good = jsonl(chat_line("a"))
    content = b"".join(
        [
            good,
            b"\n",
            b"{no json}\n",
            b'"text"\n',
            jsonl(chat_line("b", url="/v1/embeddings")),
            jsonl(chat_line("c", method="GET")),
            good,
            jsonl({"custom_id": "d", "url": CHATS}),
            jsonl(chat_line("e", body={"messages": []})),
            jsonl(chat_line("f", body={"model": "demo", "stream": True})),
            jsonl(chat_line("g", body={"model": "demo", "nvext": {}})),
            b'{"custom_id": "\xff"}\n',
            jsonl(chat_line("")),
        ]
    )
    batch = await harness.ended(await harness.submit(content))
    assert batch["status"] == "failed"
    assert batch["output_file_id"] is batch["error_file_id"] is None
    assert batch["failed_at"]
    errors = [(e["line"], e["code"]) for e in batch["errors"]["data"]]
    assert errors == [
        (3, "invalid_json_line"), (4, "invalid_request"), (5, "mismatched_url"),
        (6, "invalid_method"), (7, "duplicate_custom_id"), (8, "invalid_request"),
        (9, "missing_required_parameter"), (10, "unsupported_parameter"),
        (11, "unsupported_parameter"), (12, "invalid_json_line"), (13, "invalid_request"),
    ]  # fmt: skip
    assert world.all_records(BATCH) == []


@pytest.mark.parametrize(("content", "code"), [(b"", "empty_file"), (b"\n \r\n", "empty_file")])
@scenario_test
async def test_input_without_lines_fails(world: MemoryWorld, content: bytes, code: str) -> None:
    harness = await BatchHarness.open(world, "r1")
    batch = await harness.ended(await harness.submit(content))
    assert [e["code"] for e in batch["errors"]["data"]] == [code]


@scenario_test
async def test_input_with_too_many_lines_fails(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1", batch_max_lines=10)
    batch = await harness.ended(await harness.submit(input_of(11)))
    assert [e["code"] for e in batch["errors"]["data"]] == ["too_many_requests"]
    assert (await harness.ended(await harness.submit(input_of(10))))["status"] == "completed"


@pytest.mark.parametrize(
    ("over", "param"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-x"}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
@scenario_test
async def test_wrong_batch_is_refused(world: MemoryWorld, over: dict[str, Any], param: str) -> None:
    harness = await BatchHarness.open(world)
    body = {"input_file_id": await harness.upload(input_of(1)), "endpoint": CHATS} | over
    answer = await harness.send("POST", "/v1/batches", body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.content
    del body["input_file_id"]
    answer = await harness.send("POST", "/v1/batches", body)
    assert answer.status == 400


# --- cancel and expiry ----------------------------------------------------------------------------


@scenario_test
async def test_file_that_expires_within_the_window_is_no_input(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world)
    body = {"input_file_id": await harness.upload(input_of(1)), "endpoint": CHATS}
    later = VirtualClock(world.clock._loop, ahead_ms=FILE_RETENTION_MS - 12 * HOUR_S * 1000)
    other = await GatewayHarness.open(world, "g2", later)
    for window, status in (("24h", 400), ("11h", 200)):
        answer = other.send("POST", "/v1/batches", body | {"completion_window": window})
        await answer.wait_done()
        assert answer.status == status
        assert status == 200 or answer.error["code"] == "file_expires"


@scenario_test
async def test_cancelled_batch_keeps_its_finished_lines(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = lambda name: int(name.partition("-")[2]) < 300
    count = WINDOW + 800
    batch_id = await harness.submit(input_of(count))
    await world.sleep(5)
    answer = await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    assert (answer.status, answer.json["status"]) == (200, "cancelling")
    assert answer.json["cancelling_at"]
    again = await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    assert again.status == 200
    batch = await harness.ended(batch_id)
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    await check_files(harness, batch, count)
    done = await harness.lines(batch["output_file_id"])
    assert len(done) == 300
    codes = [x["error"]["code"] for x in await harness.lines(batch["error_file_id"]) if x["error"]]
    assert set(codes) == {"batch_cancelled"}
    assert harness.fleet.cancelled
    assert (await harness.send("POST", f"/v1/batches/{batch_id}/cancel")).status == 200


@scenario_test
async def test_cancelled_batch_whose_prompts_are_all_published_is_cancelled(
    world: MemoryWorld,
) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = lambda name: name == "line-1"
    batch_id = await harness.submit(input_of(10))
    await world.sleep(5)
    await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    batch = await harness.ended(batch_id)
    assert batch["status"] == "cancelled"
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    assert len(harness.fleet.cancelled) == 9
    await check_files(harness, batch, 10)


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
@pytest.mark.parametrize("step", ["_finish", "_add_file"])
@scenario_test
async def test_interrupted_end_is_repeated_identically(
    world: MemoryWorld, ending: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the lines of the requests that were not run are written."""
    original = getattr(JobRun, step)
    interrupted: list[str] = []

    async def once_interrupted(run: JobRun, *args: Any) -> Any:
        if not interrupted:
            interrupted.append(step)
            raise BrokerUnavailable("an outage")
        return await original(run, *args)

    monkeypatch.setattr(JobRun, step, once_interrupted)
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = lambda name: name == "line-1"
    batch_id = await harness.submit(input_of(10), completion_window="1m")
    await world.sleep(5)
    if ending == "cancelled":
        await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    batch = await harness.ended(batch_id, within_s=60 + 2 * GRACE_S + 10)
    assert interrupted
    assert batch["status"] == ending
    await check_files(harness, batch, 10)


@scenario_test
async def test_completed_batch_cannot_be_cancelled(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    batch_id = await harness.submit(input_of(1))
    await harness.ended(batch_id)
    answer = await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    assert (answer.status, answer.error["code"]) == (409, "batch_ended")


@scenario_test
async def test_batch_expires_with_a_line_for_each_request(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = lambda name: name == "line-1"
    batch_id = await harness.submit(input_of(5), completion_window="1m")
    batch = await harness.ended(batch_id, within_s=60 + GRACE_S + 10)
    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["expires_at"]
    await check_files(harness, batch, 5)
    errors = await harness.lines(batch["error_file_id"])
    assert {x["error"]["code"] for x in errors} == {"batch_expired"}
    assert all(x["response"] is None for x in errors)


@scenario_test
async def test_batch_that_expired_without_a_runner_ends_with_the_next_one(
    world: MemoryWorld,
) -> None:
    harness = await BatchHarness.open(world)
    batch_id = await harness.submit(input_of(3), completion_window="1m")
    await world.sleep(100)
    await harness.start_runner("r1")
    batch = await harness.ended(batch_id)
    assert batch["status"] == "expired"
    await check_files(harness, batch, 3)


# --- runners that die -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@scenario_test
async def test_killed_runners_leave_one_line_for_each_request(
    world: MemoryWorld, seed: int
) -> None:
    """Whenever they die: while they validate, publish, write or finalize."""
    harness = await BatchHarness.open(world, "r0")
    harness.fleet.delay_s = 0.2
    rng = random.Random(seed)
    allowed = 0
    harness.fleet.answers = lambda name: int(name.partition("-")[2]) < allowed
    count = 700
    batch_id = await harness.submit(input_of(count))
    for n in range(8):
        await world.sleep(rng.choice((0.0, 0.01, 0.05, 0.3, 1.2, 3.0)))
        allowed += rng.randrange(150)
        await harness.kill(f"r{n}")
        await harness.start_runner(f"r{n + 1}")
        await world.sleep(rng.choice((0.0, 11.0, 12.0)))
    allowed = count
    batch = await harness.ended(batch_id, within_s=300)
    assert batch["status"] == "completed"
    await check_files(harness, batch, count)
    done = await harness.lines(batch["output_file_id"])
    assert all(x["response"]["body"]["text"] == x["custom_id"] for x in done)


@scenario_test
async def test_prompts_are_recorded_as_published_once_they_are(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner dies while its first prompts are on their way, after records of its progress."""
    harness = await BatchHarness.open(world, "r1")

    async def lost(*_: object) -> None:
        await world.sleep(HOUR_S)

    with monkeypatch.context() as patch:
        patch.setattr(JobPrompts, "_append", lost)
        batch_id = await harness.submit(input_of(250))
        await world.sleep(5)
        await harness.kill("r1")
    assert harness.fleet.seen == 0
    await harness.start_runner("r2")
    batch = await harness.ended(batch_id)
    assert batch["status"] == "completed"
    await check_files(harness, batch, 250)


@pytest.mark.parametrize("recorded", [True, False])
@scenario_test
async def test_new_owner_keeps_the_bound_and_withdraws_what_was_under_way(
    world: MemoryWorld, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the former one has published, and died before it could record it."""
    harness = await BatchHarness.open(world, "r1")
    harness.fleet.answers = lambda _: False

    async def unwritten(*_: object) -> None:
        pass

    with monkeypatch.context() as patch:
        if not recorded:
            patch.setattr(JobRun, "_put_progress", unwritten)
        batch_id = await harness.submit(input_of(2 * WINDOW + 500))
        await world.sleep(5)
        await harness.kill("r1")
    published = set(harness.fleet.prompts)
    assert WINDOW <= len(published) <= WINDOW + 100
    if recorded:
        await harness.start_runner("r2")
        await world.sleep(20)
        assert set(harness.fleet.prompts) == published
        assert harness.fleet.seen == len(published)
    await harness.send("POST", f"/v1/batches/{batch_id}/cancel")
    if not recorded:
        await harness.start_runner("r2")
    batch = await harness.ended(batch_id, within_s=GRACE_S + 15)
    assert batch["status"] == "cancelled"
    assert published <= harness.fleet.cancelled
    await check_files(harness, batch, 2 * WINDOW + 500)


@scenario_test
async def test_former_owner_that_still_writes_has_no_effect(world: MemoryWorld) -> None:
    """A runner whose group has given its jobs away, and that has not noticed."""
    harness = await BatchHarness.open(world, "r1")
    allowed = 200
    harness.fleet.answers = lambda name: int(name.partition("-")[2]) < allowed
    batch_id = await harness.submit(input_of(600))
    await world.sleep(5)
    runner, _, _ = harness.runners["r1"]
    runner.revoked = lambda partitions: None  # type: ignore[method-assign]
    successor = await harness.start_runner("r2")
    await world.sleep(15)
    successor.assigned(dict.fromkeys(range(8), 0))
    await world.sleep(5)
    assert runner.running_jobs == successor.running_jobs == 1
    allowed = 600
    batch = await harness.ended(batch_id)
    assert batch["status"] == "completed"
    await check_files(harness, batch, 600)
    await world.sleep(30)
    assert await harness.batch(batch_id) == batch
    await check_files(harness, batch, 600)
    fences = [
        r.fence for r in map(decode, world.all_records(BATCH_JOBS)) if isinstance(r, BatchJob)
    ]
    assert fences == sorted(fences)
    assert runner.running_jobs == 0


@scenario_test
async def test_runners_share_the_jobs(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world, "r1", "r2")
    await world.sleep(15)
    harness.fleet.answers = lambda _: False
    jobs = [await harness.submit(input_of(2)) for _ in range(12)]
    await world.sleep(5)
    working = [runner.running_jobs for runner, _, _ in harness.runners.values()]
    assert all(working)
    assert sum(working) >= 8
    harness.fleet.answers = lambda _: True
    for job in jobs:
        assert (await harness.ended(job))["status"] == "completed"


@scenario_test
async def test_deleted_input_fails_the_batch(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world)
    batch_id = await harness.submit(input_of(2))
    file_id = (await harness.batch(batch_id))["input_file_id"]
    answer = await harness.send("DELETE", f"/v1/files/{file_id}")
    assert (answer.status, answer.error["code"]) == (409, "file_in_use")
    for record in world.all_records(FILE_PARTS):
        world.broker.delete_records(FILE_PARTS, record.partition, record.offset + 1)
    await harness.start_runner("r1")
    batch = await harness.ended(batch_id)
    assert [e["code"] for e in batch["errors"]["data"]] == ["file_damaged"]
    assert (await harness.send("DELETE", f"/v1/files/{file_id}")).status == 200


@scenario_test
async def test_error_of_the_program_fails_the_job_and_not_the_process(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await BatchHarness.open(world, "r1")

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("kvlane.app.batches.job_prompts.prompt_of", broken)
        batch = await harness.ended(await harness.submit(input_of(2)))
    assert [e["code"] for e in batch["errors"]["data"]] == ["internal_error"]
    assert (await harness.ended(await harness.submit(input_of(2))))["status"] == "completed"


@scenario_test
async def test_job_fails_later_where_its_failure_cannot_be_written(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await BatchHarness.open(world, "r1")
    refused = 0
    fail = JobRun.fail

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    async def fail_at_the_third_attempt(run: JobRun, *args: Any) -> None:
        nonlocal refused
        refused += 1
        if refused < 3:
            raise BrokerUnavailable("no answer")
        await fail(run, *args)

    monkeypatch.setattr("kvlane.app.batches.job_prompts.prompt_of", broken)
    monkeypatch.setattr(JobRun, "fail", fail_at_the_third_attempt)
    batch = await harness.ended(await harness.submit(input_of(2)))
    assert [e["code"] for e in batch["errors"]["data"]] == ["internal_error"]
    assert "KeyError('a bug')" in batch["errors"]["data"][0]["message"]
    assert refused == 3
    assert harness.runners["r1"][2].error is None


@scenario_test
async def test_run_that_an_error_ends_leaves_no_reader(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await BatchHarness.open(world, "r1")
    _, log, _ = harness.runners["r1"]
    before = readers(log)

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("kvlane.app.batches.job_prompts.prompt_of", broken)
    await harness.ended(await harness.submit(input_of(2)))
    assert readers(log) == before


@scenario_test
async def test_revoked_job_ends_in_time(
    world: MemoryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the runner looks after it again and again."""
    harness = await BatchHarness.open(world, "r1")
    runner, log, _ = harness.runners["r1"]
    before = readers(log)
    ended: list[bool] = []

    async def publish_and_close(*_: object) -> None:
        try:
            await world.sleep(HOUR_S)
        finally:
            await world.sleep(5)
            ended.append(True)

    monkeypatch.setattr(JobPrompts, "_publish_all", publish_and_close)
    await harness.submit(input_of(2))
    await world.sleep(5)
    assert runner.running_jobs == 1
    runner.revoked(frozenset(range(8)))
    await world.sleep(10)
    assert ended
    assert readers(log) == before


# --- lists and tenants ----------------------------------------------------------------------------


@scenario_test
async def test_batches_are_listed_in_pages(world: MemoryWorld) -> None:
    harness = await BatchHarness.open(world)
    jobs = []
    for _ in range(5):
        jobs.append(await harness.submit(input_of(1)))
        await world.sleep(1)
    newest_first = jobs[::-1]
    page = (await harness.send("GET", "/v1/batches?limit=3")).json
    assert [b["id"] for b in page["data"]] == newest_first[:3]
    assert page["has_more"]
    page = (await harness.send("GET", f"/v1/batches?limit=3&after={page['last_id']}")).json
    assert [b["id"] for b in page["data"]] == newest_first[3:]
    assert not page["has_more"]
    assert (await harness.send("GET", "/v1/batches?limit=101")).status == 400


@scenario_test
async def test_batches_of_another_tenant_do_not_exist(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    ours, theirs = keys.add("acme"), keys.add("globex", "operator")
    harness = await BatchHarness.open(world, "r1", **keys.settings)
    batch_id = await harness.submit(input_of(2), ours)
    batch = await harness.ended(batch_id, ours)
    for method, path in (
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
        ("GET", f"/v1/files/{batch['output_file_id']}/content"),
    ):
        answer = await harness.send(method, path, token=theirs)
        assert answer.status == 404, path
        assert (await harness.send(method, path)).status == 401
    assert (await harness.send("GET", "/v1/batches", token=theirs)).json["data"] == []
    body = {"input_file_id": batch["input_file_id"], "endpoint": CHATS}
    answer = await harness.send("POST", "/v1/batches", body, theirs)
    assert (answer.status, answer.error["code"]) == (400, "file_not_found")
    await check_files(harness, batch, 2, ours)


@scenario_test
async def test_prompts_of_a_tenant_have_its_name_and_its_salt(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    tokens = {name: keys.add(name) for name in ("acme", "globex", "shared")}
    keys.limit("shared", share_cache=True)
    harness = await BatchHarness.open(world, "r1", **keys.settings)
    own = chat_line("own")
    own["body"]["cache_salt"] = "mine"
    for token in tokens.values():
        await harness.ended(await harness.submit(jsonl(chat_line("plain"), own), token), token)
    salts: dict[str, list[str]] = {}
    for prompt in harness.fleet.prompts.values():
        salts.setdefault(prompt["tenant"], []).append(prompt["body"].get("cache_salt", ""))
    seal = harness.gateway.gateway.parts.streams.seal
    assert seal.cache_salt("acme", "") in salts["acme"]
    assert sorted(salts["shared"]) == ["", "mine"]
    kept = [*salts["acme"], *salts["globex"]]
    assert len(set(kept)) == 4
    assert all(len(salt) == 32 for salt in kept)


@scenario_test
async def test_open_batches_of_a_tenant_are_limited(
    world: MemoryWorld, keys: KeyFileHarness
) -> None:
    token = keys.add("acme")
    keys.limit("acme", batches=1)
    harness = await BatchHarness.open(world, "r1", **keys.settings)
    harness.fleet.answers = lambda _: False
    batch_id = await harness.submit(input_of(1), token)
    body = {"input_file_id": await harness.upload(input_of(1), token), "endpoint": CHATS}
    answer = await harness.send("POST", "/v1/batches", body, token)
    assert (answer.status, answer.error["code"]) == (429, "batch_limit_exceeded")
    assert harness.gateway.gateway.parts.metrics.refused_requests.labels("batches").value == 1
    harness.fleet.answers = lambda _: True
    await harness.ended(batch_id, token)
    assert (await harness.send("POST", "/v1/batches", body, token)).status == 200


@pytest.mark.parametrize("gateways", [1, 2])
@scenario_test
async def test_limit_of_batches_holds_for_creations_at_the_same_time(
    world: MemoryWorld, keys: KeyFileHarness, gateways: int
) -> None:
    """At all gateways: the order in the log decides, and no prompt of the others is published."""
    token = keys.add("acme")
    keys.limit("acme", batches=2)
    harness = await BatchHarness.open(world, "r1", **keys.settings)
    harness.fleet.answers = lambda _: False
    doors = [harness.gateway]
    doors += [
        await GatewayHarness.open(world, f"g{n}", **keys.settings) for n in range(1, gateways)
    ]
    world.faults.slow["append"] = 0.2
    body = {"input_file_id": await harness.upload(input_of(3), token), "endpoint": CHATS}
    many = [
        door.send("POST", "/v1/batches", body, auth_headers(token))
        for _ in range(6)
        for door in doors
    ]
    for each in many:
        await each.wait_done()
    accepted = [each.json["id"] for each in many if each.status == 200]
    refused = {(each.status, each.error["code"]) for each in many if each.status != 200}
    assert len(accepted) == 2
    assert refused == {(429, "batch_limit_exceeded")}
    await world.sleep(10)
    assert {prompt["batch_id"] for prompt in harness.fleet.prompts.values()} == set(accepted)
    later = await GatewayHarness.open(world, "later", **keys.settings)
    listed = await later.send("GET", "/v1/batches", headers=auth_headers(token)).wait_done()
    assert {each["id"] for each in listed.json["data"]} == set(accepted)
    harness.fleet.answers = lambda _: True
    await harness.ended(accepted[0], token)
    assert (await harness.send("POST", "/v1/batches", body, token)).status == 200
