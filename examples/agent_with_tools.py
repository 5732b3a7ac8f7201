"""An agent with two tools, by OpenAI's client: it calls them until the model answers in text.

    KVLANE_ENGINE=echo KVLANE_ECHO_SCRIPT=examples/agent_script.json kvlane up
    python examples/agent_with_tools.py

The script stands for a model, so that no GPU is needed. Argument: the URL of a gateway.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MAX_TURNS = 8


def weather(city: str) -> str:
    return f"rain in {city}"


def trains(city: str) -> str:
    return f"the train to {city} leaves at 9:41"


TOOLS: dict[str, Callable[..., str]] = {"weather": weather, "trains": trains}


def described(name: str) -> ChatCompletionToolParam:
    """A tool as the model is shown it."""
    city: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": city}}


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="-")
    model = client.models.list().data[0].id
    question = "Shall I take the train to Köln?"
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[described(name) for name in TOOLS]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.to_dict())  # type: ignore[arg-type]
        for call in message.tool_calls:
            assert call.type == "function"
            tool, arguments = TOOLS[call.function.name], json.loads(call.function.arguments)
            result = tool(**arguments)
            print(f"{call.function.name}: {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
