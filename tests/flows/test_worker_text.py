"""Tests of the end of a worker's answer: stops, ends of text, resumed runs."""

from __future__ import annotations

from typing import Any

from kvlane.app.engine.interface import EngineOutput, token_usage
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import (
    EngineConfig,
    Finished,
    LogProb,
    PassthroughDelta,
    PrefillDone,
    Started,
)
from kvlane.streams.request import OpenAiBody, OutputOptions, Request, StopConditions
from kvlane.streams.topics import LEDGER
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import PROMPT, ScriptedEngine, WorkerHarness, visible


def output(text: str) -> list[EngineOutput]:
    return [EngineOutput.token(byte) for byte in text.encode()]


async def answer(
    world: MemoryWorld, *script: EngineOutput | float, **sent: Any
) -> tuple[WorkerHarness, ScriptedEngine]:
    """A worker that has answered request a, and its engine."""
    harness, engine = WorkerHarness(world), ScriptedEngine(world, *script)
    await harness.start(engine)
    over = {name: sent.pop(name) for name in ("attempt", "taken", "taken_chars") if name in sent}
    request = Request(id="a", token_ids=pack_tokens(PROMPT), **sent)
    harness.assign(request=request, **over)
    await harness.wait_finished()
    return harness, engine


@scenario_test
async def test_stop_string_ends_the_answer_before_it_and_aborts_the_engine(
    world: MemoryWorld,
) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    harness, engine = await answer(world, *output("one EN two END three"), 1000.0, stop=stop)
    seen, last = visible(harness.chunks()), harness.chunks()[-1]
    assert seen.text == "one EN two "
    assert bytes(seen.tokens) == b"one EN two END"
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert engine.is_closed
    assert last.usage == token_usage(len(PROMPT), 14)


@scenario_test
async def test_text_and_counts_of_a_body_are_the_engines(world: MemoryWorld) -> None:
    sent = OpenAiBody(kind="chat", json=b"{}", prompt_tokens=40)
    script = (
        EngineOutput(text="", data=(PassthroughDelta(delta={"reasoning_content": "hm"}),)),
        1.0,
        EngineOutput(text="Good "),
        1.0,
        EngineOutput(text="day", finish_reason="tool_calls", usage=token_usage(33, 9)),
    )
    harness, engine = await answer(world, *script, body=sent)
    assert engine.requests[0].body == sent
    seen, last = visible(harness.chunks()), harness.chunks()[-1]
    assert (seen.text, seen.tokens, seen.passthrough_count, seen.gaps) == ("Good day", [], 1, 0)
    assert (last.finish_reason, last.usage) == ("tool_calls", token_usage(33, 9))
    (started,) = harness.lane_records(LEDGER, Started)
    assert started.prompt_tokens == 40
    (prefilled,) = harness.lane_records(LEDGER, PrefillDone)
    assert prefilled.ttft_ms < 500
    (finished,) = harness.lane_records(LEDGER, Finished)
    assert (finished.code, finished.output_tokens) == ("stop", 9)


@scenario_test
async def test_possible_start_of_a_stop_string_is_withheld(world: MemoryWorld) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    harness, _ = await answer(
        world, *output("x EN"), 1.0, *output("x"), EngineOutput.stop(), stop=stop
    )
    texts = [chunk.text for chunk in harness.chunks()]
    assert not any(text.endswith(("E", "EN")) for text in texts)
    assert "".join(texts) == "x ENx"


@scenario_test
async def test_stop_string_across_a_fence_is_found_once(world: MemoryWorld) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    taken = pack_tokens([*b"one E"])
    harness, _ = await answer(
        world, *output("ND two"), 1000.0, stop=stop, attempt=1, taken=taken, taken_chars=4
    )
    seen = harness.chunks()
    assert "".join(chunk.text for chunk in seen) == ""
    assert (seen[-1].chars, seen[-1].stop_reason) == (4, "END")


@scenario_test
async def test_stop_string_in_resumed_text_ends_it_at_once(world: MemoryWorld) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    taken = pack_tokens([*b"one END"])
    harness, engine = await answer(world, stop=stop, attempt=1, taken=taken, taken_chars=4)
    (last,) = harness.chunks()
    assert (last.token_ids, last.text, last.finish_reason) == ((), "", "stop")
    assert not engine.requests


@scenario_test
async def test_end_of_text_shows_nothing_and_is_no_reason(world: MemoryWorld) -> None:
    harness, _ = await answer(world, *output("ab\0cd"), 1000.0, eos_token_ids=(0,))
    last = harness.chunks()[-1]
    assert visible(harness.chunks()).text == "ab"
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert visible(harness.chunks()).tokens[-1] == 0


@scenario_test
async def test_log_probabilities_are_written_with_their_tokens(world: MemoryWorld) -> None:
    likely = [(LogProb(65 + n, -0.5), LogProb(66, -1.0)) for n in range(4)]
    outputs = [
        EngineOutput(token_ids=(65, 66), log_probs=tuple(likely[:2])),
        EngineOutput(token_ids=(67, 68), log_probs=tuple(likely[2:])),
    ]
    stop = StopConditions(stop=("C",), max_tokens=9)
    harness, _ = await answer(world, outputs[0], 1.0, outputs[1], 1000.0, stop=stop)
    first, last = harness.chunks()
    assert first.log_probs == tuple(likely[:2])
    assert last.log_probs == (likely[2],), "what lies behind the end is not told"


class TextOnly(ScriptedEngine):
    """Its tokens are made of text: they serve to count, and to find where to stop."""

    async def start(self, worker_id: str) -> EngineConfig:
        return EngineConfig(model="m", gives_tokens=False)


@scenario_test
async def test_engine_with_text_only_shows_no_tokens_of_its_own(world: MemoryWorld) -> None:
    harness = await WorkerHarness.started(
        world, TextOnly(world, *output("some"), EngineOutput.stop())
    )
    harness.assign()
    finished = await harness.wait_finished()
    seen = visible(harness.chunks())
    assert (seen.text, seen.tokens, finished.output_tokens) == ("some", [], 4)
    assert harness.chunks()[-1].usage == token_usage(len(PROMPT), 4)


@scenario_test
async def test_engine_with_text_only_continues_no_answer(world: MemoryWorld) -> None:
    harness, engine = WorkerHarness(world), TextOnly(world, *output("some"), EngineOutput.stop())
    await harness.start(engine)
    harness.assign(attempt=1, taken=pack_tokens([*b"one "]), taken_chars=4)
    finished = await harness.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    assert not engine.requests
    assert not harness.chunks()


@scenario_test
async def test_chunks_count_the_characters_of_tokens_only_for_log_probabilities(
    world: MemoryWorld,
) -> None:
    """Text may be withheld, and a character may take several tokens."""
    script = [
        EngineOutput(token_ids=tuple(data), log_probs=tuple((LogProb(t, -1.0),) for t in data))
        for data in (b"a\xf0\x9f", b"\x98\x80EN", b"D more")
    ]
    stop = StopConditions(stop=("END",), max_tokens=50)
    output_options = OutputOptions(logprobs=0)
    harness, _ = await answer(world, *script, stop=stop, output=output_options)
    chunks = harness.chunks()
    assert visible(chunks).text == "a😀"
    assert [n for chunk in chunks for n in chunk.token_chars] == [1, 0, 0, 0, 1, 1, 1, 1]
    assert all(len(chunk.token_chars) == len(chunk.token_ids) for chunk in chunks)


@scenario_test
async def test_chunks_without_log_probabilities_count_no_characters(world: MemoryWorld) -> None:
    harness, _ = await answer(world, *output("ab"), EngineOutput.stop())
    assert not any(chunk.token_chars for chunk in harness.chunks())
