"""Fields of OpenAI's and vLLM's APIs that would change an answer and are not honoured here.

One table for chats, completions and tokenised prompts. A body in which such a field asks for
something is refused, so that no client gets another answer than it asked for; null and the values
that ask for nothing pass. Fields that change no answer (`user`, `metadata`, `store` and other
labels) are ignored, and so are names of neither API. Forwarded bodies are checked by their server.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlane.app.preprocess.prompt_errors import InvalidPrompt


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
    "include_reasoning": Unsupported((True,)),
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
}  # fmt: skip
OF_CHATS: Mapping[str, Unsupported] = {
    "add_special_tokens": _OFF,  # a chat template writes them
    "echo": _OFF,
}
"""Fields that completions alone honour."""


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
