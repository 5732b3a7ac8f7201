"""What vLLM loads at its start: the entry point `kvlane` of `vllm.general_plugins`.

Every process of vLLM calls `register`, of servers that were started by others too. It changes
nothing but what becomes of cache events whose endpoint begins with `kvlane+`:

    --kv-events-config '{"enable_kv_cache_events": true, "endpoint": "kvlane+tcp://*:5557"}'

publishes as vLLM does, to whoever follows, without ever holding up a step of the engine.
"""

from __future__ import annotations

from typing import Any

GROUP = "vllm.general_plugins"
NAME = "kvlane"
SCHEME = "kvlane+"
"""What our endpoints begin with."""


def register() -> None:
    """Publish through our publisher where the endpoint says so. Idempotent."""
    from vllm.distributed.kv_events import EventPublisherFactory

    from app.engine.vllm.publisher import Publisher

    known = EventPublisherFactory._registry  # noqa: SLF001 - its config allows no new names
    plain = known["zmq"]
    if getattr(plain, "of_kvlane", False):
        return

    def by_endpoint(**options: Any) -> Any:
        ours = str(options.get("endpoint", "")).startswith(SCHEME)
        return (Publisher if ours else plain)(**options)

    by_endpoint.of_kvlane = True  # type: ignore[attr-defined]
    known["zmq"] = by_endpoint
