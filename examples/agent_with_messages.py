"""An agent with two tools, by Anthropic's client: it calls them until the model answers in text.

    KVLANE_ENGINE=echo KVLANE_ECHO_SCRIPT=examples/agent_script.json kvlane up
    python examples/agent_with_messages.py

The script stands for a model, so that no GPU is needed. Argument: the URL of a gateway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MAX_TURNS = 8
TOOLS: dict[str, Callable[..., str]] = {
    "weather": lambda city: f"rain in {city}",
    "trains": lambda city: f"the train to {city} leaves at 9:41",
}


def described(name: str) -> ToolParam:
    """A tool as the model is shown it."""
    city: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"name": name, "input_schema": city}


def main() -> None:
    client = Anthropic(base_url=URL, api_key="-")
    model = client.models.list().data[0].id
    messages: list[MessageParam] = [{"role": "user", "content": "Shall I take the train to Köln?"}]
    for _ in range(MAX_TURNS):
        answer = client.messages.create(
            model=model, max_tokens=500, messages=messages,
            tools=[described(name) for name in TOOLS],
        )  # fmt: skip
        results: list[ToolResultBlockParam] = []
        for block in answer.content:
            if block.type == "tool_use":
                result = TOOLS[block.name](**block.input)
                print(f"{block.name}: {result}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
            elif block.type == "text" and answer.stop_reason != "tool_use":
                print(block.text)
        if not results:
            return
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main()
