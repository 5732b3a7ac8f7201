"""A worker around an engine of your own: it answers with the prompt in upper case.

KVLANE_MODEL is not used: the engine names its model. Beside a deployment (`kvlane up --port 9092`):

    KVLANE_BOOTSTRAP_SERVERS=127.0.0.1:9092 faststream run examples.custom_engine:app
    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
      -d '{"model":"shout","prompt":"hello","max_tokens":5}'

Without KVLANE_MODEL_PATH a token is a byte of the text, so that this needs no tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvlane import (
    Engine,
    EngineConfig,
    EngineOutput,
    GenerateContext,
    Request,
    prompt_tokens,
    token_usage,
    worker_app,
)

CONTEXT_LENGTH = 4096


class ShoutEngine(Engine):
    """Repeats the prompt in upper case, a token every 20 ms."""

    async def start(self, worker_id: str) -> EngineConfig:
        """Load the model. Routers learn these properties from the worker's card."""
        print(f"engine of {worker_id} starts")
        # With a block size and cache events (`Engine.set_kv_event_listener`), requests are routed
        # by cache.
        return EngineConfig(model="shout", context_length=CONTEXT_LENGTH, max_num_seqs=8)

    async def generate(
        self, request: Request, context: GenerateContext
    ) -> AsyncGenerator[EngineOutput, None]:
        """Generate one answer. Many run concurrently, so nothing here may block the event loop."""
        # After a failover the tokens of the earlier attempt are part of `prompt`. A real model
        # continues the text from there; this one would start again after them.
        prompt = prompt_tokens(request)
        limit = min(request.stop.max_tokens or len(prompt), CONTEXT_LENGTH - len(prompt))
        made = 0
        for token in prompt[:limit]:
            await asyncio.sleep(0.02)
            if context.is_stopped:  # cancelled, or past its deadline
                yield EngineOutput.cancelled()
                return
            made += 1
            yield EngineOutput.token(ord(chr(token).upper()) if token < 128 else token)
        # The last output has a finish reason; token counts are optional.
        last = EngineOutput.length() if made == limit else EngineOutput.stop()
        yield last.with_usage(token_usage(len(prompt), made))

    async def cleanup(self) -> None:
        """Release everything that `start` took."""


app = worker_app(ShoutEngine)
