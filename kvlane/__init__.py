"""Public interface of kvlane: the client, the engine interface, and the KV cache index.

    from kvlane import Client, KafkaConnection, KafkaLog, Prompt, SystemClock   # ask over Kafka
    from kvlane import Engine, EngineConfig, EngineOutput, worker_app      # serve an engine
    from kvlane import Index, hash_blocks                                  # the index alone

Names are imported on first use: `import kvlane` loads nothing else, and only the engine interface
and the index load numba (0.3 s). The programs in `examples/` use each group; `kvlane.testing` has a
deployment in memory for tests. Everything below `kvlane.app`, `kvlane.streams` and
`kvlane.indexer` is internal and may change in any version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlane.kafka import (
        BrokerUnavailable,
        Chunk,
        Client,
        End,
        KafkaConnection,
        KafkaLog,
        Prompt,
        Reply,
        StreamError,
        SystemClock,
    )
    from kvlane.kv_index import (
        BlockHashes,
        CacheEvent,
        CacheId,
        EventKind,
        Index,
        encode_events,
        hash_blocks,
        index_secret,
        prompt_keys,
    )
    from kvlane.serving import (
        Engine,
        EngineConfig,
        EngineError,
        EngineOutput,
        GenerateContext,
        InvalidRequest,
        Request,
        prompt_tokens,
        token_usage,
        worker_app,
    )

__all__ = [
    "BlockHashes", "BrokerUnavailable", "CacheEvent", "CacheId", "Chunk", "Client", "End", "Engine",
    "EngineConfig", "EngineError", "EngineOutput", "EventKind", "GenerateContext", "Index",
    "InvalidRequest", "KafkaConnection", "KafkaLog", "Prompt", "Reply", "Request", "StreamError",
    "SystemClock", "encode_events", "hash_blocks", "index_secret", "prompt_keys", "prompt_tokens",
    "token_usage", "worker_app",
]  # fmt: skip

_MODULES = {
    "kafka": (
        "BrokerUnavailable", "Chunk", "Client", "End", "KafkaConnection", "KafkaLog", "Prompt",
        "Reply", "StreamError", "SystemClock",
    ),
    "kv_index": (
        "BlockHashes", "CacheEvent", "CacheId", "EventKind", "Index", "encode_events",
        "hash_blocks", "index_secret", "prompt_keys",
    ),
    "serving": (
        "Engine", "EngineConfig", "EngineError", "EngineOutput", "GenerateContext",
        "InvalidRequest", "Request", "prompt_tokens", "token_usage", "worker_app",
    ),
}  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"kvlane.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
