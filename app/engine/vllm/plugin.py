"""Plugin of vLLM: the entry point `kvlane` of `vllm.general_plugins`.

Every process of vLLM calls `register`, also in servers that kvlane has not started. It changes
requests with a field of kvlane's own, which continue a guided answer (`guided_resume.py`), and the
publication of cache events whose endpoint begins with `kvlane+`:

    --kv-events-config '{"enable_kv_cache_events": true, "endpoint": "kvlane+tcp://*:5557"}'

publishes in vLLM's format, without ever delaying a step of the engine.
"""

from __future__ import annotations

from typing import Any

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT_NAME = "kvlane"
ENDPOINT_PREFIX = "kvlane+"
"""Prefix of endpoints that `zmq_publisher.py` serves."""


def register() -> None:
    """Continue guided answers, and use kvlane's publisher for endpoints with the prefix.
    Idempotent."""
    from vllm.distributed.kv_events import EventPublisherFactory

    from kvlane.app.engine.vllm import guided_resume
    from kvlane.app.engine.vllm.zmq_publisher import NonBlockingPublisher

    guided_resume.install()

    known = EventPublisherFactory._registry  # noqa: SLF001 - vLLM's config accepts no new names
    plain = known["zmq"]
    if getattr(plain, "is_kvlane", False):
        return

    def by_endpoint(**options: Any) -> Any:
        if not str(options.get("endpoint", "")).startswith(ENDPOINT_PREFIX):
            return plain(**options)
        for name in ("endpoint", "replay_endpoint"):
            if options.get(name) is not None:
                options[name] = options[name].removeprefix(ENDPOINT_PREFIX)
        return NonBlockingPublisher(**options)

    by_endpoint.is_kvlane = True  # type: ignore[attr-defined]
    known["zmq"] = by_endpoint
