"""Tests of a batch through preprocessor, router, worker and collector, on the log in memory."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvlane.app.batches.job_run import JobRun
from kvlane.app.engine.echo import echo_answer
from kvlane.app.preprocess.thread_pool import InlinePool
from kvlane.app.preprocessor import Preprocessor
from kvlane.app.runtime.process import ProcessContext
from kvlane.app.text.byte_level import render_chat
from kvlane.streams.codecs import decode
from kvlane.streams.ports import Partition, Reader
from kvlane.streams.records import Assigned, Ended, RequestUsage
from kvlane.streams.topics import BATCH, LEDGER, RESULTS, USAGE
from tests.harness.batch_harness import AnsweringFleet, BatchHarness, chat_line, jsonl
from tests.harness.decoded import decode_bytes
from tests.harness.gateway_harness import GatewayHarness, memory_settings
from tests.harness.key_files import KeyFileHarness
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.results_harness import ResultsHarness

TOKENS = 8
WINDOW_S = 30
SETTINGS = {"dedup_window_s": WINDOW_S, "max_lifetime_s": WINDOW_S, "deadline_s": WINDOW_S}


def answer(name: str) -> str:
    """The answer of the echo engine to a line."""
    return decode_bytes(echo_answer(render_chat([("user", f"say {name}")]), TOKENS))


@pytest.mark.parametrize("outage_s", [0, 3 * WINDOW_S])
@scenario_test
async def test_batch_answers_equal_http_answers(
    world: MemoryWorld, outage_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt has one run and one result, though the second collector publishes all of them
    again, even after an outage that is longer than the recognition of duplicates."""
    gateway = await GatewayHarness.open(world, **SETTINGS)
    await gateway.start_backend(**SETTINGS)
    ctx = ProcessContext("p1", world.clock, random.Random("p1"))
    log = await world.connect("p1")
    await Preprocessor(log, memory_settings(**SETTINGS), ctx, InlinePool()).start()
    collectors = ResultsHarness(world, **SETTINGS)
    await collectors.start()
    harness = BatchHarness(gateway, AnsweringFleet(world))
    names = [f"line-{n}" for n in range(12)]
    lines = [chat_line(name) for name in names]
    for line in lines:
        line["body"]["max_tokens"] = TOKENS
    lines[5]["body"] = {"model": "nobody", "messages": []}

    async def unwritten(*_: object) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(JobRun, "_put_progress", unwritten)
        batch_id = await harness.submit(jsonl(*lines))
        await world.wait_until(lambda: len(world.all_records(BATCH)) == 12)
        await collectors.kill("c1")
    await world.sleep(outage_s)
    for lane in range(world.lanes):  # other requests went on
        world.append(LEDGER, lane, Ended(id="other", code="cancelled"), key="other")

    take = JobRun._take_results

    async def assign(_: JobRun, reader: Reader, work: Any) -> None:
        reader.assign({Partition(RESULTS, p): at for p, at in work.output.positions.items()})

    async def take_later(run: JobRun, *args: Any) -> bool:
        await world.wait_until(lambda: len(world.all_records(BATCH)) == 2 * 12)
        return await take(run, *args)

    monkeypatch.setattr(JobRun, "_catch_up", assign)
    monkeypatch.setattr(JobRun, "_take_results", take_later)
    await collectors.start("c2")
    batch = await harness.ended(batch_id, within_s=300)
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": 12, "completed": 11, "failed": 1}
    await world.sleep(60)
    assert sorted(Counter(r.id for r in collectors.results()).values()) == [1] * 12
    assigned = [r for r in map(decode, world.all_records(LEDGER)) if isinstance(r, Assigned)]
    assert sorted(Counter(r.id for r in assigned).values()) == [1] * 11
    done = {line["custom_id"]: line for line in await harness.lines(batch["output_file_id"])}
    assert sorted(done) == sorted(name for name in names if name != "line-5")
    body = done["line-3"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == answer("line-3")
    assert body["usage"]["completion_tokens"] == TOKENS
    (failed,) = await harness.lines(batch["error_file_id"])
    assert failed["custom_id"] == "line-5"
    assert failed["response"]["status_code"] in (400, 404)
    assert failed["response"]["body"]["error"]["message"]


@scenario_test
async def test_usage_of_lines_names_the_key_that_created_the_batch(
    world: MemoryWorld, tmp_path: Path
) -> None:
    keys = KeyFileHarness(tmp_path)
    keys.add("acme")
    token = keys.add("acme")
    gateway = await GatewayHarness.open(world, **keys.settings)
    await gateway.start_backend(**keys.settings)
    ctx = ProcessContext("p1", world.clock, random.Random("p1"))
    log = await world.connect("p1")
    await Preprocessor(log, memory_settings(), ctx, InlinePool()).start()
    await ResultsHarness(world).start()
    harness = BatchHarness(gateway, AnsweringFleet(world))
    unknown = chat_line("b") | {"body": {"model": "nobody", "messages": [{}]}}
    batch_id = await harness.submit(jsonl(chat_line("a"), unknown), token)
    batch = await harness.ended(batch_id, token)
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    await world.wait_until(lambda: len(world.all_records(USAGE)) == 2)
    usage = [
        each for each in map(decode, world.all_records(USAGE)) if isinstance(each, RequestUsage)
    ]
    key = (token.split("_")[1], "acme", "batch")
    assert [(each.key_id, each.tenant, each.service_class) for each in usage] == [key, key]
