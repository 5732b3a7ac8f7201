"""OpenAI's own package on a kvlane gateway: stream the answer to a chat.

kvlane up                                  # in another shell
python examples/openai_client.py           # pip install openai

OPENAI_BASE_URL and OPENAI_API_KEY name another gateway, as `kvlane up` prints them.
"""

from __future__ import annotations

import os

from openai import OpenAI

base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
# Without API keys (docs/access.md) the gateway ignores the key, but the package asks for one.
api_key = os.environ.get("OPENAI_API_KEY", "none")
with OpenAI(base_url=base_url, api_key=api_key) as client:
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is a log?"}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        if event.usage is not None:  # the last event
            print(f"\n{event.usage.completion_tokens} tokens")
