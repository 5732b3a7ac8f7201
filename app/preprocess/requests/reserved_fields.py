"""Reserved fields, which servers set for each other and clients must not.

A client that names the engine which a KV cache is fetched from could read the prompts of others, or
make one engine connect to an address of its choice. So these fields are refused in every body, at
its top and in each object whose content reaches the engine, however deep those are nested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlane.app.preprocess.prompt_errors import InvalidPrompt

RESERVED = (
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "bootstrap_info", "prefill_result", "disaggregated_params",
)  # fmt: skip
"""Names of vLLM, SGLang and TensorRT-LLM, and of preprocessed requests."""
_PASSED_ON = ("nvext", "extra_args", "vllm_xargs", "extra_body")
"""Objects of a body that become arguments of the engine."""


def refuse_reserved(fields: Mapping[str, Any], path: str = "") -> None:
    """Raise InvalidPrompt with the path of the first reserved field that has a value."""
    for name in RESERVED:
        if fields.get(name) is not None:
            raise InvalidPrompt(f"{path}{name}", "is between servers only")
    for name in _PASSED_ON:
        inner = fields.get(name)
        if isinstance(inner, dict):
            refuse_reserved(inner, f"{path}{name}.")
