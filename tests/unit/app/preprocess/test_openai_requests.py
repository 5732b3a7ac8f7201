"""Tests of the way from a body, tokens and a model's card to published Requests."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.preprocess.prompt_errors import ContextExceeded, InvalidPrompt
from kvlane.app.preprocess.requests.openai_requests import (
    OpenAIRequest,
    TokenizedKind,
    nth_request,
    read_openai,
)
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.streams import records as r
from kvlane.streams import request as q
from kvlane.streams.clock import SystemClock
from kvlane.streams.codecs import pack_tokens

CARD = r.ModelCard(
    name="demo",
    context_length=100,
    eos_token_ids=(0, 1),
    defaults=q.SamplingOptions(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1),
    checksum="ab",
)
PLAIN = r.ModelCard(name="plain")
USER = {"role": "user", "content": "hi"}
CHAT = {"messages": [USER]}
COMPLETION = {"prompt": "hi"}
TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tools }}{{ documents }}"
    "{{ add_generation_prompt }}{{ thinking }}",
    SystemClock(),
)


def chat(**fields: Any) -> OpenAIRequest:
    return read_openai("chat", CHAT | fields)


def request(tokens: int = 10, card: r.ModelCard = CARD, **fields: Any) -> q.Request:
    (made,) = chat(**fields).requests([range(tokens)], card)
    return made


def problem(tokens: int = 10, card: r.ModelCard = CARD, **fields: Any) -> InvalidPrompt:
    with pytest.raises(InvalidPrompt) as raised:
        request(tokens, card, **fields)
    return raised.value


# --- prompts --------------------------------------------------------------------------------------


def test_chat_is_rendered() -> None:
    assert chat().prompts(TEMPLATE) == ["[hi]NoneNoneTrue"]


def test_chat_is_rendered_with_its_options() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": function}
    sent = chat(
        tools=[tool],
        documents=[{"a": 1}],
        add_generation_prompt=False,
        chat_template_kwargs={"thinking": 7},
    )
    assert sent.prompts(TEMPLATE) == [f"[hi]{[tool]}{[{'a': 1}]}False7"]


def test_chat_needs_a_template() -> None:
    with pytest.raises(InvalidPrompt, match="no chat template"):
        chat().prompts(None)


def test_raw_prompt_goes_past_the_template() -> None:
    messages = [USER, {"role": "user", "content": [{"type": "text", "text": "you"}]}]
    sent = chat(messages=messages, nvext={"use_raw_prompt": True})
    assert sent.prompts(TEMPLATE) == ["hi\nyou"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_given_tokens_are_the_prompt(kind: TokenizedKind) -> None:
    fields: dict[str, Any] = {"chat": CHAT, "completion": COMPLETION}[kind]
    sent = read_openai(kind, fields | {"nvext": {"token_data": [1, 2]}})
    assert sent.prompts(None) == [[1, 2]]


def test_tokens_are_a_prompt() -> None:
    assert read_openai("tokens", {"token_ids": [1, 2]}).prompts(None) == [[1, 2]]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (chat(), False),
        (chat(nvext={"use_raw_prompt": True}), True),
        (read_openai("completion", COMPLETION), True),
        (read_openai("completion", COMPLETION | {"add_special_tokens": False}), False),
    ],
)
def test_only_plain_text_gets_the_special_tokens_of_the_model(
    sent: OpenAIRequest, expected: bool
) -> None:
    assert sent.add_special_tokens is expected


# --- limits ---------------------------------------------------------------------------------------


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    assert request(30).stop.max_tokens == 70


def test_without_a_limit_and_a_context_there_is_none() -> None:
    assert request(30, PLAIN).stop.max_tokens is None


def test_limit_stays() -> None:
    assert request(max_tokens=5).stop.max_tokens == 5


def test_prompt_as_long_as_the_context_is_refused_with_both_numbers() -> None:
    wrong = problem(100)
    assert wrong.field == "messages"
    assert isinstance(wrong, ContextExceeded)
    assert "the prompt has 100 " in wrong.message
    assert problem(107).message == (
        "This model's maximum context length is 100 tokens; the prompt has 107 and leaves none for "
        "an answer"
    )


def test_prompt_one_token_shorter_than_the_context_is_fine() -> None:
    assert request(99).stop.max_tokens == 1


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limit_beyond_the_context_is_refused_by_its_name(field: str) -> None:
    wrong = problem(30, **{field: 71})
    assert wrong.field == field
    assert isinstance(wrong, ContextExceeded)
    assert "100 tokens; the prompt has 30 and the answer may have 71" in wrong.message
    assert request(30, **{field: 70}).stop.max_tokens == 70


def test_answer_cannot_be_longer_than_its_limit() -> None:
    assert problem(max_tokens=5, min_tokens=6).field == "min_tokens"
    assert problem(30, min_tokens=71).field == "min_tokens"


def test_prompt_of_no_tokens_is_refused() -> None:
    assert problem(0).field == "messages"


def test_completions_prompt_is_named_so() -> None:
    with pytest.raises(InvalidPrompt) as raised:
        read_openai("completion", COMPLETION).requests([range(200)], CARD)
    assert raised.value.field == "prompt"


# --- what a request is made of --------------------------------------------------------------------


def test_there_is_a_request_for_each_prompt() -> None:
    made = read_openai("completion", {"prompt": ["a", "b"]}).requests([[1], [2, 3]], CARD)
    assert [one.token_ids for one in made] == [pack_tokens([1]), pack_tokens([2, 3])]
    assert [one.stop.max_tokens for one in made] == [99, 98]


def test_request_has_no_id_yet() -> None:
    assert request().id == ""


def test_request_names_model_and_card() -> None:
    made = request(model="m")
    assert (made.model, made.mdc_sum, made.eos_token_ids) == ("m", "ab", (0, 1))


def test_card_without_a_checksum_is_not_named() -> None:
    assert request(card=PLAIN).mdc_sum is None


def test_stops_are_taken_over() -> None:
    stop = request(
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        min_tokens=2,
        max_tokens=5,
        nvext={"max_thinking_tokens": 3},
    ).stop
    assert stop == q.StopConditions(
        max_tokens=5,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(7,),
        ignore_eos=True,
        max_thinking_tokens=3,
    )


def test_model_has_defaults() -> None:
    assert request().sampling == CARD.defaults


def test_request_options_precede_defaults() -> None:
    sampling = request(temperature=0, top_k=-1).sampling
    assert sampling == q.SamplingOptions(
        temperature=0.0, top_k=-1, top_p=0.8, repetition_penalty=1.1
    )


def test_sampling_is_taken_over() -> None:
    sampling = request(
        card=PLAIN,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=7,
        include_stop_str_in_output=True,
        guided_regex="a+",
        allowed_token_ids=[1, 2],
        logit_bias={"7": 1.5},
    ).sampling
    assert sampling == q.SamplingOptions(
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=7,
        include_stop_str_in_output=True,
        guided_decoding=q.GuidedDecoding(regex="a+"),
        allowed_token_ids=(1, 2),
        logit_bias={7: 1.5},
    )


def test_temperature_zero_is_greedy_for_all_other_options() -> None:
    sampling = request(
        temperature=1, top_p=0.5, presence_penalty=1, seed=7, nvext={"greed_sampling": True}
    ).sampling
    assert sampling == q.SamplingOptions(temperature=0.0, seed=7)


@pytest.mark.parametrize("bias", [{"a": 1}, {"-1": 1}, {"1.5": 1}, {"9" * 30: 1}])
def test_bias_is_for_tokens(bias: dict[str, float]) -> None:
    assert problem(logit_bias=bias).field == "logit_bias"


def test_output_is_taken_over() -> None:
    output = request(
        logprobs=True,
        top_logprobs=2,
        prompt_logprobs=1,
        skip_special_tokens=False,
        return_tokens_as_token_ids=True,
    ).output
    assert output == q.OutputOptions(
        logprobs=2, prompt_logprobs=1, skip_special_tokens=False, return_tokens_as_token_ids=True
    )


def test_extensions_are_taken_over() -> None:
    made = request(
        nvext={
            "annotations": ["query_instance_id:1"],
            "backend_instance_id": "w1",
            "cache_salt": "s",
            "router": {"itl_target": 20},
            "router_config_override": {"assume_kv_reuse": False},
            "agent_context": {"a": 1},
            "request_timestamp_ms": 5,
        },
        mm_processor_kwargs={"fps": 2},
    )
    assert made.annotations == ("query_instance_id:1",)
    assert made.hints == q.Hints(backend_instance_id="w1")
    assert made.cache_salt == "s"
    assert made.router == q.RouterParams(itl_target=20.0)
    assert made.router_config_override == q.RouterConfigOverride(assume_kv_reuse=False)
    assert (made.agent_context, made.mm_processor_kwargs) == (b'{"a":1}', b'{"fps":2}')
    assert made.request_timestamp_ms == 5.0


def test_salt_has_vllms_name_too() -> None:
    assert request(cache_salt="s").cache_salt == "s"
    assert request(cache_salt="s", nvext={"cache_salt": "t"}).cache_salt == "t"


def test_headers_reach_the_hints() -> None:
    sent = read_openai("chat", CHAT, {"x-dp-rank": "3"})
    assert sent.requests([[1]], CARD)[0].hints == q.Hints(dp_rank=3)


# --- several answers ------------------------------------------------------------------------------


def test_answers_to_one_request_draw_differently() -> None:
    made = request(seed=7)
    assert [nth_request(made, number).sampling.seed for number in range(3)] == [7, 8, 9]


def test_first_answer_draws_with_the_seed_as_it_is() -> None:
    assert nth_request(request(seed=-5), 0).sampling.seed == -5


def test_largest_seed_has_a_next_one() -> None:
    seed = nth_request(request(seed=2**63 - 1), 1).sampling.seed
    assert seed is not None
    assert 0 <= seed < 2**63


def test_without_a_seed_there_is_nothing_to_change() -> None:
    made = request()
    assert nth_request(made, 1) is made
