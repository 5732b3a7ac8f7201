"""Tests of bodies of OpenAI requests: valid ones, and the field that an error names."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.openai_requests import TokenizedKind, read_openai
from kvlane.app.preprocess.requests.request_models import MAX_CHOICES, MAX_STOPS
from kvlane.app.preprocess.text.chat_template import ChatTemplate
from kvlane.streams.clock import SystemClock
from kvlane.streams.records import ModelCard

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
TOKENS = {"token_ids": [1, 2]}
MINIMAL: dict[TokenizedKind, dict[str, Any]] = {
    "chat": CHAT,
    "completion": COMPLETION,
    "tokens": TOKENS,
}
KINDS: tuple[TokenizedKind, ...] = ("chat", "completion", "tokens")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def problem(kind: TokenizedKind, **fields: Any) -> InvalidPrompt:
    with pytest.raises(InvalidPrompt) as raised:
        read_openai(kind, MINIMAL[kind] | fields)
    return raised.value


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_is_enough(kind: TokenizedKind) -> None:
    sent = read_openai(kind, MINIMAL[kind])
    assert (sent.model, sent.n, sent.stream, sent.include_usage) == ("", 1, False, False)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_are_ignored(kind: TokenizedKind) -> None:
    assert read_openai(kind, {**MINIMAL[kind], "store": True, "nvext": {"newer": 1}})


ASKING: dict[str, Any] = {
    "use_beam_search": True, "length_penalty": 2, "truncate_prompt_tokens": 5, "bad_words": ["x"],
    "chat_template": "{{ 1 }}", "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "audio": {"voice": "x"}, "modalities": ["text", "audio"], "prediction": {"type": "content"},
    "web_search_options": {}, "service_tier": "flex", "verbosity": "low", "suffix": "x",
    "logits_processors": ["x"], "continue_final_message": True,
    "spaces_between_special_tokens": False, "return_token_ids": True, "vllm_xargs": {"a": 1},
    "priority": 1, "repetition_detection": {}, "truncation_side": "left", "detokenize": False,
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "functions": [],
    "function_call": "none", "modalities": ["text"], "service_tier": "auto", "suffix": "",
    "include_reasoning": True, "spaces_between_special_tokens": True, "priority": 0,
    "vllm_xargs": {}, "user": "x", "metadata": {"a": "b"}, "safety_identifier": "x",
    "parallel_tool_calls": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ASKING)
def test_field_that_is_not_honoured_is_refused(kind: TokenizedKind, field: str) -> None:
    assert problem(kind, **{field: ASKING[field]}).field == field
    assert read_openai(kind, MINIMAL[kind] | {field: None})


@pytest.mark.parametrize("kind", KINDS)
def test_neutral_values_of_such_fields_and_labels_pass(kind: TokenizedKind) -> None:
    assert read_openai(kind, MINIMAL[kind] | NEUTRAL)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, None),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, None),
        ({"echo": True}, "echo"),
        ({"add_special_tokens": True}, "add_special_tokens"),
    ],
)
def test_option_of_a_chat_that_is_not_honoured_is_refused(
    fields: dict[str, Any], field: str | None
) -> None:
    nested = problem("chat", **fields).field
    assert nested == field or (field is None and "." in nested)


def test_true_is_no_number() -> None:
    assert problem("chat", length_penalty=True).field == "length_penalty"
    assert problem("chat", use_beam_search=0).field == "use_beam_search"


def test_echo_has_no_log_probabilities() -> None:
    assert problem("completion", echo=True, logprobs=0).field == "echo"
    assert read_openai("completion", COMPLETION | {"echo": True, "logprobs": None})


@pytest.mark.parametrize("kind", KINDS)
def test_budget_of_thinking_has_the_name_of_vllm_too(kind: TokenizedKind) -> None:
    card = ModelCard(name="m")
    sent = read_openai(kind, MINIMAL[kind] | {"thinking_token_budget": 7})
    assert sent.requests([[1]], card)[0].stop.max_thinking_tokens == 7
    both = {"thinking_token_budget": 7, "nvext": {"max_thinking_tokens": 0}}
    sent = read_openai(kind, MINIMAL[kind] | both)
    assert sent.requests([[1]], card)[0].stop.max_thinking_tokens == 0


def test_reasoning_effort_is_a_variable_of_the_template() -> None:
    sent = read_openai("chat", CHAT | {"reasoning_effort": "low"})
    assert sent.prompts(ChatTemplate("[{{ reasoning_effort }}]", SystemClock())) == ["[low]"]
    with pytest.raises(InvalidPrompt, match="no such variable") as raised:
        sent.prompts(ChatTemplate("{{ messages[0].content }}", SystemClock()))
    assert raised.value.field == "reasoning_effort"


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_as_good_as_nothing(kind: TokenizedKind) -> None:
    body = read_openai(kind, MINIMAL[kind]).body
    nulls = dict.fromkeys(type(body).model_fields)
    assert read_openai(kind, {**nulls, **MINIMAL[kind]}).body == body


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 7),
        ("model", "m" * 201),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", "0.5"),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("seed", 1.5),
        ("n", 0),
        ("n", MAX_CHOICES + 1),
        ("stop", 7),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("stop_token_ids", [-1]),
        ("ignore_eos", "yes"),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("response_format", "json"),
        ("stream", "true"),
        ("stream_options", True),
        ("user", 7),
        ("nvext", [1]),
        ("mm_processor_kwargs", [1]),
    ],
)
def test_wrong_field_is_named(kind: TokenizedKind, field: str, value: Any) -> None:
    assert problem(kind, **{field: value}).field.split(".")[0] == field


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_field_inside_another_is_named_by_its_path(kind: TokenizedKind) -> None:
    assert problem(kind, stop=["a", ""]).field == "stop.1"
    assert problem(kind, stream=True, stream_options={"include_usage": 1}).field == (
        "stream_options.include_usage"
    )
    assert problem(kind, nvext={"agent_hints": {"osl": -1}}).field == "nvext.agent_hints.osl"


def test_error_does_not_quote_the_input() -> None:
    assert "secret" not in str(problem("chat", temperature="secret"))


def test_error_names_the_first_wrong_fields_and_counts_the_others() -> None:
    wrong = problem("chat", model=7, top_p=7, seed="x", n="x", user=7)
    assert wrong.field == "model"
    assert "top_p" in wrong.message
    assert wrong.message.endswith("and 2 more")


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_stop_is_a_string_or_a_list(stop: Any) -> None:
    assert read_openai("chat", CHAT | {"stop": stop}).body.stop == ["a"]


def test_integral_floats_are_accepted_where_floats_are() -> None:
    assert read_openai("chat", CHAT | {"temperature": 1}).body.temperature == 1.0


# --- streams --------------------------------------------------------------------------------------


def test_usage_at_the_end_of_a_stream_is_an_option() -> None:
    sent = read_openai("chat", CHAT | {"stream": True, "stream_options": {"include_usage": True}})
    assert (sent.stream, sent.include_usage) == (True, True)


def test_options_of_a_stream_need_a_stream() -> None:
    assert problem("chat", stream_options={"include_usage": True}).field == "stream_options"


# --- several answers ------------------------------------------------------------------------------


def test_best_of_several_answers_is_not_supported() -> None:
    assert read_openai("completion", COMPLETION | {"n": 2, "best_of": 2}).n == 2
    assert problem("completion", n=1, best_of=2).field == "best_of"


def test_prompts_times_answers_are_bounded() -> None:
    many = ["a"] * (MAX_CHOICES // 2)
    assert read_openai("completion", {"prompt": many, "n": 2}).n == 2
    assert problem("completion", prompt=many, n=3).field == "n"


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ([7], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "", "content": "hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": ""}, {"role": "user"}], "messages.1.content"),
        ([{"role": "user", "content": 7}], "messages.0.content"),
        ([{"role": "user", "content": [7]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages.0.content.0.type",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function"),
    ],
)
def test_wrong_message_is_named(messages: Any, field: str) -> None:
    assert problem("chat", messages=messages).field == field


def test_chat_needs_messages() -> None:
    with pytest.raises(InvalidPrompt) as raised:
        read_openai("chat", {})
    assert raised.value.field == "messages"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "x", "content": "49"},
        {"role": "developer", "content": "be brief", "name": "x"},
    ],
)
def test_messages_have_many_forms(message: dict[str, Any]) -> None:
    assert read_openai("chat", {"messages": [message]}).messages == [message]


def test_newer_name_of_the_limit_takes_precedence() -> None:
    body = read_openai("chat", CHAT | {"max_tokens": 5, "max_completion_tokens": 7}).body
    assert body.max_tokens_field() == ("max_completion_tokens", 7)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_probabilities_of_a_chat_have_a_switch_and_a_number(
    fields: dict[str, Any], wanted: int | None
) -> None:
    assert read_openai("chat", CHAT | fields).body.top_logprobs_count() == wanted


def test_number_of_probabilities_needs_the_switch() -> None:
    assert problem("chat", top_logprobs=5).field == "top_logprobs"


def test_probabilities_of_a_completion_are_a_number() -> None:
    assert read_openai("completion", COMPLETION | {"logprobs": 3}).body.top_logprobs_count() == 3


# --- tools ----------------------------------------------------------------------------------------


def test_tools_come_as_they_are() -> None:
    tool = TOOL | {"newer": 1}
    assert read_openai("chat", CHAT | {"tools": [tool]}).tools == [tool]


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, "none"),
        ({"tools": [TOOL]}, "auto"),
        ({"tools": [TOOL], "tool_choice": "none"}, "none"),
        ({"tools": [TOOL], "tool_choice": "required"}, "required"),
    ],
)
def test_choice_of_a_tool_has_a_default(fields: dict[str, Any], choice: str) -> None:
    assert read_openai("chat", CHAT | fields).tool_choice == choice


def test_tool_may_be_chosen_by_name() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    assert (
        read_openai("chat", CHAT | {"tools": [TOOL], "tool_choice": choice}).tool_choice == choice
    )


def test_empty_list_of_tools_is_as_good_as_none() -> None:
    assert read_openai("chat", CHAT | {"tools": []}).tools is None


def test_tool_choice_none_renders_no_tools() -> None:
    assert read_openai("chat", CHAT | {"tools": [TOOL], "tool_choice": "none"}).tools is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
    ],
)
def test_wrong_tool_is_named(fields: dict[str, Any], field: str) -> None:
    assert problem("chat", **fields).field == field


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompt_is_text_tokens_or_a_list_of_either(prompt: Any, prompts: Any) -> None:
    assert read_openai("completion", {"prompt": prompt}).prompts(None) == prompts


@pytest.mark.parametrize(
    "prompt", [7, None, [], [[]], [1, "a"], [1, -1], [1, 2**32], [[1.5]], [True], {"a": 1}, [None]]
)
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    assert problem("completion", prompt=prompt).field == "prompt"


def test_text_after_the_gap_is_not_supported() -> None:
    assert read_openai("completion", COMPLETION | {"suffix": ""})
    assert problem("completion", suffix="x").field == "suffix"


@pytest.mark.parametrize(("tokens", "field"), [([], "token_ids"), ([1, "a"], "token_ids.1")])
def test_tokens_are_numbers(tokens: Any, field: str) -> None:
    assert problem("tokens", token_ids=tokens).field == field
