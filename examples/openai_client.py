"""OpenAI's own package on a kvlane gateway: stream the answer to a chat.

kvlane up                                  # in another shell
python examples/openai_client.py           # pip install openai; or give another base URL
"""

from __future__ import annotations

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
# Without API keys (docs/access.md) the gateway ignores the key, but the package asks for one.
with OpenAI(base_url=f"{base_url}/v1", api_key="none") as client:
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
