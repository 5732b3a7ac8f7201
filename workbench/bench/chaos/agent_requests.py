"""Requests of agents under faults: their answers have reasoning and two calls of tools.

The engine echo repeats a message, so each message is the answer that it asks for. The parts of an
answer form one text, in order: reasoning, content, and calls with number, name and arguments. A
part that is lost, repeated or changed is one of this text, and so is a call with a wrong id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlane.app.engine.simulated.text_generator import ExpectedAnswer
from kvlane.app.http.openai.passthrough_fields import JsonObject, split_chunk
from kvlane.app.text.answer_parts import call_id
from kvlane.app.text.byte_level import encode_bytes
from kvlane.streams.records import Chunk

AGENT_MODEL = "agent"
"""Its workers have the engine echo."""
AGENTS_EVERY = 3
"""One request in so many is an agent's."""
_TOOLS = ("look", "listen")


class AgentRequest(NamedTuple):
    """The body of a request, and its answer. `content`: the answer without reasoning and calls."""

    body: JsonObject
    expected: ExpectedAnswer
    content: str


def agent_request(words: str) -> AgentRequest:
    """The request whose answer has these words in each of its parts."""
    reasoning, content = f"These are {words}.", f"I look at {words}.\n"
    arguments = [json.dumps({"place": words, "number": n}) for n, _ in enumerate(_TOOLS)]
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'
        for name, given in zip(_TOOLS, arguments, strict=True)
    ]
    message = f"<think>{reasoning}</think>{content}{''.join(calls)}"
    body = {
        "model": AGENT_MODEL,
        "messages": [{"role": "user", "content": message}],
        "tools": [{"type": "function", "function": {"name": name}} for name in _TOOLS],
    }
    called = "".join(
        _begun(n, name, is_own=True) + given
        for n, (name, given) in enumerate(zip(_TOOLS, arguments, strict=True))
    )
    expected = ExpectedAnswer(
        tuple(encode_bytes(message)), reasoning + content + called, "tool_calls"
    )
    return AgentRequest(body, expected, content)


def text_of_delta(delta: Mapping[str, Any], request_id: str) -> str:
    """The parts of a delta of OpenAI's form as text."""
    text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
    for call in delta.get("tool_calls") or ():
        function, number = call["function"], call["index"]
        if name := function.get("name"):
            text += _begun(number, name, is_own=call["id"] == call_id(request_id, number))
        text += function.get("arguments") or ""
    return text


def text_of_chunk(chunk: Chunk) -> str:
    """The parts of a chunk as text."""
    return "".join(
        "".join(text_of_delta(aside.delta, chunk.id) for aside in part.data) + part.text
        for part in split_chunk(chunk)
    )


def _begun(number: int, name: str, *, is_own: bool) -> str:
    return f"[{number} {name}{'' if is_own else ' with a wrong id'}]"
