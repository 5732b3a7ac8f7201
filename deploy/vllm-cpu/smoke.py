#!/usr/bin/env python3
"""Try the real vLLM on this CPU: does it generate, announce its cache, reuse it and hand it over?

    python deploy/vllm-cpu/smoke.py [FOLDER]      FOLDER keeps the tiny model for the next time

Takes about a minute. Every check prints one line; the exit status is 0 when all of them hold.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = list(range(100, 200))
BLOCK_SIZE = 32  # tokens; the smallest that vLLM's attention on CPUs takes
OUTPUT_TOKENS = 20

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    # One process and one thread an engine: with the defaults they fight over small machines.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def report(text: str, since: float) -> None:
    """One line with the seconds since then."""
    print(f"{time.monotonic() - since:6.1f} s  {text}", flush=True)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def make_model(folder: Path) -> None:
    """A Llama of two layers with random weights; its tokenizer learns from the standard library."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(p) for p in sorted(Path(asyncio.__file__).parent.glob("*.py"))], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


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
    """Every check in turn; an AssertionError names the one that does not hold."""
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
            await asyncio.sleep(0.5)  # a subscription says nothing when it stands
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
    """Make the model unless it is there, then check."""
    since = time.monotonic()
    import vllm

    report(f"vLLM {vllm.__version__} is imported", since)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(sys.argv[1] if len(sys.argv) > 1 else scratch) / "tiny-llama"
        if not (model / "config.json").exists():
            make_model(model)
            report("tiny model is made", since)
        asyncio.run(check(model, since))
    report("all checks hold", since)


if __name__ == "__main__":
    main()
