"""Tests of continued answers: each option of a request in the rest, and answers that cannot go
on."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import fields, replace

from kvlane.app.engine.interface import GenerateContext, with_whole_thinking_budget
from kvlane.app.lanes.remaining_work import CONTINUATION, continuation_blocker
from kvlane.app.serving.run_executor import resumed_request
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.request import (
    GuidedDecoding,
    OpenAiBody,
    OutputOptions,
    Request,
    SamplingOptions,
    StopConditions,
)

TAKEN = pack_tokens(range(61))
PARTS: dict[str, Any] = {
    "stop": StopConditions,
    "sampling": SamplingOptions,
    "output": OutputOptions,
}
NO_OPTIONS = frozenset({
    "id", "model", "alias", "token_ids", "tenant", "key_id", "deadline_s", "received_ms", "hints",
    "mdc_sum", "annotations", "cache_salt", "mm_routing_info", "router_config_override",
    "prefill_result",
    "migration_link", "bootstrap_info", "router", "agent_context", "request_timestamp_ms",
    "is_probe", "queued_ms", "service_class", "is_renewed", "result", "traceparent",
    "shown",
})  # fmt: skip
"""Fields of a request that name it, or decide where and when it runs."""
VALUES: dict[str, Any] = {
    "stop.max_tokens": 700, "stop.min_tokens": 70, "stop.max_thinking_tokens": 80,
    "stop.stop": ("x",), "stop.stop_token_ids": (7,), "stop.stop_token_ids_hidden": (7,),
    "stop.ignore_eos": True, "sampling.seed": 7, "sampling.top_k": 3, "sampling.n": 1,
    "sampling.best_of": 1, "sampling.use_beam_search": False, "sampling.detokenize": True,
    "sampling.include_stop_str_in_output": True, "sampling.allowed_token_ids": (7, 8),
    "sampling.bad_words_token_ids": ((7, 8),), "sampling.logit_bias": {7: 1.0},
    "sampling.guided_decoding": GuidedDecoding(regex="a*"), "output.logprobs": 3,
    "eos_token_ids": (7,), "prompt_embeds": "AAAA", "multi_modal_data": {},
    "mm_processor_kwargs": b"{}", "extra_args": b'{"a":1}',
    "body": OpenAiBody(kind="chat", json=b"{}"),
}  # fmt: skip


def with_option(name: str, **sampling: Any) -> Request:
    value = VALUES.get(name, 1.5)
    request = Request(
        id="a",
        token_ids=pack_tokens([1]),
        sampling=SamplingOptions(**sampling),
        stop=StopConditions(max_tokens=700),
    )
    part, _, field = name.rpartition(".")
    if not part:
        return replace(request, **{field: value})
    return replace(request, **{part: replace(getattr(request, part), **{field: value})})


def option_of(request: Request, name: str) -> Any:
    part, _, field = name.rpartition(".")
    return getattr(getattr(request, part) if part else request, field)


def test_every_option_of_a_request_is_classed() -> None:
    nested = {f"{part}.{f.name}" for part, kind in PARTS.items() for f in fields(kind)}
    own = {f.name for f in fields(Request)} - NO_OPTIONS - PARTS.keys()
    assert nested | own == CONTINUATION.keys()


@pytest.mark.parametrize("name", CONTINUATION)
def test_option_of_the_rest_of_an_answer_is_as_classed(name: str) -> None:
    request, kind = with_option(name), CONTINUATION[name]
    rest = option_of(resumed_request(request, TAKEN), name)
    assert (rest != option_of(request, name)) == (kind == "adjusted")
    assert bool(continuation_blocker(request)) == (kind == "refused")
    for exact in ({"temperature": 0.0}, {"seed": 3}):
        blocker = continuation_blocker(with_option(name, **exact))
        if name not in ("sampling.temperature", "sampling.seed"):
            assert bool(blocker) == (kind in ("refused", "changed"))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalty_of_zero_blocks_no_exact_answer(name: str) -> None:
    sampling = SamplingOptions(temperature=0.0, **{name: 0.0})
    assert not continuation_blocker(Request(id="a", sampling=sampling))


def test_bad_words_of_one_token_block_no_answer() -> None:
    sampling = SamplingOptions(bad_words_token_ids=((7,), (8,)))
    assert not continuation_blocker(Request(id="a", sampling=sampling))


@pytest.mark.parametrize(("budget", "left"), [(80, 19), (61, 0), (50, 0), (0, 0)])
def test_thinking_budget_of_the_rest_is_what_the_tokens_so_far_have_left(
    budget: int, left: int
) -> None:
    request = Request(id="a", stop=StopConditions(max_thinking_tokens=budget))
    assert resumed_request(request, TAKEN).stop.max_thinking_tokens == left
    assert resumed_request(Request(id="a"), TAKEN).stop.max_thinking_tokens is None


def test_engine_that_counts_thinking_in_the_prompt_gets_the_budget_of_the_whole() -> None:
    request = Request(id="a", stop=StopConditions(max_thinking_tokens=80))
    context = GenerateContext("a")
    assert with_whole_thinking_budget(request, context) == request
    context.taken_tokens = 61
    rest = with_whole_thinking_budget(resumed_request(request, TAKEN), context)
    assert rest.stop.max_thinking_tokens == 80
