"""Tests of bodies of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import pytest

from kvlane.app.http.responses.response_requests import read_response
from kvlane.app.preprocess.prompt_errors import InvalidPrompt
from kvlane.app.preprocess.requests.openai_requests import read_openai

ASKED: dict[str, Any] = {"model": "m", "input": "hi"}


def test_options_of_vllm_are_those_of_a_chat() -> None:
    options = {"seed": 7, "stop": ["x"], "top_k": 3, "repetition_penalty": 1.5, "logit_bias": {}}
    body = read_openai("chat", read_response(ASKED | options).chat()).body
    assert (body.seed, body.stop, body.top_k, body.repetition_penalty) == (7, ["x"], 3, 1.5)


@pytest.mark.parametrize(
    "option",
    [{"seed": "many"}, {"priority": 3}, {"vllm_xargs": {"a": 1}}, {"top_k": -7}, {"stop": 5}],
)
def test_option_of_vllm_that_is_wrong_or_not_honoured_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidPrompt) as raised:
        read_openai("chat", read_response(ASKED | option).chat())
    assert raised.value.field in option
