"""Refused fields: those that change answers and are not honoured, and those reserved for servers.

A body in which such a field asks for something is refused, so that no client gets another answer
than it asked for. Fields that change no answer (`user`, `metadata`, `store` and other labels) are
ignored, and so are names of neither API. Forwarded bodies are checked by their server.

A client that names the engine which a KV cache is fetched from could read the prompts of others. So
reserved fields are refused in every body, at any depth of the objects that reach the engine. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlane.app.preprocess.prompt_errors import InvalidPrompt

RESERVED = (
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "bootstrap_info", "prefill_result", "disaggregated_params",
)  # fmt: skip
"""Names of vLLM, SGLang and TensorRT-LLM, and of preprocessed requests."""
_PASSED_ON = ("nvext", "extra_args", "vllm_xargs", "extra_body")


def refuse_reserved(fields: Mapping[str, Any], path: str = "") -> None:
    """Raise InvalidPrompt with the path of the first reserved field that has a value."""
    for name in RESERVED:
        if fields.get(name) is not None:
            raise InvalidPrompt(f"{path}{name}", "is between servers only")
    for name in _PASSED_ON:
        inner = fields.get(name)
        if isinstance(inner, dict):
            refuse_reserved(inner, f"{path}{name}.")


class Unsupported(NamedTuple):
    """`neutral`: the values that ask for nothing. `instead`: what the client can do."""

    neutral: tuple[Any, ...] = ()
    instead: str = ""


_OFF = Unsupported((False,))
_EMPTY = Unsupported(([], {}, ""))

UNSUPPORTED: Mapping[str, Unsupported] = {
    # OpenAI
    "audio": Unsupported(),
    "function_call": Unsupported(("none", "auto"), "use tool_choice"),
    "functions": Unsupported(([],), "use tools"),
    "modalities": Unsupported((["text"], [])),
    "prediction": Unsupported(),
    "service_tier": Unsupported(("auto", "default"), "use nvext.queue_class"),
    "stream_options.include_obfuscation": _OFF,
    "suffix": _EMPTY,
    "verbosity": Unsupported(("medium",)),
    "web_search_options": Unsupported(),
    # vLLM
    "bad_words": _EMPTY,
    "chat_template": Unsupported(("",), "the template is the model's"),
    "continue_final_message": _OFF,
    "detokenize": Unsupported((True,)),
    "length_penalty": Unsupported((1,)),
    "logits_processors": _EMPTY,
    "priority": Unsupported((0,), "use nvext.agent_hints.priority"),
    "repetition_detection": Unsupported(),
    "return_token_ids": _OFF,
    "spaces_between_special_tokens": Unsupported((True,)),
    "stream_options.continuous_usage_stats": _OFF,
    "structured_outputs.disable_additional_properties": _OFF,
    "structured_outputs.disable_any_whitespace": _OFF,
    "structured_outputs.disable_fallback": _OFF,
    "truncate_prompt_tokens": Unsupported(),
    "truncation_side": Unsupported(),
    "use_beam_search": _OFF,
    "vllm_xargs": Unsupported(({},), "use nvext.extra_args"),
    # preprocessed requests
    "sampling_options.use_beam_search": _OFF,
    "sampling_options.length_penalty": Unsupported((1,)),
    "sampling_options.detokenize": Unsupported((True,)),
    "output_options.formatted_prompt": _OFF,
    "migration_link": Unsupported(),
}
OF_CHATS: Mapping[str, Unsupported] = {
    "add_special_tokens": _OFF,  # a chat template writes them
    "echo": _OFF,
}
OF_COMPLETIONS: Mapping[str, Unsupported] = {"include_reasoning": Unsupported((True,))}


def refuse_unsupported(
    fields: Mapping[str, Any], table: Mapping[str, Unsupported] = UNSUPPORTED
) -> None:
    """Raise InvalidPrompt with the path of the first field that asks for something."""
    for path, (neutral, instead) in table.items():
        value: Any = fields
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None and not any(_is_same(value, one) for one in neutral):
            raise InvalidPrompt(path, "is not supported" + (f": {instead}" if instead else ""))


def _is_same(value: Any, other: Any) -> bool:
    """Equality in JSON, where true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
