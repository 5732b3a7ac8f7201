"""Where a worker ends an answer, and what of it can be seen: stops, ends of text, resumed runs."""

from __future__ import annotations

from typing import Any

from app.engine.interface import EngineOutput, token_usage
from streams.codecs import pack_tokens
from streams.records import EngineConfig, Finished, LogProb, PassthroughDelta, PrefillDone, Started
from streams.request import OpenAiBody, Request, StopConditions
from streams.topics import LEDGER
from tests.harness.memory_world import MemoryWorld, scenario_test
from tests.harness.worker_harness import PROMPT, ScriptedEngine, WorkerHarness, visible


def said(text: str) -> list[EngineOutput]:
    return [EngineOutput.token(byte) for byte in text.encode()]


async def answer(
    world: MemoryWorld, *script: EngineOutput | float, **asked: Any
) -> tuple[WorkerHarness, ScriptedEngine]:
    """A worker that has answered request a, and its engine."""
    desk, engine = WorkerHarness(world), ScriptedEngine(world, *script)
    await desk.start(engine)
    over = {name: asked.pop(name) for name in ("attempt", "taken", "taken_chars") if name in asked}
    request = Request(id="a", token_ids=pack_tokens(PROMPT), **asked)
    desk.assign(request=request, **over)
    await desk.wait_finished()
    return desk, engine


@scenario_test
async def test_a_stop_string_ends_the_answer_before_it_and_the_engine_is_left(
    world: MemoryWorld,
) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    desk, engine = await answer(world, *said("one EN two END three"), 1000.0, stop=stop)
    seen, last = visible(desk.chunks()), desk.chunks()[-1]
    assert seen.text == "one EN two "
    assert bytes(seen.tokens) == b"one EN two END"
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert engine.is_closed
    assert last.usage == token_usage(len(PROMPT), 14)


@scenario_test
async def test_text_of_a_body_is_the_engines_and_so_are_its_counts(world: MemoryWorld) -> None:
    asked = OpenAiBody(kind="chat", json=b"{}", prompt_tokens=40)
    script = (
        EngineOutput(text="", data=(PassthroughDelta(delta={"reasoning_content": "hm"}),)), 1.0,
        EngineOutput(text="Good "), 1.0, EngineOutput(text="day", finish_reason="tool_calls",
                                                      usage=token_usage(33, 9)),
    )  # fmt: skip
    desk, engine = await answer(world, *script, body=asked)
    assert engine.requests[0].body == asked
    seen, last = visible(desk.chunks()), desk.chunks()[-1]
    assert (seen.text, seen.tokens, seen.passthrough_count, seen.gaps) == ("Good day", [], 1, 0)
    assert (last.finish_reason, last.usage) == ("tool_calls", token_usage(33, 9))
    (started,) = desk.lane_records(LEDGER, Started)
    assert started.prompt_tokens == 40
    (prefilled,) = desk.lane_records(LEDGER, PrefillDone)
    assert prefilled.ttft_ms < 500
    (finished,) = desk.lane_records(LEDGER, Finished)
    assert (finished.code, finished.output_tokens) == ("stop", 9)


@scenario_test
async def test_what_may_begin_a_stop_string_is_kept_back(world: MemoryWorld) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    desk, _ = await answer(world, *said("x EN"), 1.0, *said("x"), EngineOutput.stop(), stop=stop)
    texts = [chunk.text for chunk in desk.chunks()]
    assert not any(text.endswith(("E", "EN")) for text in texts)
    assert "".join(texts) == "x ENx"


@scenario_test
async def test_a_stop_string_across_a_fence_is_found_once(world: MemoryWorld) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    taken = pack_tokens([*b"one E"])
    desk, _ = await answer(
        world, *said("ND two"), 1000.0, stop=stop, attempt=1, taken=taken, taken_chars=4
    )
    seen = desk.chunks()
    assert "".join(chunk.text for chunk in seen) == ""
    assert (seen[-1].chars, seen[-1].stop_reason) == (4, "END")


@scenario_test
async def test_a_stop_string_in_what_is_out_already_ends_it_at_once(world: MemoryWorld) -> None:
    stop = StopConditions(stop=("END",), max_tokens=50)
    taken = pack_tokens([*b"one END"])
    desk, engine = await answer(world, stop=stop, attempt=1, taken=taken, taken_chars=4)
    (last,) = desk.chunks()
    assert (last.token_ids, last.text, last.finish_reason) == ((), "", "stop")
    assert not engine.requests


@scenario_test
async def test_an_end_of_text_shows_nothing_and_is_no_reason(world: MemoryWorld) -> None:
    desk, _ = await answer(world, *said("ab\0cd"), 1000.0, eos_token_ids=(0,))
    last = desk.chunks()[-1]
    assert visible(desk.chunks()).text == "ab"
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert visible(desk.chunks()).tokens[-1] == 0


@scenario_test
async def test_log_probabilities_travel_with_their_tokens(world: MemoryWorld) -> None:
    likely = [(LogProb(65 + n, -0.5), LogProb(66, -1.0)) for n in range(4)]
    outputs = [
        EngineOutput(token_ids=(65, 66), log_probs=tuple(likely[:2])),
        EngineOutput(token_ids=(67, 68), log_probs=tuple(likely[2:])),
    ]
    stop = StopConditions(stop=("C",), max_tokens=9)
    desk, _ = await answer(world, outputs[0], 1.0, outputs[1], 1000.0, stop=stop)
    first, last = desk.chunks()
    assert first.log_probs == tuple(likely[:2])
    assert last.log_probs == (likely[2],), "what lies behind the end is not told"


class TextOnly(ScriptedEngine):
    """Its tokens are made of text: they serve to count, and to find where to stop."""

    async def start(self, worker_id: str) -> EngineConfig:
        return EngineConfig(model="m", gives_tokens=False)


@scenario_test
async def test_an_engine_that_gives_text_only_shows_no_tokens_of_its_own_making(
    world: MemoryWorld,
) -> None:
    desk = await WorkerHarness.started(world, TextOnly(world, *said("some"), EngineOutput.stop()))
    desk.assign()
    finished = await desk.wait_finished()
    seen = visible(desk.chunks())
    assert (seen.text, seen.tokens, finished.output_tokens) == ("some", [], 4)
    assert desk.chunks()[-1].usage == token_usage(len(PROMPT), 4)


@scenario_test
async def test_an_engine_that_gives_text_only_continues_no_answer(world: MemoryWorld) -> None:
    desk, engine = WorkerHarness(world), TextOnly(world, *said("some"), EngineOutput.stop())
    await desk.start(engine)
    desk.assign(attempt=1, taken=pack_tokens([*b"one "]), taken_chars=4)
    finished = await desk.wait_finished()
    assert (finished.code, finished.retryable) == ("error", True)
    assert not engine.requests
    assert not desk.chunks()
