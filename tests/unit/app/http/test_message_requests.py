"""Tests of bodies of Anthropic's Messages API."""

from __future__ import annotations

from kvlane.app.http.anthropic.message_requests import chat_of


def test_null_input_of_a_tool_is_an_empty_one() -> None:
    use = {"type": "tool_use", "id": "a", "name": "now", "input": None, "cache_control": None}
    result = {"type": "tool_result", "tool_use_id": "a", "content": None, "is_error": None}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    chat = chat_of({"model": "m", "max_tokens": 3, "messages": turns})
    assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert chat["messages"][2]["content"] == ""
