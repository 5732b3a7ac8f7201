"""Tests of the echo engine: predictable, resumable, cancellable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.app.engine.echo import EchoEngine, ScriptPart, echo_answer
from kvlane.app.engine.interface import GenerateContext, InvalidRequest
from kvlane.app.engine.validator import ValidatingEngine
from kvlane.app.text.byte_level import ASSISTANT, SYSTEM, USER, render_chat
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import EngineConfig
from kvlane.streams.request import GuidedDecoding, Request, SamplingOptions, StopConditions

PROMPT = render_chat([("system", "be brief"), ("user", "héllo")])
BODY = list("héllo".encode())


async def answer(
    token_ids: list[int], max_tokens: int | None = None, context_length: int = 1000
) -> tuple[list[int], str | None]:
    engine = ValidatingEngine(EchoEngine(SystemClock(), 0.0, context_length=context_length))
    await engine.start("w")
    request = Request(
        id="r", token_ids=pack_tokens(token_ids), stop=StopConditions(max_tokens=max_tokens)
    )
    made: list[int] = []
    reason = None
    async for output in engine.generate(request, GenerateContext("r")):
        made += output.token_ids
        reason = output.finish_reason
    return made, reason


async def test_form_is_that_of_the_script_and_refused_without_an_answer_in_it() -> None:
    engine = ValidatingEngine(EchoEngine(SystemClock(), 0.0, script={"héllo": '{"a": 1}'}))
    config = await engine.start("w")
    assert (config.unsupported, config.continues_guided) == (("logprobs",), True)
    sampling = SamplingOptions(guided_decoding=GuidedDecoding(json='{"type": "object"}'))
    for taken in (b"", b'{"a"'):
        sequence = pack_tokens([*PROMPT, *taken])
        asked = Request(id="r", token_ids=sequence, sampling=sampling)
        outputs = [output async for output in engine.generate(asked, GenerateContext("r"))]
        rest = bytes(token for output in outputs for token in output.token_ids)
        assert taken + rest == b'{"a": 1}'
    sequence = pack_tokens(render_chat([("user", "hi")]))
    unknown = Request(id="r", token_ids=sequence, sampling=sampling)
    with pytest.raises(InvalidRequest, match="the script has no answer"):
        await anext(engine.generate(unknown, GenerateContext("r")))


SCRIPT = {"héllo": [ScriptPart("é"), ScriptPart("llo", after_ms=1500)]}


@pytest.mark.parametrize(("taken", "pause_s"), [(b"", 1.5), ("é".encode(), 1.5), (b"\xc3\xa9l", 0)])
async def test_pause_of_a_script_is_before_its_part(taken: bytes, pause_s: float) -> None:
    clock = SteppedClock(0.0)
    engine = EchoEngine(clock, 0.01, script=SCRIPT)
    sequence = pack_tokens([*PROMPT, *taken])
    made, times = taken, {}
    request = Request(id="r", token_ids=sequence)
    async for output in engine.generate(request, GenerateContext("r")):
        for token in output.token_ids:
            times[len(made)] = clock.now()
            made += bytes([token])
    assert made == "éllo".encode()
    before = max(times.get(1, 0.0), 0.0)
    assert times.get(2, times.get(3, 0.0)) - before == pytest.approx(pause_s, abs=0.03)


async def test_stopped_request_does_not_wait_for_its_pause() -> None:
    clock = SteppedClock(0.0)
    engine = EchoEngine(clock, 0.0, script={"héllo": [ScriptPart("a", after_ms=10_000)]})
    context = GenerateContext("r")
    context.cancel()
    request = Request(id="r", token_ids=pack_tokens(PROMPT))
    reasons = [output.finish_reason async for output in engine.generate(request, context)]
    assert (reasons, clock.now()) == (["cancelled"], 0.0)


async def test_echo_repeats_the_last_user_turn_once() -> None:
    assert await answer(PROMPT) == (BODY, "stop")


async def test_echo_repeats_the_turn_up_to_the_limit() -> None:
    assert await answer(PROMPT, 8) == (BODY + BODY[:2], "length")


async def test_previous_turn_is_not_repeated() -> None:
    prompt = render_chat([("user", "one"), ("assistant", "1"), ("user", "two")])
    assert await answer(prompt) == (list(b"two"), "stop")


async def test_marked_tokens_without_turns_are_all_body() -> None:
    assert await answer([7, 8, 9, ASSISTANT], 4) == ([7, 8, 9, 7], "length")


async def test_empty_turn_ends_at_once() -> None:
    assert await answer([USER, ASSISTANT], 4) == ([], "stop")


async def test_context_bounds_the_answer() -> None:
    assert await answer(PROMPT, 50, context_length=len(PROMPT) + 3) == (BODY[:3], "length")


@given(
    prompt=st.lists(st.sampled_from([1, 2, 3, USER, ASSISTANT, SYSTEM]), max_size=12),
    limit=st.one_of(st.none(), st.integers(0, 20)),
    cut=st.integers(0, 20),
)
def test_resumed_answer_continues_identically(
    prompt: list[int], limit: int | None, cut: int
) -> None:
    prompt = [*prompt, ASSISTANT]
    whole = echo_answer(prompt, limit)
    taken = whole[:cut]
    rest = echo_answer(prompt + taken, None if limit is None else limit - len(taken))
    assert taken + rest == whole


async def test_engine_gives_the_predicted_answer() -> None:
    made, _ = await answer(PROMPT, 11)
    assert made == echo_answer(PROMPT, 11)


async def test_cancel_ends_it_with_cancelled_and_frees_its_place() -> None:
    engine = EchoEngine(SystemClock(), 0.0)
    assert isinstance(await engine.start("w"), EngineConfig)
    context = GenerateContext("r")
    request = Request(id="r", token_ids=pack_tokens(PROMPT), stop=StopConditions(max_tokens=100))
    reasons = []
    async for output in engine.generate(request, context):
        context.cancel()
        reasons.append(output.finish_reason)
    assert reasons == [None, "cancelled"]
    assert engine.running_count == 0


class SteppedClock:
    """Time that moves only by sleeping."""

    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def wall_ms(self) -> int:
        return 0

    async def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.mark.parametrize("start", [0.0, 0.1, 0.3, 0.7, 1234.5678])
async def test_each_token_takes_a_step_at_any_clock_reading(start: float) -> None:
    clock = SteppedClock(start)
    engine = EchoEngine(clock, 0.1)
    request = Request(
        id="r", token_ids=pack_tokens([1, ASSISTANT]), stop=StopConditions(max_tokens=10)
    )
    async for _ in engine.generate(request, GenerateContext("r")):
        pass
    assert 0.9 - 1e-3 <= clock.now() - start <= 1.0 + 1e-3
