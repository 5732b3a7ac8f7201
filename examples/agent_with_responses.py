"""An agent with two tools, by OpenAI's newer API: the gateway stores the history.

    KVLANE_ENGINE=echo KVLANE_ECHO_SCRIPT=examples/agent_script.json kvlane up
    python examples/agent_with_responses.py

The script stands for a model, so that no GPU is needed. Argument: the URL of a gateway.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from openai import OpenAI
from openai.types.responses import FunctionToolParam, ResponseInputItemParam

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
MAX_TURNS = 8
TOOLS: dict[str, Callable[..., str]] = {
    "weather": lambda city: f"rain in {city}",
    "trains": lambda city: f"the train to {city} leaves at 9:41",
}


def described(name: str) -> FunctionToolParam:
    """A tool as the model is shown it."""
    city: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "name": name, "parameters": city, "strict": True}


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="-")
    model = client.models.list().data[0].id
    items: list[ResponseInputItemParam] = [
        {"role": "user", "content": "Shall I take the train to Köln?"}
    ]
    previous: str | None = None
    for _ in range(MAX_TURNS):
        answer = client.responses.create(
            model=model, input=items, tools=[described(name) for name in TOOLS],
            previous_response_id=previous,
        )  # fmt: skip
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            print(answer.output_text)
            return
        previous, items = answer.id, []
        for call in calls:
            result = TOOLS[call.name](**json.loads(call.arguments))
            print(f"{call.name}: {result}")
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )


if __name__ == "__main__":
    main()
