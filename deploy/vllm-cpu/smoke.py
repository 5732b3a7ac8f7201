#!/usr/bin/env python3
"""A smoke test of vLLM on this CPU: generation, cache events, cache reuse, and KV transfer.

    python deploy/vllm-cpu/smoke.py [FOLDER]      FOLDER keeps the tiny model for the next time

Takes about a minute. Every check prints one line; the exit status is 0 when all of them pass.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvlane.app.demo import tiny_model
from kvlane.app.engine.vllm.async_llm import make_fork_safe
from kvlane.app.local.processes import free_port

PROMPT = list(range(100, 200))
BLOCK_SIZE = tiny_model.BLOCK_SIZE
OUTPUT_TOKENS = 20

os.environ |= tiny_model.environment() | {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}


def report(text: str, since: float) -> None:
    """One line with the seconds since then."""
    print(f"{time.monotonic() - since:6.1f} s  {text}", flush=True)


def make_engine(model: Path, **options: Any) -> Any:
    """An engine with a cache of 39 blocks, in this process as far as vLLM allows."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=40,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        **options,
    ).create_engine_config()
    make_fork_safe()  # kvlane has loaded its kernels into this process
    # Set only now, since making the configuration sets `spawn`, which starts seconds later.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


async def generate(engine: Any, name: str, transfer: dict[str, Any] | None = None) -> Any:
    """The engine's last output for the prompt; a prefill for another engine makes one token."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    is_prefill = bool(transfer and transfer.get("do_remote_decode"))
    params = SamplingParams(
        max_tokens=1 if is_prefill else OUTPUT_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    outputs = [output async for output in engine.generate(tokens_input(PROMPT), params, name)]
    return outputs[-1]


def tokens_of(output: Any) -> list[int]:
    """The tokens of the only answer."""
    return list(output.outputs[0].token_ids)


async def check_cache(engine: Any, events: Any) -> list[int]:
    """Three full blocks are announced and reused; returns the tokens, which stay the same."""
    import msgspec

    first = tokens_of(await generate(engine, "first"))
    again = await generate(engine, "again")
    assert len(first) == OUTPUT_TOKENS
    assert tokens_of(again) == first
    assert again.num_cached_tokens == 3 * BLOCK_SIZE
    _, sequence, payload = await asyncio.wait_for(events.recv_multipart(), timeout=5)
    _, (stored, *_), rank = msgspec.msgpack.decode(payload)
    assert (int.from_bytes(sequence, "big"), rank) == (0, 0)
    assert (stored["type"], stored["block_size"]) == ("BlockStored", BLOCK_SIZE)
    assert len(stored["block_hashes"]) == 3
    return first


async def check_handover(prefill: Any, decode: Any, expected: list[int]) -> None:
    """One engine reads the prompt, another continues from its cache with the same tokens."""
    wish = {"do_remote_decode": True, "do_remote_prefill": False}
    handle = (await generate(prefill, "handover", wish)).kv_transfer_params
    assert handle["remote_num_tokens"] == len(PROMPT)
    output = await asyncio.wait_for(generate(decode, "handover", handle), timeout=60)
    assert tokens_of(output) == expected


async def check(model: Path, since: float) -> None:
    """Run every check; an AssertionError names the one that fails."""
    import zmq
    import zmq.asyncio
    from vllm.config import KVEventsConfig, KVTransferConfig

    endpoint = f"tcp://*:{free_port()}"
    engine = make_engine(
        model,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv"
        ),
    )
    engines = [engine]
    report("engine is up", since)
    try:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
            events.connect(endpoint.replace("*", "127.0.0.1"))
            events.subscribe(b"")
            await asyncio.sleep(0.5)  # a subscription is not acknowledged
            tokens = await check_cache(engine, events)
        report("cache events and prefix reuse hold", since)
        for role in ("kv_producer", "kv_consumer"):
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            transfer = KVTransferConfig(
                kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu"
            )
            engines.append(make_engine(model, kv_transfer_config=transfer))
        await check_handover(engines[1], engines[2], tokens)
        report("prefill in one engine and decode in another hold", since)
    finally:
        for started in engines:
            started.shutdown()


def main() -> None:
    """Make the model unless it exists, then run the checks."""
    since = time.monotonic()
    import vllm

    report(f"vLLM {vllm.__version__} is imported", since)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(sys.argv[1] if len(sys.argv) > 1 else scratch) / "tiny-llama"
        if not (model / "config.json").exists():
            tiny_model.make_model(model)
            report("tiny model is made", since)
        asyncio.run(check(model, since))
    report("all checks hold", since)


if __name__ == "__main__":
    main()
