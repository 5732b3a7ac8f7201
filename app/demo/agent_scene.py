"""The agent of the demo: two tools, a script for a model, and an interruption in a call."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import openai

MODEL = "scripted"
QUESTION = "Shall I take the train to Köln?"
TOOLS: Mapping[str, str] = {"weather": "rain in Köln", "trains": "the train leaves at 9:41"}
ANSWER = "Yes: it rains in Köln, and the train leaves at 9:41."
ARGUMENTS = '{"city": "Köln", "days": ["today", "tomorrow"], "language": "English"}'
TOKEN_MS = 15.0


class AgentCall(NamedTuple):
    """A tool call as it arrived. `begins`: how often its name came."""

    id: str
    name: str
    arguments: str
    begins: int


class AgentTurn(NamedTuple):
    """One answer. `request_id`: of its stream."""

    request_id: str
    text: str
    calls: tuple[AgentCall, ...]

    @property
    def message(self) -> dict[str, Any]:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.calls
        ]
        return {"role": "assistant", "content": self.text, "tool_calls": calls}


OnArguments = Callable[[str, AgentCall], Awaitable[None]]
"""Called with the id of a stream and its last call so far, after each part of its arguments."""


def script_file() -> tuple[TemporaryDirectory[str], Path]:
    """The answers of the model in a file, and the folder that removes it."""
    call = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    weather, trains = (call.format(name=name, arguments=ARGUMENTS) for name in TOOLS)
    answers = {
        QUESTION: f"<think>The weather decides.</think>I look at the weather first.\n{weather}",
        TOOLS["weather"]: trains,
        TOOLS["trains"]: ANSWER,
    }
    folder = TemporaryDirectory(prefix="kvlane-agent-")
    path = Path(folder.name) / "script.json"
    path.write_text(json.dumps(answers))
    return folder, path


async def take_turn(
    client: openai.AsyncOpenAI, messages: list[Any], on_arguments: OnArguments
) -> AgentTurn:
    tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    stream: Any = await client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, stream=True
    )
    request_id = stream.response.headers["x-kvlane-id"]
    text, calls = "", dict[int, AgentCall]()
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                known = calls.get(part.index, AgentCall("", "", "", 0))
                calls[part.index] = known = AgentCall(
                    known.id + (part.id or ""),
                    known.name + (part.function.name or ""),
                    known.arguments + (part.function.arguments or ""),
                    known.begins + bool(part.id),
                )
                await on_arguments(request_id, known)
    return AgentTurn(request_id, text, tuple(calls.values()))


def is_whole(turns: list[AgentTurn]) -> bool:
    calls = [call for turn in turns for call in turn.calls]
    return (
        [(call.name, call.arguments, call.begins) for call in calls]
        == [(name, ARGUMENTS, 1) for name in TOOLS]
        and len({call.id for call in calls}) == len(calls)
        and turns[-1].text == ANSWER
    )
