"""LoRA adapters for the tiny model, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvlane.app.demo.tiny_model import HIDDEN_SIZE, LAYERS, Weights, _normal, _write


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for it to a folder, which is created; returns the folder."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng, rank = np.random.default_rng(seed), 8
    weights: Weights = {}
    for layer in range(LAYERS):
        for part in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = _normal(rng, 0.2, rank, HIDDEN_SIZE)
            weights[f"{name}.lora_B.weight"] = _normal(rng, 0.2, HIDDEN_SIZE, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    _write(folder / "adapter_config.json", {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16,
        "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny", "inference_mode": True, "fan_in_fan_out": False,
        "modules_to_save": None,
    })  # fmt: skip
    return folder
