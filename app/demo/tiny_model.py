"""A tiny Llama model for any CPU or GPU: two layers of random weights.

`python -m kvlane.app.demo.tiny_model FOLDER` writes one. Its text makes no sense, but depends on
every token before. Needs `safetensors`, a dependency of vLLM.

`--large`: the layers of Llama 3.2 1B without weights, to measure on a GPU: vLLM's argument
`"load_format": "dummy"` makes random ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvlane.app.engine.simulated.text_generator import demo_sentences
from kvlane.app.engine.vllm.versions import is_cpu_build

VOCABULARY_SIZE = 1024
LAYERS = 2
HEADS = 2
HEAD_SIZE = 32
HIDDEN_SIZE = HEADS * HEAD_SIZE
INTERMEDIATE_SIZE = 128
MAX_POSITIONS = 2048
BLOCK_SIZE = 32
"""Tokens in a block of its cache: the fewest that vLLM's attention on CPUs takes."""
SPECIAL = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # One process and one thread an engine: with the defaults they compete for few cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # saves another import of vLLM for each engine
    "TORCHDYNAMO_DISABLE": "1",  # compiling for log probabilities takes 20 s, at the first request
}

LARGE: dict[str, Any] = {
    "torch_dtype": "bfloat16", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
Weights = dict[str, NDArray[np.float32]]


def environment() -> dict[str, str]:
    """Environment variables for vLLM on few cores and without a network."""
    return dict(_ENV)


def engine_arguments(blocks: int = 128, context_length: int = 1024) -> dict[str, Any]:
    """Arguments of `vllm.AsyncEngineArgs` for this model; `blocks`: size of its cache."""
    return {
        "dtype": "float32",
        "max_model_len": context_length,
        "max_num_batched_tokens": max(context_length, 512),
        "max_num_seqs": 16,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": blocks + 1,  # one block is vLLM's null block
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.2,  # vLLM starts only where this share of a GPU is free
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
    }


def connector_arguments(lease_s: int = 30) -> dict[str, Any]:
    """Arguments of `vllm.AsyncEngineArgs` for prefill and decode workers."""
    return {
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s},
        }
        | ({"kv_buffer_device": "cpu"} if is_cpu_build() else {})
    }


def make_model(folder: Path) -> Path:
    from safetensors.numpy import save_file

    _write_files(folder)
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_files(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "model_max_length": MAX_POSITIONS, "chat_template": TEMPLATE,
    })  # fmt: skip
    _write(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "vocab_size": VOCABULARY_SIZE, "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE, "max_position_embeddings": MAX_POSITIONS, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes,
    })  # fmt: skip


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(demo_sentences(), trainer)
    return tokenizer


def _weights() -> Weights:
    """Weights with sharp attention, so that early tokens matter, unlike in untrained models."""
    rng = np.random.default_rng(0)
    weights: Weights = {
        "model.embed_tokens.weight": _normal(rng, 1.0, VOCABULARY_SIZE, HIDDEN_SIZE),
        "model.norm.weight": np.ones(HIDDEN_SIZE, np.float32),
        "lm_head.weight": _normal(rng, 0.5, VOCABULARY_SIZE, HIDDEN_SIZE),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            weights[f"{name}.self_attn.{part}_proj.weight"] = _normal(
                rng, 0.25, HIDDEN_SIZE, HIDDEN_SIZE
            )
        weights[f"{name}.mlp.gate_proj.weight"] = _normal(rng, 0.2, INTERMEDIATE_SIZE, HIDDEN_SIZE)
        weights[f"{name}.mlp.up_proj.weight"] = _normal(rng, 0.2, INTERMEDIATE_SIZE, HIDDEN_SIZE)
        weights[f"{name}.mlp.down_proj.weight"] = _normal(rng, 0.2, HIDDEN_SIZE, INTERMEDIATE_SIZE)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = np.ones(HIDDEN_SIZE, np.float32)
    return weights


def _normal(rng: np.random.Generator, scale: float, *shape: int) -> NDArray[np.float32]:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        "kvlane.app.demo.tiny_model", description="Write a model to a folder."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--large", action="store_true", help="the layers of a 1B, no weights")
    arguments = parser.parse_args()
    if arguments.large:
        _write_files(arguments.folder, **LARGE)
    else:
        make_model(arguments.folder)
