"""Tests of samples of requests, and of the prompts that repeat them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvlane.app.preprocess.request_reader import read_request
from kvlane.app.preprocess.requests.openai_requests import OpenAIRequest
from kvlane.app.rehearsal import request_sample
from kvlane.app.rehearsal.request_sample import (
    RehearsalRefused,
    RequestSample,
    is_exact,
    rehearsal_id,
    rehearsal_prompt,
)
from kvlane.streams.codecs import pack_tokens
from kvlane.streams.records import ModelCard
from kvlane.streams.request import (
    GuidedDecoding,
    Hints,
    OpenAiBody,
    OutputOptions,
    Request,
    SamplingOptions,
    StopConditions,
)

SOURCE = ModelCard(name="a", context_length=100, checksum="1")
TARGET = ModelCard(name="b", context_length=80, checksum="2", eos_token_ids=(9,))
FULL = Request(
    id="x", model="a", token_ids=pack_tokens([1, 2, 3]), tenant="acme", cache_salt="salt",
    stop=StopConditions(max_tokens=7, min_tokens=2, stop=("END",), stop_token_ids=(4,),
                        ignore_eos=True, max_thinking_tokens=5),
    sampling=SamplingOptions(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=11, presence_penalty=0.2,
        frequency_penalty=0.3, repetition_penalty=1.1, logit_bias={5: 1.5},
        allowed_token_ids=(1, 5), bad_words_token_ids=((6, 7),), include_stop_str_in_output=True,
        guided_decoding=GuidedDecoding(json=b'{"type":"object"}', backend="xgrammar"),
    ),
    output=OutputOptions(skip_special_tokens=False, logprobs=3),
    hints=Hints(lora_name="tiny", backend_instance_id="w1", priority=4, queue_class="fast"),
)  # fmt: skip


def read(kind: Any, body: dict[str, Any]) -> Request:
    """The request that a preprocessor makes of a body for the target."""
    read_body = read_request(kind, json.loads(json.dumps(body)), as_is=False)
    assert isinstance(read_body, OpenAIRequest)
    (made,) = read_body.requests([[1, 2, 3]], TARGET)
    return made


def test_repeated_request_has_all_options_that_decide_the_answer() -> None:
    prompt = rehearsal_prompt(FULL, SOURCE, TARGET, None, "r", 60.0)
    assert (prompt.kind, prompt.service_class, prompt.tenant) == ("tokens", "batch", "rehearsal")
    assert prompt.result is False
    made = read(prompt.kind, prompt.body)
    assert made.model == "b"
    assert (made.stop, made.sampling) == (FULL.stop, FULL.sampling)
    assert made.cache_salt == "salt"
    assert made.output == OutputOptions(skip_special_tokens=False)
    assert made.hints == Hints(lora_name="tiny")
    assert made.eos_token_ids == TARGET.eos_token_ids


def test_text_for_another_tokenizer_has_no_token_ids() -> None:
    prompt = rehearsal_prompt(FULL, SOURCE, TARGET, "one two", "r", 60.0)
    assert (prompt.kind, prompt.body["prompt"]) == ("completion", "one two")
    made = read("completion", prompt.body)
    assert made.stop == replace(FULL.stop, stop_token_ids=())
    expected = replace(
        FULL.sampling, logit_bias=None, allowed_token_ids=None, bad_words_token_ids=None
    )
    assert made.sampling == expected


def test_limit_that_only_the_context_set_is_that_of_the_target() -> None:
    unlimited = replace(FULL, stop=StopConditions(max_tokens=97))
    prompt = rehearsal_prompt(unlimited, SOURCE, TARGET, None, "r", 60.0)
    assert read("tokens", prompt.body).stop.max_tokens == 77
    kept = rehearsal_prompt(unlimited, None, TARGET, None, "r", 60.0)
    assert kept.body["max_tokens"] == 97


def test_forwarded_body_keeps_its_fields_but_for_routing_and_form() -> None:
    fields = {"model": "a", "messages": [], "stream": True, "nvext": {"agent_hints": {}}, "n": 2}
    body = OpenAiBody(kind="chat", json=json.dumps(fields).encode())
    request = Request(id="x", model="a", body=body)
    target = replace(TARGET, kind="chat")
    prompt = rehearsal_prompt(request, SOURCE, target, None, "r", 60.0)
    assert (prompt.kind, prompt.body) == ("chat", {"model": "b", "messages": []})


@pytest.mark.parametrize(
    "request_", [FULL, replace(FULL, body=OpenAiBody(kind="chat", json=b"{}"))]
)
def test_target_that_cannot_take_a_prompt_is_named(request_: Request) -> None:
    with pytest.raises(RehearsalRefused, match="the target"):
        rehearsal_prompt(request_, SOURCE, replace(TARGET, kind="completion"), None, "r", 60.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.0}, True), ({"temperature": 0.7, "seed": 0}, True), ({"top_k": 1}, True),
        ({"temperature": 0.7}, False), ({}, False),
    ],
)  # fmt: skip
def test_greedy_and_seeded_answers_are_exact(fields: dict[str, Any], *, expected: bool) -> None:
    assert is_exact(Request(id="x", sampling=SamplingOptions(**fields))) is expected
    body = OpenAiBody(kind="chat", json=json.dumps(fields).encode())
    assert is_exact(Request(id="x", body=body)) is expected


def test_id_is_of_request_model_files_and_label() -> None:
    first = rehearsal_id(FULL, TARGET, "")
    assert first == rehearsal_id(replace(FULL, tenant="other"), TARGET, "")
    others = {
        rehearsal_id(replace(FULL, id="y"), TARGET, ""), rehearsal_id(FULL, SOURCE, ""),
        rehearsal_id(FULL, replace(TARGET, checksum="3"), ""), rehearsal_id(FULL, TARGET, "2"),
    }  # fmt: skip
    assert len(others | {first}) == 5


def sample_of(ids: range, share: float, limit: int) -> set[str]:
    sample = RequestSample(share, limit)
    for number in ids:
        if f"x{number}".encode() in sample:
            sample.add(Request(id=f"x{number}", token_ids=bytes(4)))
    return set(sample.requests)


def test_sample_depends_on_ids_alone() -> None:
    whole = sample_of(range(2000), 0.1, 10_000)
    assert 150 < len(whole) < 250
    assert sample_of(range(1000), 0.1, 10_000) == whole & {f"x{n}" for n in range(1000)}
    least = sample_of(range(2000), 0.1, 20)
    assert len(least) == 20
    assert least < whole
    assert least == sample_of(range(1999, -1, -1), 1.0, 20)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, annotations=("query_instance_id:",)),
        lambda r: replace(r, prompt_embeds="AAAA"),
        lambda r: replace(r, body=OpenAiBody(kind="embedding", json=b"{}")),
    ],
)
def test_request_that_cannot_be_repeated_is_counted(change: Callable[[Request], Request]) -> None:
    sample = RequestSample(1.0, 10)
    sample.add(change(FULL))
    assert (len(sample.requests), sample.left_out.total()) == (0, 1)


def test_repeated_requests_and_copies_do_not_count() -> None:
    sample = RequestSample(1.0, 10)
    for request in (FULL, FULL, replace(FULL, id="y", tenant="rehearsal"),
                    replace(FULL, id="z", is_renewed=True)):  # fmt: skip
        sample.add(request)
    assert (list(sample.requests), sample.left_out.total()) == (["x"], 0)


def test_sample_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_sample, "MAX_SAMPLE_BYTES", 20)
    sample = RequestSample(1.0, 10)
    sample.add(FULL)
    with pytest.raises(RehearsalRefused, match="the prompts of the sample"):
        sample.add(replace(FULL, id="y"))
